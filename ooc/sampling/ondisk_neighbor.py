"""Sampling from a graph whose edges stay on disk: many batches at once, hop by hop.

Which slots a batch draws follows from `indptr` alone. So a hop draws the slots of all batches first, then reads the union of
their pages in file order, with many reads in flight, through `Rows` like features; then each batch numbers what it got. The
disk sees as many requests at a time as all batches of a window have, instead of one page fault after the other. (Layer-wise
lockstep over a window as in Ginex's superbatches, where it is done for features.) Subgraphs are `NeighborSampler.sample`'s own.
"""

import mmap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from ooc.graph.blocks import Subgraph
from ooc.sampling.neighbor import HopBound, NeighborSampler, SubgraphBuilder, damaged_slot, scratch, table_capacity
from stores.arrays.rows import AnyArray, Rows
from stores.errors import ConfigError, OocError
from stores.io.segments import mapping_of
from stores.jit import kernel

Ids = NDArray[np.int64]

AT_ONCE = 2**20
"""Ids that one call of `Rows.read` is given, so that planning it stays small: about 80 MB"""
_PLAN_BYTES = 72
"""an id while its reads are planned and carried out"""
_UNION_BYTES = 16
"""an id in the union of all requests: itself, and its place in file order"""

_madvise = types.ExternalFunction("madvise", types.int32(types.intp, types.intp, types.int32))


class FrontierRead(NamedTuple):
    """What `read_together` found."""

    values: list[list[AnyArray] | Exception]
    """for each request the rows out of each array, or what kept them from being read"""
    nbytes: int
    """read from the disk"""


def read_together(arrays: Sequence[Rows], requests: Sequence[Ids], at_once: int = AT_ONCE) -> FrontierRead:
    """The same rows out of each of `arrays` for several requests (int64[n], any order, duplicates allowed), in file order.

    arrays: of one value a row ([count], of any dtype); each row is read once. Where the union of the requests cannot be read,
    each is tried by itself, and those that fail come as the exception. Holds 16 bytes an id, the values, and 72 bytes for each
    of at most `at_once` ids.

    >>> edge_id = open_zarr_rows("papers.ooc", "graph/edge_id")
    >>> read_together([edge_id], [subgraph.slot for subgraph in window]).values
    """
    flat = np.concatenate([np.empty(0, np.int64), *requests])
    try:
        values, nbytes = _read_union(arrays, flat, at_once)
    except Exception as error:
        if len(requests) == 1:
            return FrontierRead([error], 0)
        alone = [read_together(arrays, [request], at_once) for request in requests]
        return FrontierRead([reading.values[0] for reading in alone], sum(reading.nbytes for reading in alone))
    ends = np.cumsum([len(request) for request in requests])
    parts = [np.split(each, ends[:-1]) for each in values]
    return FrontierRead([[part[k] for part in parts] for k in range(len(requests))], nbytes)


def _read_union(arrays: Sequence[Rows], flat: Ids, at_once: int) -> tuple[list[AnyArray], int]:
    """(values [n] of the rows `flat` out of each array, bytes read)."""
    order = np.argsort(flat, kind="stable")  # a timsort: the slots of a node ascend already, which halves its time
    values = [np.empty(len(flat), rows.dtype) for rows in arrays]
    wanted = np.empty(min(at_once, len(flat)), np.int64)
    begin = nbytes = 0
    while begin < len(flat):
        stop, count = _distinct(flat, order, begin, wanted)
        for rows, out in zip(arrays, values, strict=True):
            got = np.empty(count, rows.dtype)
            nbytes += rows.read(wanted[:count], got)
            _spread(flat, order, begin, stop, wanted, got, out)
        begin = stop
    return values, nbytes


@kernel
def _distinct(flat: Ids, order: Ids, begin: int, wanted: Ids) -> tuple[int, int]:
    """Put the distinct ids flat[order[begin:stop]] into wanted[:count], as many as it holds; (stop, count)."""
    count = 0
    for position in range(begin, len(order)):
        value = flat[order[position]]
        if count == 0 or value != wanted[count - 1]:
            if count == len(wanted):
                return position, count
            wanted[count] = value
            count += 1
    return len(order), count


@kernel
def _spread(flat: Ids, order: Ids, begin: int, stop: int, wanted: Ids, got: NDArray[Any], values: NDArray[Any]) -> None:
    """values[i] = the row got for id flat[i], for i in order[begin:stop]."""
    at = 0
    for position in range(begin, stop):
        i = order[position]
        at += int(wanted[at] != flat[i])
        values[i] = got[at]


