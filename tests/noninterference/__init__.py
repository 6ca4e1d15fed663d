"""Training with the callback equals training without it, bit for bit."""
