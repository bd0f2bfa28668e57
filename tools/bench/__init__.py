"""Benchmarks, each of which prints one JSON object; `docs/BENCHMARKS.md` records the figures with their commands."""
