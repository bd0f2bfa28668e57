"""Benchmarks of layer-wise passes, exact steps and node memory."""
