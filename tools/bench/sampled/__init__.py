"""Benchmarks of sampled training."""
