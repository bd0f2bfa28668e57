"""Ranking everything: for every source the items with the highest scores, without the links that are known.

Scores are computed tile by tile, of a fixed size, so they do not depend on the memory. As many tiles of sources as the memory
holds share one pass over the items' rows, which are read front to back.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ooc.models.edge_decoders import MLPDecoder, make_decoder
from ooc.models.layers import evaluating
from ooc.runtime.memory_plan import RANKED_SHARE
from ooc.stores.arrays.rows import ArrayRows, Ids, Rows
from ooc.stores.arrays.zarr_rows import open_zarr_rows
from ooc.stores.dataset import Dataset
from ooc.stores.edge_set import EdgeSet
from ooc.stores.errors import BudgetError, ConfigError, InputError, OocError
from ooc.stores.jit import kernel
from ooc.stores.process import ProcessMemory
from ooc.stores.sizes import format_bytes, parse_bytes

Among = Callable[[Ids], NDArray[np.bool_]]
SOURCES, ITEMS = 512, 4096
"""of a tile of scores"""
_EDGES_AT_ONCE = 2**22
_LINK_BYTES = 64
"""of memory that a known link of a source takes while those of a group are put in order"""


class TopK(NamedTuple):
    """The best items of each source."""

    source: Ids
    """int64[n]"""
    item: Ids
    """int64[n, k], from the best on; -1 where a source has fewer"""
    score: NDArray[np.float32]
    """float32[n, k]; -inf where a source has fewer"""

    @classmethod
    def empty(cls, source: Ids, k: int) -> Self:
        """Lists without items."""
        return cls(source, np.full((len(source), k), -1, np.int64), np.full((len(source), k), -np.inf, np.float32))


def top_k(
    rows: Any,
    k: int,
    *,
    item_rows: Any = None,
    sources: Any = None,
    items: Any = None,
    decoder: str | nn.Module = "dot",
    known: Any = None,
    memory: str | int | None = None,
) -> TopK:
    """Rank all items for every source and keep the best, in blocks that fit the memory.

    Of equal scores the item with the smaller id comes first. A source is never its own item.

    Args:
        rows: Embeddings of all nodes, [N, d]: an array, a tensor, what `ooc.embed` returns, or the path of a Zarr array.
        k: Items to keep for each source, 1 or more.
        item_rows: Embeddings of all items, [M, d], where these are nodes of another type; None: `rows`.
        sources: Node ids to rank for, int[n]; None: all nodes.
        items: Node ids to rank, int[m]; None: all nodes, or all rows of `item_rows`.
        decoder: "dot", or a module that scores src [..., d] and dst [..., d] as `ooc.models.edge_decoders` do.
        known: Links to leave out: a data set or its edges of a type (`ds.edges(("user", "likes", "item"))`), from a source to
            an item; or pairs int[2, e] of sources and items.
        memory: Of the process, such as "2GB"; None: half of what is available.

    Returns:
        The items and their scores by source; n * k * 12 bytes.

    Raises:
        ConfigError: An argument does not fit.
        InputError: An id is no node.
        BudgetError: The memory does not hold one block.
        OocError: A score is NaN.

    >>> best = ooc.top_k(ooc.embed("runs/links", "shop.ooc"), 20, sources=users, items=products, known=ds)
    >>> best.item[0]  # of users[0]
    """
    check_k(k)
    with ExitStack() as opened:
        own = _embeddings(rows, "rows", opened)
        other = own if item_rows is None else _embeddings(item_rows, "item_rows", opened)
        width, count = own.shape[1], (own.shape[0], other.shape[0])
        if other.shape[1] != width:
            raise ConfigError(f"rows have {width} columns and item_rows {other.shape[1]}: both are of the same decoder")
        source, item = _ids(sources, "sources", count[0]), np.unique(_ids(items, "items", count[1]))
        if not isinstance(decoder, str | nn.Module):
            raise ConfigError(f"decoder must be 'dot' or a module, not {decoder!r}")
        model = make_decoder(decoder, width) if isinstance(decoder, str) else decoder
        if isinstance(decoder, str) and any(True for _ in model.parameters()):
            raise ConfigError(f"decoder {decoder!r} has parameters: give the trained module, not its name")
        ranking = Ranking(own, other, model, item, _known_of(known, count), item_rows is None)
        found = TopK.empty(source, int(k))
        for part in ranking.groups(source, int(k), memory):
            ranking.fill(TopK(found.source[part], found.item[part], found.score[part]))
        return found


def check_k(k: Any, name: str = "k") -> None:
    """Raise ConfigError for a number of items to keep that is none. name: of the argument."""
    if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
        raise ConfigError(f"{name} must be a whole number of 1 or more, not {k!r}")


@dataclass(frozen=True)
class Ranking:
    """What lists of items are made of. same: whether items are nodes of the sources' type: a source is not its own item.

    >>> ranking = Ranking(users, products, decoder, np.arange(products.shape[0]), KnownLinks(None, likes), same=False)
    >>> best = TopK.empty(np.arange(512), k=10)
    >>> ranking.fill(best)
    """

    rows: Rows
    """of sources"""
    item_rows: Rows
    decoder: nn.Module
    items: Ids
    """int64[m], ascending"""
    known: "KnownLinks"
    same: bool

    def groups(self, source: Ids, k: int, memory: str | int | None) -> Iterator[slice]:
        """Parts of `source` (int64[n]) whose rows, known links and lists of k items the memory holds at once.

        Raises BudgetError where it does not hold those of one tile.
        """
        limit, width = ProcessMemory.measure(None if memory is None else parse_bytes(memory, "memory")), self.rows.shape[1]
        left = _room(limit, width)
        links = np.add.reduceat(self.known.counts(source), np.arange(0, len(source), SOURCES)) if len(source) else source
        need = SOURCES * (12 * k + 8 * width) + _LINK_BYTES * links
        if len(need) and need.max() > left:
            whole = format_bytes(limit.limit + RANKED_SHARE * (int(need.max()) - left))
            raise BudgetError(
                f"ranking {SOURCES} sources at a time, which have up to {int(links.max()):,} known links, takes {whole} of "
                f"memory, more than {format_bytes(limit.limit)}: give that much, or a smaller k"
            )
        return _grouped(need, left, len(source))

    def lists(self, source: Ids, k: int, memory: str | int | None) -> Iterator[TopK]:
        """The lists of k items of `source` (int64[n]), of as many at a time as the memory holds; see `groups` and `fill`."""
        for part in self.groups(source, k, memory):
            best = TopK.empty(source[part], k)
            self.fill(best)
            yield best

    def fill(self, best: TopK) -> None:
        """Fill the lists of some sources in one pass over the items. Raises OocError for a score that is NaN."""
        source, none = _read(self.rows, best.source), np.full(len(best.source), -1)
        indptr, node = self.known.of(best.source)
        own_item = best.source if self.same else none
        with evaluating(self.decoder):
            for first in range(0, len(self.items), ITEMS):
                item = self.items[first : first + ITEMS]
                target = _read(self.item_rows, item)
                for start in range(0, len(best.source), SOURCES):
                    tile = slice(start, start + SOURCES)
                    scores = _scores(self.decoder, source[tile], target)
                    own = indptr[start : start + len(scores) + 1]
                    if not keep_best(scores, own_item[tile], item, own, node, best.item[tile], best.score[tile]):
                        raise OocError("the decoder scored a pair with NaN: the embeddings or its parameters are not finite")


@torch.no_grad()
def _scores(decoder: nn.Module, source: Tensor, target: Tensor) -> NDArray[np.float32]:
    """float32[b, m]."""
    every = None if isinstance(decoder, MLPDecoder) else getattr(decoder, "every", None)
    one_by_one = (decoder(row.unsqueeze(0), target) for row in source)
    scores = torch.stack(list(one_by_one)) if every is None else every(source, target)
    return np.ascontiguousarray(scores.float().numpy())


def _read(rows: Rows, ids: Ids) -> Tensor:
    out = np.empty((len(ids), *rows.shape[1:]), rows.dtype)
    rows.read(ids, out)
    return torch.from_numpy(out).float()


def _room(limit: ProcessMemory, width: int) -> int:
    """Bytes for the sources of a group, beside a tile of scores and of items' rows."""
    return (limit.limit - limit.baseline) // RANKED_SHARE - 4 * ITEMS * (width + 3 * SOURCES)


