"""Reads and writes: planned over byte ranges, and carried out by engines."""