@kernel
def _ask_for(indptr: Ids, node: Ids, start: int, stop: int, address: int, itemsize: int) -> None:
    """Have the kernel read the mapped column's pages of the in-edges of `node[start:stop]`, many at once; a hint."""
    for i in range(start, stop):
        begin = indptr[node[i]] * itemsize // mmap.PAGESIZE * mmap.PAGESIZE
        end = indptr[node[i] + 1] * itemsize
        if end > begin:
            _madvise(address + begin, end - begin, mmap.MADV_WILLNEED)


@kernel
def _outside(slot: Ids, first: int, last: int, num_slots: int) -> int:
    """The first of slot[first:last] that is none of 0..num_slots-1, or -1 where all are."""
    for e in range(first, last):
        if slot[e] < 0 or slot[e] >= num_slots:
            return e
    return -1


@kernel
def _adopt(values: NDArray[Any], num_nodes: int, source: Ids, first: int) -> int:
    """source[first + i] = values[i]; -1, or the first i whose value is no node's id."""
    for i in range(len(values)):
        neighbor = int(values[i])
        if neighbor < 0 or neighbor >= num_nodes:
            return i
        source[first + i] = neighbor
    return -1


def frontier_bytes(
    needs: Sequence[HopBound], itemsize: int, at_once: int = AT_ONCE, weighted: bool = False, columns: Sequence[int] = ()
) -> int:
    """Bytes that sampling batches together holds at most, while the hop after which they are as large as `needs` is drawn.

    itemsize: of `indices`; columns: of the columns that are read beside them. Their arrays; the union of the hop's slots and
    its reading; growing one batch; one hash table.
    """
    kept = sum(columns)
    per_edge = 16 + 4 * weighted + kept
    arrays = sum(8 * need.num_nodes + per_edge * need.num_edges + 8 * (need.num_expanded + 1) for need in needs)
    drawn = sum(need.edges.edges for need in needs)
    union = (_UNION_BYTES + itemsize + kept) * drawn + (_PLAN_BYTES + max([itemsize, *columns])) * min(at_once, drawn)
    largest = max((8 * need.num_edges + 24 * table_capacity(need.num_nodes) for need in needs), default=0)
    return arrays + union + largest


class FrontierBatches(NamedTuple):
    """Batches sampled together: as many of the first as fit."""

    batches: list[Subgraph | Exception]
    """of each batch its subgraph, or the error that `NeighborSampler.sample` raises for it"""
    edges: int
    """slots read, over all hops, those of batches left out later too"""
    nbytes: int
    """read from the disk for them, columns included"""


class _Batch:
    """A batch on its way: a draft, until something fails."""

    def __init__(self, sampler: NeighborSampler, columns: Mapping[str, Rows], seeds: Ids, key: int) -> None:
        self.sampler, self.key = sampler, key
        self.error: Exception | None = None
        self.need: HopBound | None = None
        try:
            self.draft: SubgraphBuilder = sampler.begin(seeds, {name: rows.dtype for name, rows in columns.items()})
        except OocError as error:
            self.error = error

    def plan(self, hop: int) -> None:
        """Count what hop `hop` needs."""
        try:
            self.need = self.sampler.need(self.draft, hop)
        except OocError as error:
            self.fail(error)

    def draw(self, hop: int) -> None:
        """Step 1: the slots of hop `hop`, all of them slots of the graph."""
        assert self.need is not None
        sampler, draft = self.sampler, self.draft
        if sampler.weight is not None and sampler.fanout[hop] >= 0 and mapping_of(sampler.weight) is not None:
            weight, stop = sampler.weight, sum(draft.num_nodes)
            _ask_for(sampler.indptr, draft.node, stop - draft.num_nodes[-1], stop, weight.ctypes.data, weight.itemsize)
        try:
            sampler.draw(draft, hop, self.key, self.need)
            first, last = draft.drawn
            wrong = _outside(draft.slot, first, last, sampler.num_slots)
            if wrong >= 0:
                raise damaged_slot(draft.slot[wrong])
        except OocError as error:
            self.fail(error)

    @property
    def slots(self) -> Ids:
        """int64[k]: what the hop at hand drew."""
        first, last = self.draft.drawn
        return self.draft.slot[first:last]

    def number(self, values: list[AnyArray] | Exception) -> None:
        """Step 3: from what `indices` and the columns hold at `slots` to local ids."""
        if isinstance(values, Exception):
            self.fail(values)
            return
        draft, (first, last) = self.draft, self.draft.drawn
        wrong = _adopt(values[0], self.sampler.num_nodes, draft.source, first)
        if wrong >= 0:
            self.fail(damaged_slot(draft.slot[first + wrong]))
            return
        for column, read in zip(draft.columns.values(), values[1:], strict=True):
            column[first:last] = read
        size = sum(draft.num_nodes)
        table = scratch.table
        table.refill(min(size + last - first, len(draft.node)), draft.node, size)
        self.sampler.number(draft, table)

    def fail(self, error: Exception) -> None:
        """Give up; the other batches go on."""
        self.error, self.need = error, None
        del self.draft

    def finish(self) -> Subgraph | Exception:
        return self.draft.finish() if self.error is None else self.error