def _grouped(need: Ids, room: int, num_sources: int) -> Iterator[slice]:
    """Tiles of sources in as few groups as fit; need: bytes of each tile, none more than `room`."""
    first, taken = 0, 0
    for tile, each in enumerate(need.tolist()):
        if taken + each > room:
            yield slice(first, tile * SOURCES)
            first, taken = tile * SOURCES, 0
        taken += each
    if first < num_sources:
        yield slice(first, num_sources)


class KnownLinks:
    """Links to leave out, by source. pair: int64[2, e], or edges of a type; among: which of slots (int64[k]) are edges to
    leave out, bool[k]; None for all."""

    def __init__(self, pair: Ids | None, edges: EdgeSet | None = None, among: Among | None = None) -> None:
        self._edges, self._among = edges, among
        self._pair = np.empty((2, 0), np.int64) if pair is None else pair[:, np.argsort(pair[0], kind="stable")]

    def counts(self, source: Ids) -> Ids:
        """How many links each of `source` (int64[n]) has at most: int64[n]."""
        if self._edges is None:
            first, last = (np.searchsorted(self._pair[0], source, side) for side in ("left", "right"))
            return np.asarray(last - first)
        if self._edges.undirected:
            return self._edges.graph.degree(source)
        count = np.zeros(int(source.max(initial=-1)) + 1, np.int64)
        for src, _ in _pieces(self._edges):
            np.add.at(count, src[src < len(count)], 1)
        return count[source]

    def of(self, source: Ids) -> tuple[Ids, Ids]:
        """The items known to each of `source` (int64[n]): (indptr int64[n+1], items, ascending of each)."""
        if self._edges is not None and self._edges.undirected and self._among is None:
            graph = self._edges.graph
            count = graph.degree(source)
            indptr = np.concatenate([[0], np.cumsum(count)])
            slot = np.repeat(graph.indptr[source] - indptr[:-1], count) + np.arange(int(indptr[-1]))
            return _sorted(np.repeat(np.arange(len(source)), count), np.asarray(graph.indices[slot], np.int64), len(source))
        order = np.argsort(source, kind="stable")
        if self._edges is None:
            first, last = (np.searchsorted(self._pair[0], source, side) for side in ("left", "right"))
            at = np.repeat(np.arange(len(source)), last - first)
            begin = np.repeat(first - np.concatenate([[0], np.cumsum(last - first)[:-1]]), last - first)
            return _sorted(at, self._pair[1, begin + np.arange(len(at))], len(source))
        found = [self._from_edges(source[order], order, *piece) for piece in _pieces(self._edges, self._among)]
        none = np.empty(0, np.int64)
        at, node = (np.concatenate([none, *(pair[end] for pair in found)]) for end in (0, 1))
        return _sorted(at, node, len(source))

    @staticmethod
    def _from_edges(ascending: Ids, order: Ids, src: Ids, dst: Ids) -> tuple[Ids, Ids]:
        """(places among the sources, destinations) of the edges that begin at one of them."""
        first, last = (np.searchsorted(ascending, src, side) for side in ("left", "right"))
        count = last - first
        begin = np.repeat(first - (np.cumsum(count) - count), count)
        return order[begin + np.arange(int(count.sum()))], np.repeat(dst, count)


