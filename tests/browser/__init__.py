"""What a browser shows of a run."""
