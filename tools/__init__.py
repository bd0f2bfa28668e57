"""Scripts: benchmarks, graph makers, the demo. Thin callers of `ooc` and `stores`."""