class OnDiskFrontier:
    """Samples batches together while the graph's edges stay on disk. Stateless: any number of threads may share one.

    sampler: draws as it would alone; its `max_bytes` bounds each batch. indices: the graph's `indices` as Rows, int32|int64
    [E]; columns: further ones [E] to read for the edges drawn (`Subgraph.columns`). max_bytes: of all that one call holds, the
    subgraphs included (None: no bound). at_once: ids in one read.

    The graph's `indptr` is met at random for every node, so it belongs in memory (8 bytes a node). Weights are met through
    the graph's own column, not through Rows: a draw weighs every in-edge of a node, a hub's millions too, and keeps none of
    them. Where the column is mapped, the kernel is asked for a batch's pages before they are met (measured: 6 times faster).
    Raises ConfigError where `indices` or `columns` are not those of the sampler's graph.

    >>> frontier = OnDiskFrontier(sampler, ds.edge_rows("indices"), {"edge_id": ds.edge_rows("edge_id")}, max_bytes=200_000_000)
    >>> found = frontier.sample([seeds_of_step_0, seeds_of_step_1], [key_0, key_1])
    >>> found.batches[0].num_nodes
    """

    def __init__(
        self,
        sampler: NeighborSampler,
        indices: Rows,
        columns: Mapping[str, Rows] | None = None,
        max_bytes: int | None = None,
        at_once: int = AT_ONCE,
    ) -> None:
        if indices.shape != (sampler.num_slots,) or indices.dtype.kind not in "iu" or at_once < 1:
            raise ConfigError(
                f"sampling from disk needs the graph's {sampler.num_slots} source nodes, one whole number a row, and 1 or "
                f"more of them at once; not {indices.dtype}{list(indices.shape)} and {at_once}"
            )
        self.columns = dict(columns or {})
        for name, rows in self.columns.items():
            if rows.shape != (sampler.num_slots,):
                raise ConfigError(
                    f"column {name!r} has shape {list(rows.shape)}: one entry for each of {sampler.num_slots} edges"
                )
        self.sampler, self.indices, self.max_bytes, self.at_once = sampler, indices, max_bytes, at_once

    def sample(self, seeds: Sequence[Ids], keys: Sequence[int]) -> FrontierBatches:
        """The sampled neighborhoods of as many of the first batches as fit `max_bytes`, but of one at least.

        seeds: int64[b] a batch; keys: one a batch. A batch that fails has its exception for its place and spoils no other:
        InputError, BudgetError or StoreError as `NeighborSampler.sample` raises them, or what reading its slots raised.
        The caller samples the batches left out again, by a next call; what they were is the same.
        """
        batches = [_Batch(self.sampler, self.columns, each, key) for each, key in zip(seeds, keys, strict=True)]
        edges = nbytes = 0
        try:
            for hop in range(len(self.sampler.fanout)):
                batches = self._fitting(batches, hop)
                for batch in batches:
                    if batch.error is None:
                        batch.draw(hop)
                live = [batch for batch in batches if batch.error is None]
                arrays = [self.indices, *self.columns.values()]
                reading = read_together(arrays, [batch.slots for batch in live], self.at_once)
                for batch, values in zip(live, reading.values, strict=True):
                    edges += len(batch.slots)
                    batch.number(values)
                nbytes += reading.nbytes
        finally:
            scratch.table.trim()
        return FrontierBatches([batch.finish() for batch in batches], edges, nbytes)

    def _fitting(self, batches: list[_Batch], hop: int) -> list[_Batch]:
        """As many of the first batches as fit while hop `hop` is drawn: those left out free their memory."""
        for batch in batches:
            if batch.error is None:
                batch.plan(hop)
        if self.max_bytes is None:
            return batches
        needs: list[HopBound] = []
        itemsize, columns = self.indices.dtype.itemsize, [rows.dtype.itemsize for rows in self.columns.values()]
        for k, batch in enumerate(batches):
            if batch.need is not None:
                needs.append(batch.need)
                need = frontier_bytes(needs, itemsize, self.at_once, self.sampler.weighted, columns)
                if need > self.max_bytes and len(needs) > 1:
                    return batches[:k]
        return batches
