"""Training on temporal graphs."""