def _pieces(edges: EdgeSet, among: Among | None = None) -> Iterator[tuple[Ids, Ids]]:
    """(sources, destinations) of the edges, a piece at a time, in order of slots; among: as of `KnownLinks`."""
    graph = edges.graph
    for start in range(0, graph.num_edges, _EDGES_AT_ONCE):
        stop = min(start + _EDGES_AT_ONCE, graph.num_edges)
        slot, source = np.arange(start, stop), np.asarray(graph.indices[start:stop], np.int64)
        if among is not None:
            some = among(slot)
            slot, source = slot[some], source[some]
        yield source, np.searchsorted(graph.indptr, slot, side="right") - 1


def _sorted(at: Ids, node: Ids, count: int) -> tuple[Ids, Ids]:
    order = np.lexsort((node, at))
    return np.searchsorted(at[order], np.arange(count + 1)), node[order]


def _known_of(known: Any, count: tuple[int, int]) -> KnownLinks:
    """count: of sources and of items that there are embeddings of."""
    if known is None:
        return KnownLinks(None)
    if isinstance(known, Dataset | EdgeSet):
        edges = known.edges() if isinstance(known, Dataset) else known
        targets = edges.graph.num_nodes
        ends = targets if edges.graph.sources is None else edges.graph.sources, targets
        if ends != count:
            has, are = (" and ".join(map(str, dict.fromkeys(each))) for each in (ends, count))
            raise ConfigError(f"known has {has} nodes and rows are of {are}: give the data set they are of")
        return KnownLinks(None, edges)
    pair = known.detach().cpu().numpy() if isinstance(known, Tensor) else np.asarray(known)
    if pair.ndim != 2 or pair.shape[0] != 2 or (pair.dtype.kind not in "iu" and pair.size):
        raise ConfigError(f"known must be a data set or pairs [2, e] of whole numbers, not {pair.dtype}{list(pair.shape)}")
    for ids, name, nodes in zip(pair, ("known[0]", "known[1]"), count, strict=True):
        _ids(ids, name, nodes)
    return KnownLinks(pair.astype(np.int64))


