"""Benchmarks: each prints one JSON object; `docs/BENCHMARKS.md` keeps the figures with the command that gave them."""
