"""Published scores, repeated."""