def _ids(given: Any, name: str, num_nodes: int) -> Ids:
    if given is None:
        return np.arange(num_nodes)
    ids = given.detach().cpu().numpy() if isinstance(given, Tensor) else np.asarray(given)
    if ids.ndim != 1 or (ids.dtype.kind not in "iu" and len(ids)):
        raise ConfigError(f"{name} must be node ids in one dimension, not {ids.dtype}{list(ids.shape)}")
    wrong = (ids < 0) | (ids >= num_nodes)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise InputError(f"{name}[{at}] is {ids[at]}, which is no node: there are rows 0..{num_nodes - 1}")
    return ids.astype(np.int64)


def _embeddings(rows: Any, name: str, opened: ExitStack) -> Rows:
    """`rows` as Rows, which go with `opened` where they were opened here. Raises ConfigError if they are no embeddings."""
    found, owned = _rows_of(rows)
    if owned:
        opened.enter_context(closing(found))
    if len(found.shape) != 2 or found.dtype.kind != "f":
        raise ConfigError(f"{name} must be embeddings [N, d] of floats, not {found.dtype}{list(found.shape)}")
    return found


def _rows_of(rows: Any) -> tuple[Rows, bool]:
    """`rows` as Rows, and whether they were opened here."""
    written = getattr(rows, "path", None)
    if isinstance(rows, str | os.PathLike) or isinstance(written, Path):
        path = Path(written or rows)
        if not ((path / "zarr.json").exists() or (path / ".zarray").exists()):
            raise InputError(f"{path} is no Zarr array: write embeddings with `ooc.embed(..., out=...)`")
        return open_zarr_rows(path.parent, path.name, engine="auto"), True
    if hasattr(rows, "rows"):
        return rows.rows, False
    if isinstance(rows, Tensor):
        rows = rows.detach().cpu()
        return ArrayRows((rows.float() if rows.dtype == torch.bfloat16 else rows).numpy()), False
    return ArrayRows(np.asarray(rows)), False


@kernel
def keep_best(
    scores: NDArray[np.float32], source: Ids, item: Ids, indptr: Ids, known: Ids, best: Ids, value: NDArray[np.float32]
) -> bool:
    """Put a tile's items (ascending) into the lists of its sources (descending, of equal scores the smaller item first).

    source: the item that is not one for each; known[indptr[i]:indptr[i + 1]]: others that are not, ascending. False for a NaN.
    """
    last = best.shape[1] - 1
    for i in range(scores.shape[0]):
        at, end = indptr[i], indptr[i + 1]
        for j in range(scores.shape[1]):
            while at < end and known[at] < item[j]:
                at += 1
            score = scores[i, j]
            if np.isnan(score):
                return False
            if score < value[i, last] or score == -np.inf or item[j] == source[i] or (at < end and known[at] == item[j]):
                continue
            if score == value[i, last] and best[i, last] < item[j]:
                continue
            place = last
            while place > 0 and (
                value[i, place - 1] < score or (value[i, place - 1] == score and best[i, place - 1] > item[j])
            ):
                value[i, place], best[i, place] = value[i, place - 1], best[i, place - 1]
                place -= 1
            value[i, place], best[i, place] = score, item[j]
    return True
