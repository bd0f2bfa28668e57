"""Exact training on the whole graph, layer by layer and chunk by chunk, every intermediate where it is cheapest."""
