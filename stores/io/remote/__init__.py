"""Objects far away, read by ranges of bytes, and the cache of them on a local disk."""
