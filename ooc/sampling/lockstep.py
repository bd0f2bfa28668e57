"""Sampling from a graph whose edges stay on disk: many batches at once, hop by hop.

Which slots a batch draws follows from `indptr` alone. So a hop draws the slots of all batches first, then reads the union of
their pages in file order, with many reads in flight, through `Rows` like features; then each batch numbers what it got. The
disk sees as many requests at a time as all batches of a window have, instead of one page fault after the other. (Layer-wise
lockstep over a window as in Ginex's superbatches, where it is done for features.) Subgraphs are `NeighborSampler.sample`'s own.
"""

import mmap
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from ooc.batch import Subgraph
from ooc.sampling.neighbor import Draft, Need, NeighborSampler, damaged_slot, scratch, table_capacity
from stores.errors import ConfigError, OocError
from stores.files import mapping_of
from stores.jit import kernel
from stores.rows import AnyArray, Rows

Ids = NDArray[np.int64]

AT_ONCE = 2**20
"""Ids that one call of `Rows.read` is given, so that planning it stays small: about 80 MB"""
_PLAN_BYTES = 72
"""an id while its reads are planned and carried out"""
_UNION_BYTES = 16
"""an id in the union of all requests: itself, and its place in file order"""

_madvise = types.ExternalFunction("madvise", types.int32(types.intp, types.intp, types.int32))


class Reading(NamedTuple):
    """What `read_together` found."""

    values: list[AnyArray | Exception]
    """rows of each request, or what kept them from being read"""
    nbytes: int
    """read from the disk"""


def read_together(rows: Rows, requests: Sequence[Ids], at_once: int = AT_ONCE) -> Reading:
    """The rows of several requests (int64[n] each, any order, duplicates allowed), each row read once, in file order.

    rows: one value a row ([count], of any dtype). Where the union cannot be read, each request is tried by itself, and those
    that fail come as the exception. Holds 16 bytes an id, the values, and 72 bytes for each of at most `at_once` ids.

    >>> read_together(open_zarr_rows("papers.ooc", "graph/edge_id"), [subgraph.slot for subgraph in window]).values
    """
    flat = np.concatenate([np.empty(0, np.int64), *requests])
    try:
        values, nbytes = _read_union(rows, flat, at_once)
    except Exception as error:
        if len(requests) == 1:
            return Reading([error], 0)
        alone = [read_together(rows, [request], at_once) for request in requests]
        return Reading([reading.values[0] for reading in alone], sum(reading.nbytes for reading in alone))
    ends = np.cumsum([len(request) for request in requests])
    return Reading(list(np.split(values, ends[:-1])) if len(requests) else [], nbytes)


def _read_union(rows: Rows, flat: Ids, at_once: int) -> tuple[AnyArray, int]:
    """(values [n] of the rows `flat`, bytes read)."""
    order = np.argsort(flat, kind="stable")  # a timsort: the slots of a node ascend already, which halves its time
    values = np.empty(len(flat), rows.dtype)
    wanted = np.empty(min(at_once, len(flat)), np.int64)
    got = np.empty(len(wanted), rows.dtype)
    begin = nbytes = 0
    while begin < len(flat):
        stop, count = _distinct(flat, order, begin, wanted)
        nbytes += rows.read(wanted[:count], got[:count])
        _spread(flat, order, begin, stop, wanted, got, values)
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


def lockstep_bytes(needs: Sequence[Need], itemsize: int, at_once: int = AT_ONCE, weighted: bool = False) -> int:
    """Bytes that sampling batches together holds at most, while the hop after which they are as large as `needs` is drawn.

    itemsize: of `indices`. Their arrays; the union of the hop's slots and its reading; growing one batch; one hash table.
    """
    arrays = sum(8 * need.num_nodes + (16 + 4 * weighted) * need.num_edges + 8 * (need.num_expanded + 1) for need in needs)
    drawn = sum(need.edges.edges for need in needs)
    union = (_UNION_BYTES + itemsize) * drawn + (_PLAN_BYTES + itemsize) * min(at_once, drawn)
    largest = max((8 * need.num_edges + 24 * table_capacity(need.num_nodes) for need in needs), default=0)
    return arrays + union + largest


class Together(NamedTuple):
    """Batches sampled together: as many of the first as fit."""

    batches: list[Subgraph | Exception]
    """of each batch its subgraph, or the error that `NeighborSampler.sample` raises for it"""
    edges: int
    """slots read, over all hops, those of batches left out later too"""
    nbytes: int
    """read from the disk for them"""


