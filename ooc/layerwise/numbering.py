"""Where the nodes and edges of a graph stand in the whole graph that it is a part of: dropout is keyed by that place."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ooc.stores.graph import Graph

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Numbering:
    """node: int64[n], ids of a part's nodes in the whole graph; None: the graph is whole. begin: int64[d], of those that have
    in-edges in the part, where their slots begin in the whole graph, which has `num_edges`.

    >>> Numbering(node=np.array([7, 8, 2])).nodes(1, 3)
    array([8, 2])
    """

    node: Ints | None = None
    begin: Ints | None = None
    num_edges: int = 0

    def nodes(self, first: int, stop: int) -> Ints:
        """Ids of nodes first:stop, int64[stop - first]."""
        return np.arange(first, stop) if self.node is None else self.node[first:stop]

    def nodes_at(self, at: Ints) -> Ints:
        """Ids of some nodes."""
        return at if self.node is None else self.node[at]

    def edges(self, graph: Graph, first: int, stop: int) -> Ints:
        """Places of the in-edges of nodes first:stop, and behind those of all edges of their self-loops."""
        slots = np.arange(int(graph.indptr[first]), int(graph.indptr[stop]))
        total = graph.num_edges if self.node is None else self.num_edges
        if self.begin is not None:
            here = np.asarray(graph.indptr[first : stop + 1], np.int64)
            slots += np.repeat(self.begin[first:stop] - here[:-1], np.diff(here))
        return np.concatenate([slots, total + self.nodes(first, stop)])


WHOLE = Numbering()
"""of the whole graph"""
