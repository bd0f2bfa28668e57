"""Arrays on disk, addressed by row."""
