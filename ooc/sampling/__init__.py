"""Samplers: seeds and a key -> a Subgraph. They read the graph's topology, never features."""

from ooc.sampling.neighbor import NeighborSampler, count_hop
from ooc.sampling.ondisk_neighbor import Lockstep, lockstep_bytes, read_together

__all__ = ["Lockstep", "NeighborSampler", "count_hop", "lockstep_bytes", "read_together"]
