"""A split of edges that a store has, as the split of links to predict: edges of all parts but one carry no messages."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ooc.graph.hetero import EdgeKey
from ooc.loading.arguments import dataset_of
from ooc.loading.link_type import LinkType, edge_type_of
from ooc.sampling.edge_split import EdgeSplit, HeldOut
from ooc.sampling.hetero_neighbor import edge_name
from ooc.sampling.links import EdgeLookup
from ooc.stores.arrays.members import Members
from ooc.stores.arrays.rows import Ids
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError

_AT_ONCE = 2**24
"""pairs of nodes in memory at a time, 8 bytes each"""
_MOST = 0.9
"""share of held-out edges that draws reckon with: those of a node are all read where they are more"""


class StoredEdgeSplit:
    """The split of edges that a store has (`ooc ingest --edge-split`), as `edge_split` of `LinkNeighborLoader`.

    Edges of all splits but the training one carry no messages in any batch, nor do their reverses, those of reverse edge types,
    and other edges between the same two nodes. An eighth of a byte for each edge says which these are.

    Args:
        data: The data set, or the path of its store.
        edge_type: Of several types, whose split it is: PyG's triple, or "source:name:target".
        train: Name of the split whose edges carry messages, as do edges in no split.

    Raises:
        ConfigError: There is no such edge type, or it has no such split.

    >>> split = StoredEdgeSplit(ds, ("user", "likes", "item"))
    >>> loader = LinkNeighborLoader(ds, [10, 10], (("user", "likes", "item"), "train"), edge_split=split, batch_size=1024)
    """

    def __init__(self, data: Dataset | Path | str, edge_type: EdgeKey | str | None = None, train: str = "train") -> None:
        data = dataset_of(data)
        there = ", ".join(map(edge_name, data.edge_types))
        alone = data.edge_types[0] if len(data.edge_types) == 1 else None
        asked = alone if edge_type is None else edge_type_of(data, edge_type)
        if asked is None:
            raise ConfigError(f"edge_type={edge_type!r}: give one of the edge types of {data.path}, {there}")
        self.links, self.train = LinkType.of(data, asked), train
        own = self.links.edges
        if train not in own.splits:
            splits = ", ".join(own.splits) or "none"
            raise ConfigError(f"{data.path} has no split {train!r} of edges (it has: {splits}): ingest it with `edge_split`")
        self._held_out: dict[EdgeKey, HeldOut] = {}
        for key in (asked, *self.links.reverses):
            self._held_out[key] = _held_out(self.links, LinkType.of(data, key), [n for n in own.splits if n != train])

    @property
    def names(self) -> tuple[str, ...]:
        """The splits."""
        return tuple(self.links.edges.splits)

    def held_out_of(self, edge_types: Iterable[EdgeKey]) -> Mapping[EdgeKey, HeldOut]:
        """The edges that carry no messages, by edge type. Raises ConfigError if the split is one of other edges."""
        wanted = set(edge_types)
        if wanted != self._held_out.keys():
            raise ConfigError(f"edge_split is of the edge type {edge_name(self.links.key)}: give one of the links' edge type")
        return self._held_out

    def members(self, name: str, edges: Iterator[tuple[Ids, Ids]], count: int) -> Members:
        """The slots of a split; see `EdgeSplit.members`, whose other arguments it needs."""
        return self.links.edges.members(name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({edge_name(self.links.key)}, train={self.train!r})"


def held_out_edges(data: Dataset, edge_split: Any) -> Mapping[EdgeKey, HeldOut]:
    """The edges that carry no messages, by edge type, for `edge_split` as `NeighborLoader` takes it.

    Raises ConfigError for another kind of split, and for one that does not say of which edge type it is.
    """
    if edge_split is None:
        return {}
    asked, split = edge_split if isinstance(edge_split, tuple) and len(edge_split) == 2 else (None, edge_split)
    if not isinstance(split, EdgeSplit | StoredEdgeSplit):
        raise ConfigError(f"edge_split must be an ooc.EdgeSplit or ooc.StoredEdgeSplit, not {type(split).__name__}")
    if asked is None and isinstance(split, StoredEdgeSplit):
        asked = split.links.key
    alone = data.edge_types[0] if len(data.edge_types) == 1 else None
    key = alone if asked is None else edge_type_of(data, asked)
    if key is None:
        there = ", ".join(map(edge_name, data.edge_types))
        raise ConfigError(f"edge_split must name one of the edge types {there}, as in ({data.edge_types[0]!r}, split)")
    return split.held_out_of((key, *LinkType.of(data, key).reverses))


def _held_out(links: LinkType, of: LinkType, splits: list[str]) -> HeldOut:
    """The edges of a type that are between the ends of a link in one of the splits."""
    count = of.graph.num_edges
    words = np.zeros(-(-count // 512) * 8, np.uint64)
    edges, found = EdgeLookup(links.graph), EdgeLookup(of.graph)
    turned = not links.same_nodes and of.key[0] != links.key[0]
    for name in splits:
        members = links.edges.members(name)
        for start in range(0, len(members), _AT_ONCE):
            slot = members[np.arange(start, min(start + _AT_ONCE, len(members)))]
            pair, at = np.unique(_pair_of(links, *edges.ends(slot))), 0
            for src, dst in found.pieces():
                ends = (dst, src) if turned else (src, dst)
                own = _pair_of(links, *ends)
                bits = np.packbits(pair[np.minimum(np.searchsorted(pair, own), len(pair) - 1)] == own, bitorder="little")
                words.view(np.uint8)[at : at + len(bits)] |= bits
                at += len(bits)
    share = int(np.bitwise_count(words).sum()) / max(1, count)
    return HeldOut(np.uint64(0), min(share, _MOST), words)


def _pair_of(links: LinkType, src: Ids, dst: Ids) -> Ids:
    """A number of a link's two ends, of nodes of one type in either order."""
    if links.same_nodes:
        src, dst = np.minimum(src, dst), np.maximum(src, dst)
    return src * links.target.num_nodes + dst
