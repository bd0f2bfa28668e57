"""Scripts: benchmarks, graph generators, the demo. Thin callers of `ooc` and `stores`."""
