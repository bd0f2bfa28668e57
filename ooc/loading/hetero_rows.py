"""What batches of several types have of the nodes of each: their rows, or the means of their neighbors' rows by edge type."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ooc.graph.aggregation import PreAggregation
from ooc.graph.hetero import EdgeKey, EdgeSample, HeteroSubgraph, without_last_hop_of
from ooc.loading.collate import Gather, SampledBatch
from ooc.loading.load_stage import Labels
from ooc.runtime.memory_plan import SHARES
from ooc.stores.arrays.members import Members
from ooc.stores.arrays.rows import AnyArray, Rows


@dataclass(frozen=True)
class TypeRows:
    """What a batch has of the nodes of one type."""

    x: Rows | None = None
    """feature rows as stored, [N, ...]; None where the type has none"""
    gather: Gather | None = None
    labels: Labels | None = None
    masks: Mapping[str, Members] = field(default_factory=dict)
    """name of a field -> the nodes it is true for"""
    values: Mapping[str, AnyArray] = field(default_factory=dict)
    """name of a field -> its value for every node, [N]: times"""
    beside: int = 0
    """bytes of memory that a node of the batch at the model takes beside its fields, such as rows of an embedding table"""

    @property
    def row_bytes(self) -> int:
        """Bytes of a node's features and labels in a batch."""
        return self.feature_bytes + self.label_bytes

    @property
    def feature_bytes(self) -> int:
        """Bytes of a node's features in a batch."""
        return 0 if self.x is None or self.gather is None else self.gather.row_bytes(self.x.shape[1:])

    @property
    def label_bytes(self) -> int:
        """Bytes of a node's labels in a batch."""
        return 0 if self.labels is None else 8 * int(np.prod(self.labels.y.shape[1:], dtype=np.int64))

    def drawn_bytes(self, aggregated: bool) -> int:
        """Bytes to count for a node as it is drawn; aggregated: its features, if any, come as aggregates that count later. Of
        the batches that memory holds at once, one has what its nodes take beside their fields."""
        return (self.label_bytes if aggregated else self.row_bytes) + -(-self.beside // SHARES)


@dataclass(frozen=True)
class TypedPreAggregation:
    """First-layer pre-aggregation by edge type: the mean of the neighbors over each edge type whose sources have features.

    Nodes of other types, such as those with an embedding table, keep their rows and edges.
    """

    step: PreAggregation
    """of the model's first layer"""
    width: int
    """columns of the features"""
    types: tuple[str, ...]
    """node types with features, in the order of their rows on disk"""
    edge_types: tuple[EdgeKey, ...]
    """those that begin at them"""
    num_rows: int
    """nodes of these types"""

    @classmethod
    def of(
        cls, step: PreAggregation | None, types: Mapping[str, TypeRows], edge_types: Collection[EdgeKey]
    ) -> "TypedPreAggregation | None":
        """None where there is nothing to aggregate, or features are not rows of as many float32 in all types."""
        found = {name: (own.x, own.gather) for name, own in types.items() if own.x is not None and own.gather is not None}
        shapes, floats = {x.shape[1:] for x, _ in found.values()}, all(gather.float32 for _, gather in found.values())
        summed = tuple(key for key in edge_types if key[0] in found)
        if step is None or step.kind != "mean" or not (summed and floats) or len(shapes) > 1:
            return None
        (width, *more) = shapes.pop()
        return None if more else cls(step, width, tuple(found), summed, sum(x.shape[0] for x, _ in found.values()))

    def destinations(self, subgraph: HeteroSubgraph) -> dict[str, int]:
        """Destinations of the first layer, by node type."""
        return {name: sum(counts[:-1]) for name, counts in subgraph.num_nodes.items()}

    def sizes(self, subgraph: HeteroSubgraph) -> tuple[int, int]:
        """(rows of aggregates, rows of destinations with features) of a batch."""
        count = self.destinations(subgraph)
        return sum(count[key[2]] for key in self.edge_types), sum(count[name] for name in self.types)

    def rest(self, drawn: SampledBatch) -> SampledBatch:
        """What remains of a batch beside its aggregates."""
        return replace(drawn, subgraph=without_last_hop_of(drawn.subgraph, self.types))

    def scale(self, edges: EdgeSample) -> NDArray[np.float32]:
        """float32[d]: what the sum over a destination's in-edges is multiplied by."""
        return (1 / np.maximum(np.diff(edges.indptr), 1)).astype(np.float32)
