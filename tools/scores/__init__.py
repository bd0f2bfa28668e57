"""Published scores, reproduced."""
