"""The rows of a run with a table, and what scores them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ooc.layerwise.filtered_ranks import RowTable
from ooc.loading.relation_links import RelationLinks, RelationPart
from ooc.models.link_scores import LinkScorer
from ooc.sampling.hetero_neighbor import edge_name
from ooc.stores.arrays.rows import AnyArray, Ids
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError
from ooc.training.predictions import external_ids

_ONE_BY_ONE = 64
"""Rows are read one by one where they are fewer than a 64th of all"""


def check_numbering(run: Path, links: RelationLinks, ended: Mapping[str, Any]) -> None:
    """Raise ConfigError where a run ended with rows of other nodes than the store has now.

    ended: "rows", their number, and "first", the number of the first node of each type, of which earlier versions said nothing.
    """
    first = dict(links.first)
    if (ended["rows"], ended.get("first", first)) != (links.num_nodes, first):
        raise ConfigError(
            f"{run} has rows of the nodes that {links.dataset.path} had before it grew: go on with the run "
            "(`resume=True` and `grown=True` of `ooc train`)"
        )


@dataclass(frozen=True)
class TrainedTable:
    """Rows of all nodes in one numbering, and what scores them."""

    dataset: Dataset
    links: RelationLinks
    scorer: LinkScorer
    table: RowTable

    def rows_of(self, nodes: Ids) -> AnyArray:
        """The rows of nodes, float32[n, width]: each by itself, or where they are many in one pass over the table."""
        if len(nodes) < self.links.num_nodes // _ONE_BY_ONE:
            return self.table.read(nodes)
        found = np.empty((len(nodes), self.scorer.width), np.float32)
        order = np.argsort(nodes, kind="stable")
        ascending = nodes[order]
        for ids, rows in self.table.blocks():
            first, last = (np.searchsorted(ascending, ids, side) for side in ("left", "right"))
            count = last - first
            at = np.repeat(first - (np.cumsum(count) - count), count) + np.arange(int(count.sum()))
            found[order[at]] = np.repeat(rows, count, axis=0)
        return found

    def external(self, nodes: Ids, tails: bool) -> pa.Array:
        """The user's own ids of heads or tails; where these are of several types whose ids are of several kinds, as words."""
        parts = self.links.parts
        if len(parts) == 1:
            name = parts[0].key[2 if tails else 0]
            return external_ids(self.dataset.nodes(name), nodes - self.links.first[name])
        starts = np.array(list(self.links.first.values()))
        of, found = np.searchsorted(starts, nodes, side="right") - 1, []
        for number, name in enumerate(self.links.first):
            found.append(external_ids(self.dataset.nodes(name), nodes[of == number] - starts[number]))
        if len({part.type for part in found}) > 1:
            found = [part.cast(pa.string()) for part in found]
        place = np.empty(len(nodes), np.int64)
        place[np.argsort(of, kind="stable")] = np.arange(len(nodes))
        return pa.concat_arrays(found).take(pa.array(place))

    @property
    def relation_names(self) -> list[str] | None:
        """Names of the relations, by number; None where they are numbers, or there are none."""
        parts = self.links.parts
        if not self.scorer.num_relations:
            return None
        return parts[0].edges.class_names if len(parts) == 1 else [name for part in parts for name in _names_of(part)]

    def first_of(self, node_type: str | None) -> tuple[str, int]:
        """(the type, the number of its first node). Raises ConfigError where it is not said, or has no rows."""
        types = list(self.links.first)
        if node_type is None and len(types) == 1:
            return types[0], 0
        if node_type not in types:
            given = "" if node_type is None else f"node_type = {node_type!r} is invalid: "
            raise ConfigError(f"{given}the run has rows of {' and '.join(types)}: choose one, as in `node_type={types[0]!r}`")
        return node_type, self.links.first[node_type]

    def candidates(self, reverse: bool) -> Callable[[Ids], NDArray[np.bool_]] | None:
        """Which nodes may be answers; None: all."""
        ends = self.links.heads if reverse else self.links.tails
        if len(ends) == self.links.num_nodes:
            return None
        return lambda ids: (ids >= ends.start) & (ids < ends.stop)


def _names_of(part: RelationPart) -> list[str]:
    """Names of the relations of an edge type, of a store with several."""
    name, edges = edge_name(part.key), part.edges
    if not part.labelled:
        return [name]
    classes = edges.class_names or []
    return [f"{name}={classes[i] if i < len(classes) else i}" for i in range(edges.num_classes or 1)]
