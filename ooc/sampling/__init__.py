"""Samplers: seeds and a key -> a Subgraph. They read the graph's topology, never features."""

from ooc.sampling.neighbor import NeighborSampler, count_hop
from ooc.sampling.ondisk_neighbor import OnDiskFrontier, lockstep_bytes, read_together

__all__ = ["NeighborSampler", "OnDiskFrontier", "count_hop", "lockstep_bytes", "read_together"]