class _Batch:
    """A batch on its way: a draft, until something fails."""

    def __init__(self, sampler: NeighborSampler, seeds: Ids, key: int) -> None:
        self.sampler, self.key = sampler, key
        self.error: Exception | None = None
        self.need: Need | None = None
        try:
            self.draft: Draft = sampler.begin(seeds)
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

    def number(self, values: AnyArray | Exception) -> None:
        """Step 3: from the rows read for `slots` to local ids."""
        if isinstance(values, Exception):
            self.fail(values)
            return
        draft, (first, last) = self.draft, self.draft.drawn
        wrong = _adopt(values, self.sampler.num_nodes, draft.source, first)
        if wrong >= 0:
            self.fail(damaged_slot(draft.slot[first + wrong]))
            return
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


class Lockstep:
    """Samples batches together while the graph's edges stay on disk. Stateless: any number of threads may share one.

    sampler: draws as it would alone; its `max_bytes` bounds each batch. indices: the graph's `indices` as Rows, int32|int64
    [E]. max_bytes: of all that one call holds, the subgraphs included (None: no bound). at_once: ids in one read.

    The graph's `indptr` is met at random for every node, so it belongs in memory (8 bytes a node). Weights are met through
    the graph's own column, not through Rows: a draw weighs every in-edge of a node, a hub's millions too, and keeps none of
    them. Where the column is mapped, the kernel is asked for a batch's pages before they are met (measured: 6 times faster).
    Raises ConfigError where `indices` are not those of the sampler's graph.

    >>> lockstep = Lockstep(sampler, open_zarr_rows("papers.ooc", "graph/indices"), max_bytes=200_000_000)
    >>> found = lockstep.sample([seeds_of_step_0, seeds_of_step_1], [key_0, key_1])
    >>> found.batches[0].num_nodes
    """

    def __init__(self, sampler: NeighborSampler, indices: Rows, max_bytes: int | None = None, at_once: int = AT_ONCE) -> None:
        if indices.shape != (sampler.num_slots,) or indices.dtype.kind not in "iu" or at_once < 1:
            raise ConfigError(
                f"sampling from disk needs the graph's {sampler.num_slots} source nodes, one whole number a row, and 1 or "
                f"more of them at once; not {indices.dtype}{list(indices.shape)} and {at_once}"
            )
        self.sampler, self.indices, self.max_bytes, self.at_once = sampler, indices, max_bytes, at_once

    def sample(self, seeds: Sequence[Ids], keys: Sequence[int]) -> Together:
        """The sampled neighborhoods of as many of the first batches as fit `max_bytes`, but of one at least.

        seeds: int64[b] a batch; keys: one a batch. A batch that fails has its exception for its place and spoils no other:
        InputError, BudgetError or StoreError as `NeighborSampler.sample` raises them, or what reading its slots raised.
        The caller samples the batches left out again, by a next call; what they were is the same.
        """
        batches = [_Batch(self.sampler, each, key) for each, key in zip(seeds, keys, strict=True)]
        edges = nbytes = 0
        try:
            for hop in range(len(self.sampler.fanout)):
                batches = self._fitting(batches, hop)
                for batch in batches:
                    if batch.error is None:
                        batch.draw(hop)
                live = [batch for batch in batches if batch.error is None]
                reading = read_together(self.indices, [batch.slots for batch in live], self.at_once)
                for batch, values in zip(live, reading.values, strict=True):
                    edges += len(batch.slots)
                    batch.number(values)
                nbytes += reading.nbytes
        finally:
            scratch.table.trim()
        return Together([batch.finish() for batch in batches], edges, nbytes)

    def _fitting(self, batches: list[_Batch], hop: int) -> list[_Batch]:
        """As many of the first batches as fit while hop `hop` is drawn: those left out free their memory."""
        for batch in batches:
            if batch.error is None:
                batch.plan(hop)
        if self.max_bytes is None:
            return batches
        needs: list[Need] = []
        for k, batch in enumerate(batches):
            if batch.need is not None:
                needs.append(batch.need)
                need = lockstep_bytes(needs, self.indices.dtype.itemsize, self.at_once, self.sampler.weighted)
                if need > self.max_bytes and len(needs) > 1:
                    return batches[:k]
        return batches
