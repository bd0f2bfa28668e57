"""The links of a store as (head, relation, tail) of one numbering of nodes: what knowledge graph embeddings are trained on.

Relations are the labels of edges that are classes; each edge type has its own, and one that has no such labels is
one relation. Nodes of several types stand behind one another.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.graph.hetero import EdgeKey
from ooc.loading.link_type import edge_type_of
from ooc.loading.stored_edge_split import StoredEdgeSplit
from ooc.runtime.memory_plan import EDGE_LABELS_SHARE
from ooc.sampling.edge_split import EdgeSplit
from ooc.sampling.hetero_neighbor import edge_name
from ooc.sampling.links import EdgeLookup
from ooc.stores.arrays.members import Members
from ooc.stores.arrays.rows import Ids
from ooc.stores.dataset import Dataset
from ooc.stores.edge_set import EdgeSet
from ooc.stores.errors import ConfigError

Triples = tuple[Ids, Ids, Ids]
"""heads, relations, tails: int64[k] each"""

_FORGOTTEN = 4
"""pieces of edges in memory at most"""


@dataclass(frozen=True)
class RelationPart:
    """The edges of one type, and what the numbers of their ends and relations begin with. labelled: whether its labels are
    relations."""

    key: EdgeKey
    edges: EdgeSet
    head: int
    tail: int
    relation: int
    labelled: bool

    @property
    def unused_labels(self) -> bool:
        """Whether it has labels that are no relations, as they are no classes: numbers, or several of an edge."""
        return self.edges.task is not None and not self.labelled


class RelationLinks:
    """The links of a data set; all of an edge type, or of all types.

    Args:
        dataset: The data set.
        edge_type: Of a heterogeneous store: the type, as "user:likes:item"; None: the one there is, or all, each a relation.
        relations: Whether links have relations; without them there must be one edge type.

    Raises:
        ConfigError: There is no such type, no edge, or several where one is needed.

    >>> links = RelationLinks(ds, None, relations=True)
    >>> next(links.pieces())
    (array([0, 1]), array([3, 3]), array([1, 2]))
    """

    def __init__(self, dataset: Dataset, edge_type: str | None, relations: bool) -> None:
        self.dataset = dataset
        keys = self._types(edge_type, relations)
        self.first: dict[str, int] = {}
        """node type -> the number of its first node"""
        total = 0
        for key in keys:
            for name in (key[0], key[2]):
                if name not in self.first:
                    self.first[name], total = total, total + dataset.nodes(name).num_nodes
        self.num_nodes = total
        self.num_relations = 0
        self.parts: list[RelationPart] = []
        for key in keys:
            edges = dataset.edges(key)
            labelled = relations and edges.task in ("binary", "multiclass")
            own = RelationPart(key, edges, self.first[key[0]], self.first[key[2]], self.num_relations, labelled)
            self.parts.append(own)
            self.num_relations += 0 if not relations else edges.num_classes or 1 if labelled else 1
        if not self.num_edges:
            raise ConfigError(f"{dataset.path} holds no edges to predict: ingest it with `edges`")

    def _types(self, asked: str | None, relations: bool) -> list[EdgeKey]:
        dataset = self.dataset
        if not dataset.is_hetero:
            if asked is not None:
                one = f"edge_type applies to heterogeneous stores, and {dataset.path} has one edge type: leave it out"
                raise ConfigError(one)
            return [dataset.edge_types[0]]
        there = ", ".join(map(edge_name, dataset.edge_types))
        own = [key for key in dataset.edge_types if dataset.edges(key).reverse_of is None]
        if asked is not None:
            found = edge_type_of(dataset, asked)
            if found is None:
                raise ConfigError(f"edge_type = {asked!r}: {dataset.path} has no such edge type: it has {there}")
            return [found]
        if len(own) > 1 and not relations:
            raise ConfigError(
                f"{dataset.path} has the edge types {there}: choose the links' one, as in `edge_type={edge_name(own[0])!r}`"
            )
        return own

    @property
    def num_edges(self) -> int:
        """Edges of all splits."""
        return sum(each.edges.num_edges for each in self.parts)

    @property
    def has_splits(self) -> bool:
        """Whether the store has a split of all these edges."""
        return all(each.edges.splits for each in self.parts)

    @property
    def heads(self) -> range:
        """Nodes that may be heads: of one edge type those of its source type."""
        return self._ends(0)

    @property
    def tails(self) -> range:
        """Nodes that may be tails."""
        return self._ends(2)

    def _ends(self, side: int) -> range:
        if len(self.parts) > 1:
            return range(self.num_nodes)
        name = self.parts[0].key[side]
        return range(self.first[name], self.first[name] + self.dataset.nodes(name).num_nodes)

    def pieces(self, members: "list[Members] | None" = None, memory: int = 0) -> Iterator[Triples]:
        """The links, a piece at a time, in order of their slots.

        Args:
            members: Those of a split (`RelationSplit.members`); None: all.
            memory: Bytes of the process's memory, of which labels may take a share.
        """
        for number, part in enumerate(self.parts):
            label = _labels(part, memory // EDGE_LABELS_SHARE) if part.labelled else None
            first = 0
            for source, target in _scanned(part.edges):
                slot = np.arange(first, first + len(source))
                first += len(source)
                if members is not None:
                    some = members[number].contains(slot)
                    slot, source, target = slot[some], source[some], target[some]
                yield source + part.head, self._relations(part, slot, label), target + part.tail

    def _relations(self, part: RelationPart, slot: Ids, label: NDArray[Any] | None) -> Ids:
        if label is None:
            return np.full(len(slot), part.relation)
        found = np.asarray(label[part.edges.graph.edge_ids(slot)]).astype(np.int64)
        if len(found) and found.min() < 0:
            raise ConfigError(f"{self.dataset.path} has an edge without a label, its relation: give every edge one")
        return found + part.relation


class RelationSplit:
    """Which links are of training, validation and test: the split that the store has, or one at random.

    Args:
        links: The links.
        shares: Of validation and test, at random; None: the store's split.
        train: Name of the store's split to train on.
        seed: Of the random split.

    Raises:
        ConfigError: The store has no such split.

    >>> RelationSplit(links, None).names
    ('train', 'val', 'test')
    """

    def __init__(self, links: RelationLinks, shares: tuple[float, float] | None, train: str = "train", seed: int = 0) -> None:
        self._links = links
        self._splits: list[EdgeSplit | StoredEdgeSplit] = []
        for part in links.parts:
            stored = shares is None
            self._splits.append(
                StoredEdgeSplit(links.dataset, part.key, train) if stored else EdgeSplit(*(shares or (0.0, 0.0)), seed)
            )
        self._members: dict[str, list[Members]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The splits."""
        return tuple(dict.fromkeys(name for each in self._splits for name in each.names))

    def members(self, name: str) -> list[Members]:
        """The slots of a split by edge type; an eighth of a byte for each edge."""
        if name not in self._members:
            found = []
            for part, split in zip(self._links.parts, self._splits, strict=True):
                count = part.edges.num_edges
                if name in split.names:
                    found.append(split.members(name, _scanned(part.edges), count))
                else:
                    found.append(Members(np.zeros(-(-count // 512) * 8, np.uint64)))
            self._members[name] = found
        return self._members[name]

    def count(self, name: str) -> int:
        """Links of a split."""
        return sum(len(each) for each in self.members(name))

    def count_of(self, name: str) -> int:
        """Links of a split, 0 where there is none of that name."""
        return self.count(name) if name in self.names else 0

    def links(self, name: str, memory: int = 0) -> Triples:
        """All links of a split: 24 bytes each."""
        found = list(self._links.pieces(self.members(name), memory))
        none = np.empty(0, np.int64)
        heads, relations, tails = (np.concatenate([none, *each]) for each in zip(*found, strict=True))
        return heads, relations, tails


def _scanned(edges: EdgeSet) -> Iterator[tuple[Ids, Ids]]:
    """The ends of all edges, a piece at a time, forgotten behind it: see `ooc.runtime.memory_plan.SCANNED_BYTES`."""
    for number, piece in enumerate(EdgeLookup(edges.graph).pieces(), 1):
        yield piece
        if number % _FORGOTTEN == 0:
            edges.graph.forget()
    edges.graph.forget()


def _labels(part: RelationPart, room: int) -> NDArray[Any]:
    """The labels by edge id: in memory, as small as they can be, if they take `room` bytes at most."""
    mapped = part.edges.labels
    assert mapped is not None
    kind = np.min_scalar_type(-max(1, part.edges.num_classes or 1))
    if len(mapped) * kind.itemsize > room:
        return mapped
    return np.asarray(mapped).astype(kind)
