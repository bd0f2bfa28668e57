"""Samplers map seeds and a key to a Subgraph; they read the graph's topology, never features."""

from ooc.sampling.hetero_neighbor import HeteroNeighborSampler
from ooc.sampling.neighbor import NeighborSampler
from ooc.sampling.ondisk_neighbor import OnDiskFrontier, frontier_bytes, read_together

__all__ = ["HeteroNeighborSampler", "NeighborSampler", "OnDiskFrontier", "frontier_bytes", "read_together"]
