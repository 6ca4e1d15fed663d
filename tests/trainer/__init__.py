"""The callback in a real Trainer."""
