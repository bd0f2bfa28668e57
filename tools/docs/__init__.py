"""Scripts that draw what the documentation shows."""
