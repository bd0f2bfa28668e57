"""Synthetic graphs for tests and benchmarks."""
