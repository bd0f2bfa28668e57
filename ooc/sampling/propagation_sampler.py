"""Samples what LightGCN's propagation sums: the links of each layer, drawn anew for every layer.

The rows of a batch's nodes behind layer l need those of their neighbors behind layer l - 1, and their own, as outputs are means
of all layers. A node has no link to itself, so nothing else is needed there. Each layer draws links of its own: a walk of three
links comes back to the node that it began at, and the expectation of a product of links is that of the links only if they are
drawn independently of each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ooc.graph.relabel import RelabelTable
from ooc.runtime.keyed_random import numbered
from ooc.runtime.memory_plan import words_for
from ooc.sampling.kernels import count_edges, draw_uniform
from ooc.stores.arrays.rows import AnyArray, Ids
from ooc.stores.errors import BudgetError
from ooc.stores.jit import kernel

EDGE_BYTES = 40
"""of a sampled link while its hop is drawn: its slot, its neighbor's id and number, and a table of all that are numbered"""
Ints = NDArray[np.int32]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class LayerLinks:
    """The sampled links of one layer, in the order of the nodes that sum and in that of their neighbors.

    A node v with d links, of which k are drawn, gets d / k times the sum over these of x[u] / sqrt(d * degree of u).
    """

    indptr: Ints
    """int32[n + 1]: where each node's links begin"""
    neighbor: Ints
    """int32[links]: which row of the layer below"""
    back_indptr: Ints
    """int32[m + 1]: the same by row of the layer below"""
    back: Ints
    """int32[links]: which node sums it"""
    factor: Floats
    """float32[n, 1]: d / k / sqrt(d) of the nodes that sum"""
    weight: Floats
    """float32[m, 1]: 1 / sqrt(degree) of the rows of the layer below"""


@dataclass(frozen=True)
class SampledLayers:
    """What the propagated rows of some nodes are computed from."""

    node: Ids
    """int64[r], ascending: whose rows of the table"""
    seed: Ids
    """int64[s]: where those of the batch's nodes are among them"""
    layers: tuple[LayerLinks, ...]
    """from the first layer on; behind it the batch's nodes are in front"""

    @property
    def num_links(self) -> int:
        """Of all layers."""
        return sum(len(each.neighbor) for each in self.layers)

    @property
    def num_rows(self) -> int:
        """Of all layers, those of the table among them."""
        return sum(len(each.weight) for each in self.layers) + len(self.seed)


