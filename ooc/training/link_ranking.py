"""Recall@k and NDCG@k of a run of links: what it ranks first among all destinations, for sources of a part of the edges."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from copy import deepcopy
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ooc.graph.hetero import EdgeKey
from ooc.layerwise.top_k import Among, KnownLinks, Ranking, TopK
from ooc.metrics.ranking import RankingScores
from ooc.sampling.links import EdgeLookup
from ooc.stores.arrays.members import Members
from ooc.stores.arrays.mutable_rows import DiskRows
from ooc.stores.arrays.rows import AnyArray, Ids
from ooc.stores.dataset import Dataset
from ooc.stores.io.atomic import remove_tree
from ooc.training.mode import Scores

_SOURCES_AT_ONCE = 2**12
Embedded = Callable[[str, Ids | None], Iterator[tuple[Ids, AnyArray]]]
"""(node type, some of its nodes, ascending, or None for all) -> nodes and their embeddings, a batch at a time"""
Lists = Callable[[Ids, int, KnownLinks], Iterator[TopK]]
"""(sources int64[n], k, links to leave out) -> the k best destinations of the sources, some sources at a time, in order"""


class LinkRankings:
    """Scores of the ranking of all destinations, for the sources that have links in a part of the edges.

    Left out of the lists of a part are the links known before it: those that carry messages and, but for the validation part,
    those of validation.

    Args:
        dataset: The data set.
        edge_type: Of the links.
        parts: Of the edges that carry no messages: name -> slots.
        val: Name of the validation part.
        ks: The values of k.

    >>> LinkRankings(ds, ("user", "likes", "item"), {"val": slots}, "val", [20]).scores(["val"], lists)
    {'val': {'recall@20': 0.18, 'ndcg@20': 0.15}}
    """

    def __init__(self, dataset: Dataset, edge_type: EdgeKey, parts: Mapping[str, Members], val: str, ks: list[int]) -> None:
        self._dataset, self._key, self._parts, self._val, self._ks = dataset, edge_type, parts, val, ks
        self._edges, self._same = dataset.edges(edge_type), edge_type[0] == edge_type[2]

    def scores(self, wanted: Iterable[str], lists: Lists) -> dict[str, Scores]:
        """The scores of some of the parts, empty for one without links.

        Args:
            wanted: Names of the parts; the name of none of them stands for the edges that carry messages.
            lists: What ranks.

        Raises:
            BudgetError: The memory does not hold the lists of some sources.
        """
        return {name: self._score(lists, KnownLinks(None, self._edges, self._known(name)), name) for name in wanted}

    @contextmanager
    def embedded(self, wanted: Iterable[str], embedded: Embedded, decoder: nn.Module, folder: Path) -> Iterator[Lists]:
        """Lists by embeddings that are on disk meanwhile.

        Args:
            wanted: Names of the parts whose sources have embeddings.
            embedded: What makes embeddings.
            decoder: What scores pairs.
            folder: A directory of its own, which goes with the block.
        """
        ids = np.unique(np.concatenate([self._sources(self._among(name)) for name in wanted]))
        decoder = deepcopy(decoder).cpu()  # where lists are made
        remove_tree(folder)
        with ExitStack() as opened:
            opened.callback(remove_tree, folder)
            target = opened.enter_context(closing(self._rows(folder / "targets", self._key[2], embedded, None)))
            source = target
            if not self._same:
                source = opened.enter_context(closing(self._rows(folder / "sources", self._key[0], embedded, ids)))
            items = np.arange(target.shape[0])

            def lists(wanted: Ids, k: int, known: KnownLinks) -> Iterator[TopK]:
                ranking = Ranking(source, target, decoder, items, known, self._same)
                return ranking.lists(wanted, k, self._dataset.process_memory.limit)

            yield lists

    def _among(self, name: str) -> Among:
        """Which slots are of a part."""
        if name in self._parts:
            return self._parts[name].contains
        return self._carry_messages

    def _carry_messages(self, slot: Ids) -> NDArray[np.bool_]:
        return ~np.logical_or.reduce([np.zeros(len(slot), bool), *(each.contains(slot) for each in self._parts.values())])

    def _known(self, name: str) -> Among:
        """Which slots are left out of the lists of a part."""
        if name not in self._parts:
            return lambda slot: np.zeros(len(slot), bool)
        if name == self._val or self._val not in self._parts:
            return self._carry_messages
        return lambda slot: self._carry_messages(slot) | self._parts[self._val].contains(slot)

    def _sources(self, among: Among) -> Ids:
        """Sources of the links of a part, ascending."""
        met, edges = np.zeros(self._dataset.nodes(self._key[0]).num_nodes, bool), EdgeLookup(self._edges.graph)
        first = 0
        for src, _ in edges.pieces():
            met[src[among(np.arange(first, first + len(src)))]] = True
            first += len(src)
        return np.flatnonzero(met)

    def _rows(self, path: Path, node_type: str, embedded: Embedded, ids: Ids | None) -> DiskRows:
        """The embeddings of nodes of a type, by node; those of others stay 0."""
        rows: DiskRows | None = None
        count = self._dataset.nodes(node_type).num_nodes
        try:
            for node, found in embedded(node_type, ids):
                if rows is None:
                    rows = DiskRows.create(path, (count, found.shape[1]), "float32")
                rows.write(node, found)
        except BaseException:
            if rows is not None:
                rows.close()
            raise
        return DiskRows.create(path, (count, 1), "float32") if rows is None else rows

    def _score(self, lists: Lists, known: KnownLinks, name: str) -> Scores:
        """Recall@k and NDCG@k of the lists of the sources of a part."""
        among = self._among(name)
        scores, links = RankingScores(self._ks), KnownLinks(None, self._edges, among)
        k = min(max(self._ks), max(1, self._dataset.nodes(self._key[2]).num_nodes))
        for best in lists(self._sources(among), k, known):
            for first in range(0, len(best.source), _SOURCES_AT_ONCE):
                some = slice(first, first + _SOURCES_AT_ONCE)
                scores.update(torch.from_numpy(best.item[some]), self._to_find(links, known, best.source[some]))
        return {name: each for name, each in scores.compute().items() if name.startswith(("recall", "ndcg"))}

    def _to_find(self, links: KnownLinks, left_out: KnownLinks, source: Ids) -> list[torch.Tensor]:
        """The destinations that the lists of sources should have: each once, and none that is left out of them."""
        indptr, node = links.of(source)
        known_indptr, known = left_out.of(source)
        found = []
        for i in range(len(source)):
            own = np.setdiff1d(node[indptr[i] : indptr[i + 1]], known[known_indptr[i] : known_indptr[i + 1]])
            found.append(torch.from_numpy(own[own != source[i]] if self._same else own))
        return found
