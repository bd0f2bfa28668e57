"""`DeviceSubgraph`: a batch's neighborhood that was sampled on the device, and stays there."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ooc.runtime.transfer import HostCopy


@dataclass(frozen=True, eq=False)
class DeviceSubgraph:
    """Stands for a `Subgraph` of uniform sampling. What it has as numpy arrays is copied to the host when it is first asked
    for: the nodes where features or labels are gathered there, the slots where edges have columns."""

    n_id: Tensor
    """int64[n]: node id of each local node, in hop order"""
    edge_indptr: Tensor
    """int64[d+1]: edges of each expanded local node"""
    edge_index: Tensor
    """int64[2, e]: (source, destination) of every edge, sorted by destination"""
    edge_slot: Tensor
    """int64[e]: the edge's slot in the graph's CSC"""
    degree: Tensor
    """int64[n]: in-degree in the whole graph"""
    num_nodes: tuple[int, ...]
    """new nodes per hop, seeds first"""
    num_edges: tuple[int, ...]
    """edges per hop"""
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """graph columns read for these edges, [e] each"""
    host: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    """the copies there are"""
    stands_for: None = None
    tree: None = None
    unequal: bool = False

    @property
    def node(self) -> NDArray[np.int64]:
        return self._copied("n_id")

    @property
    def indptr(self) -> NDArray[np.int64]:
        return self._copied("edge_indptr")

    @property
    def source(self) -> NDArray[np.int64]:
        return np.asarray(self._copied("edge_index")[0])

    @property
    def slot(self) -> NDArray[np.int64]:
        return self._copied("edge_slot")

    @property
    def size(self) -> tuple[int, int]:
        """Numbers of nodes and edges."""
        return self.n_id.numel(), self.edge_slot.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of a `Subgraph` of this size."""
        return 8 * (self.n_id.numel() + self.edge_indptr.numel() + 2 * self.edge_slot.numel())

    @property
    def column_bytes(self) -> int:
        """Size of `columns` in bytes."""
        return sum(each.nbytes for each in self.columns.values())

    def share(self) -> None:
        """See `Subgraph.share`: edges are drawn with equal probabilities."""

    def without_last_hop(self) -> "DeviceSubgraph":
        """A copy without its last hop."""
        num_nodes, num_edges = self.num_nodes[:-1], self.num_edges[:-1]
        nodes, edges, expanded = sum(num_nodes), sum(num_edges), sum(num_nodes[:-1])
        rest = DeviceSubgraph(
            self.n_id[:nodes].clone(),
            self.edge_indptr[: expanded + 1].clone(),
            self.edge_index[:, :edges].clone(),
            self.edge_slot[:edges].clone(),
            self.degree[:nodes].clone(),
            num_nodes,
            num_edges,
            {name: column[:edges].copy() for name, column in self.columns.items()},
        )
        if self.n_id.is_cuda:  # whose copies have yet to be made when the sampler's stream may have the memory again
            for each in (self.n_id, self.edge_indptr, self.edge_index, self.edge_slot, self.degree):
                each.record_stream(torch.cuda.current_stream(self.n_id.device))
        return rest

    def _copied(self, name: str) -> NDArray[np.int64]:
        if name not in self.host:
            self.host[name] = HostCopy([getattr(self, name)]).arrays()[0]
        return self.host[name]
