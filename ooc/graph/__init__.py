"""Blocks, first-layer aggregation, relabelling, and memory-mapped topology."""
