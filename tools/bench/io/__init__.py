"""Benchmarks of engines, topology, ingest, append and temporal reads."""