class PropagationSampler:
    """Draws the links of each layer, a function of the key; one for any number of threads.

    Args:
        indptr: Where each node's neighbors begin, int64[N + 1].
        neighbor: int32 or int64[links]; may be a memory map.
        weight: 1 / sqrt(degree) of each node, float32[N].
        fanout: Neighbors of a node, -1 for all; the first number is that of the batch's nodes.
        row_bytes: Of a row of any layer, with what is computed of it; table_bytes: of the table's, besides.
        max_bytes: Of what is sampled, with its rows; None: any.

    >>> sampler = PropagationSampler(adjacency.indptr, adjacency.neighbor, weight, [10, 10, 10])
    >>> sampler.sample(np.array([3, 70]), key=7).node
    """

    def __init__(
        self,
        indptr: Ids,
        neighbor: AnyArray,
        weight: Floats,
        fanout: Sequence[int],
        row_bytes: int = 0,
        table_bytes: int = 0,
        max_bytes: int | None = None,
    ) -> None:
        self._indptr, self._neighbor, self._weight, self._fanout = indptr, neighbor, weight, list(fanout)
        self._row_bytes, self._table_bytes, self._max_bytes = row_bytes, table_bytes, max_bytes

    def nbytes(self, layers: SampledLayers) -> int:
        """Of memory, with the rows."""
        return self._bytes(layers.num_links, layers.num_rows, len(layers.node))

    def sample(self, seeds: Ids, key: int) -> SampledLayers:
        """Draw the links of `seeds`.

        Args:
            seeds: Distinct nodes, int64[s].
            key: Of the draws.

        Returns:
            The links of each layer, and the nodes whose rows they need.

        Raises:
            BudgetError: They take more than `max_bytes`; before they are drawn.
        """
        node, found, links, rows = seeds, list[LayerLinks](), 0, len(seeds)
        place: AnyArray = np.arange(len(seeds))
        for hop, fanout in enumerate(self._fanout):
            count, _, _ = count_edges(self._indptr, node, 0, len(node), fanout, False)
            links, most = links + count, min(len(seeds) + count, len(self._weight))
            self._check(hop, links, rows + most, most, len(seeds))
            numbers = RelabelTable(len(seeds) + count)
            numbers.add(seeds)
            slot, indptr = np.empty(count, np.int64), np.zeros(len(node) + 1, np.int64)
            draw_uniform(self._indptr, node, 0, len(node), fanout, False, np.uint64(numbered(key, hop)), slot, indptr)
            neighbor, below = numbers.add(np.asarray(self._neighbor[slot])), numbers.nodes()
            if hop + 1 == len(self._fanout):  # rows of the table are ascending, so that those of a node type are together
                below, rank = numbers.ascending(len(below))
                neighbor, place = rank[neighbor], rank[place]
            found.append(self._links(node, below, indptr, neighbor))
            node, rows = below, rows + len(below)
        return SampledLayers(node, place.astype(np.int64), tuple(found[::-1]))

    def _links(self, node: Ids, below: Ids, indptr: Ids, neighbor: Ints) -> LayerLinks:
        """The links of a layer. node: that sum; below: of the layer below, which `neighbor` numbers."""
        back_indptr, back = np.zeros(len(below) + 1, np.int32), np.empty(len(neighbor), np.int32)
        _turn(indptr, neighbor, back_indptr, back)
        stands_for = (self._indptr[node + 1] - self._indptr[node]) / np.maximum(np.diff(indptr), 1)
        factor = (self._weight[node] * stands_for).astype(np.float32)
        turned = back_indptr, back
        return LayerLinks(indptr.astype(np.int32), neighbor, *turned, factor[:, None], self._weight[below][:, None])

    def _bytes(self, links: int, rows: int, of_table: int) -> int:
        return EDGE_BYTES * links + self._row_bytes * rows + self._table_bytes * of_table

    def _check(self, hop: int, links: int, rows: int, nodes: int, seeds: int) -> None:
        """Raise BudgetError where the hops so far take too much. nodes: rows of the layer below at most."""
        if self._max_bytes is not None and self._bytes(links, rows, nodes) > self._max_bytes:
            most = links
            for fanout in self._fanout[hop + 1 :]:  # what is enough for all of them
                own = len(self._neighbor) if fanout < 0 else min(nodes * fanout, len(self._neighbor))
                nodes = min(seeds + own, len(self._weight))
                most, rows = most + own, rows + nodes
            need = self._bytes(most, rows, nodes)
            raise BudgetError(
                f"hop {hop + 1} of fan-out {','.join(map(str, self._fanout))} samples {links:,} links, so the batch may need "
                f"{words_for(need, self._max_bytes)}: give a smaller `fanout` or `batch_size`, or more memory"
            )


@kernel
def _turn(indptr: Ids, neighbor: Ints, begin: Ints, node: Ints) -> None:
    """The same links by their neighbors, in the order of the nodes, by counting.

    begin: int32[rows + 1], zeros, where those of each neighbor begin; node: int32[links], output.
    """
    for j in range(len(neighbor)):
        begin[neighbor[j] + 1] += 1
    for i in range(1, len(begin)):
        begin[i] += begin[i - 1]
    at = begin[:-1].copy()
    for i in range(len(indptr) - 1):
        for j in range(indptr[i], indptr[i + 1]):
            node[at[neighbor[j]]] = i
            at[neighbor[j]] += 1
