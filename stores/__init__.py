"""Bytes and arrays on disk: rows, read plans, engines, the graph, ingest. Imports no torch."""
