"""Samplers: seeds and a key -> a Subgraph. They read the graph's topology, never features."""

from ooc.sampling.neighbor import NeighborSampler, count_hop

__all__ = ["NeighborSampler", "count_hop"]
