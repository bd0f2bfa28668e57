"""Look-ahead windows: the rows of many sampled batches, each read once, in file order, for all of them.

Sampling needs no features, so batches are sampled ahead and grouped until the union of their rows fills its share of the
memory. Many rows lie closer together than few: the reads merge, and rows that several batches want are read once. (The
look-ahead of Ginex and MariusGNN's partition buffer rest on the same fact.) Batches are the same as read one by one.

Three pipelines in a chain: sample batches -> read windows -> gather and collate batches; see `windowed`. All windows share one
buffer (`ooc.rowcache`): while the batches of one are gathered its rows make room, row by row, for those of the next, so each
may fill nearly all of it, where two buffers in turn would have half each.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.collate import Drawn, Loaded
from ooc.loading import Work
from ooc.order import Cursor
from ooc.packed import Packed, narrow, pack
from ooc.pipeline import CONSUMER, SOURCE, Clock, Pipeline, Stage
from ooc.rowcache import Lease, PoolClosed, Residents, RowPool, Slots, own_cache, shared_rows, shelf_of
from ooc.union import Union, by_last_use

FIRST_BYTES, GROWTH = 2**30, 4
"""Of an epoch's first window, so that training starts soon (a smaller one is hardly read faster); each next one may have so
many times more"""
SECOND_SHARE = 4
"""A second pipeline over the same rows at the same time has so much less memory, on top of the first one's"""
AHEAD = 1
"""Batches gathered before the model asks for them"""
_ROW_BYTES = 112
"""a row's share of what keeps order in four windows: one gathered from, one read, one ready and one put together"""
_WINDOWS = 4
_PIECE_ROWS = 2**15, 2**18
"""Rows of one read, where memory makes room for fewer or more; the latter bounds what planning takes to about 16 MB"""


@dataclass(frozen=True)
class Sketch:
    """A window's batches, before it is known what lies in memory."""

    batches: tuple[Packed, ...]
    node: NDArray[Any]
    """[u], ascending; int32 where that is enough"""
    last: NDArray[np.int32]
    """int32[u]: the last batch that uses a row"""
    uses: NDArray[np.float32]
    """float32[u]: how many do"""
    limit: int
    """rows in memory at most, with this window's"""


@dataclass(frozen=True)
class Window:
    """Batches whose rows are read together, and what becomes of the rows in memory before and after."""

    sketch: Sketch
    carried: NDArray[np.int32]
    source: NDArray[np.int32]
    """see `ooc.rowcache.Change`"""
    early: NDArray[np.int32]
    """of an epoch's first window: what it gives up itself of the rows that were in memory, as positions"""
    idle: NDArray[np.int32]
    """what the next window gives up of the rows in memory after this one that this one does not use, as positions"""
    gone: NDArray[np.int32]
    """the rows of this window that the next gives up, by their last use"""
    first: NDArray[np.int64]
    """int64[batches + 1]: gone[first[k]:first[k + 1]] are not needed after batch k"""
    final: Residents | None
    """of the last window: what lies in memory afterwards"""


@dataclass(frozen=True)
class Filled:
    """A window that was read."""

    window: Window
    slot: Slots
    """int32[u]: where its rows lie in the pool; valid for the first `done` batches"""
    idle: Slots
    """slots to give back before the first batch"""
    done: int
    error: Exception | None
    """what batch `done` failed on"""


@dataclass(frozen=True)
class Portion:
    """Batch number k of a window."""

    filled: Filled
    k: int


class _Draft:
    """A window in the making."""

    def __init__(self, grouping: "Grouping", most_rows: int) -> None:
        self._grouping, self._most_rows = grouping, most_rows
        self._union = Union()
        self._batches: list[Packed] = []
        self._last, self._uses = np.empty(0, np.int32), np.empty(0, np.float32)
        self._size = self._kept = self._most_nodes = self._largest = self._drawing = self._limit = 0

    def add(self, drawn: Drawn) -> bool:
        """Take a batch in, unless the window is full; the first always fits. False: finish, this draft takes no more."""
        number = self._union.add(drawn.subgraph.node)
        packed = pack(drawn, number, self._grouping.work.collator.needs_slots)
        kept = self._kept + packed.nbytes
        self._most_nodes = max(self._most_nodes, len(number))
        self._largest = max(self._largest, self._grouping.work.nbytes(drawn))
        self._drawing = max(self._drawing, drawn.subgraph.nbytes)
        size = self._union.size
        limit = self._grouping.rows_limit(kept, self._largest, self._drawing)
        # One batch's room is left: the next window goes on being read while this one's last batches wait for the model.
        if self._batches and (size > self._most_rows or size + self._most_nodes > limit):
            return False
        self._last = _grown(self._last, size)
        self._last[number] = len(self._batches)
        self._uses = _grown(self._uses, size)
        self._uses[number] += 1  # once, also where seeds repeat
        self._batches.append(packed)
        self._size, self._kept, self._limit = size, kept, max(limit, size)
        return True

    def finish(self) -> Sketch:
        node, rank = self._union.ascending(self._size)
        batches = tuple(batch.renumbered(rank) for batch in self._batches)
        last, uses = np.empty_like(self._last), np.empty_like(self._uses)
        last[rank], uses[rank] = self._last, self._uses
        return Sketch(batches, narrow(node), last, uses, self._limit)


def _grown(array: NDArray[Any], size: int) -> NDArray[Any]:
    """`array` with zeros behind it."""
    grown = np.zeros(size, array.dtype)
    grown[: len(array)] = array
    return grown


@dataclass(frozen=True)
class Grouping:
    """How sampled batches become windows."""

    work: Work
    pool_bytes: int
    """for all windows and batches that are alive at once"""
    drawing: int
    """batches being drawn at once"""
    residents: Residents
    """what lies in memory before the first window"""
    first_bytes: int = FIRST_BYTES
    growth: int = GROWTH

    @property
    def row_bytes(self) -> int:
        assert self.work.x is not None
        return self.work.x.row_bytes

    def rows_limit(self, kept: int, largest: int, drawing: int) -> int:
        """Rows in memory at most beside windows whose batches take `kept` bytes each, the largest batch `largest`.

        Taken off: the batches gathered ahead, the one at the model, as much for its activations and for the one before it,
        whose memory waits to be used again; those being drawn (`drawing` bytes each, with their hash tables); the windows'
        batches.
        """
        lockstep = self.work.lockstep
        drawn = 4 * self.drawing * drawing if lockstep is None else lockstep.max_bytes or 0
        besides = (AHEAD + 3) * largest + drawn + _WINDOWS * kept
        return max(0, self.pool_bytes - besides) // (self.row_bytes + _ROW_BYTES)

    def sketches(self, batches: Iterator[Drawn]) -> Iterator[Sketch]:
        """Windows of consecutive batches, none left out. A failure comes after the window of the batches before it."""
        most_rows = max(1, self.first_bytes // self.row_bytes)
        draft: _Draft | None = None
        failure: BaseException | None = None
        while True:
            try:
                drawn = next(batches)
            except StopIteration:
                break
            except BaseException as error:  # the batches before it come first
                failure = error
                break
            if draft is None:
                draft = _Draft(self, most_rows)
            if not draft.add(drawn):
                yield draft.finish()
                most_rows *= self.growth
                draft = _Draft(self, most_rows)
                draft.add(drawn)
        if draft is not None:
            yield draft.finish()
        if failure is not None:
            raise failure

    def windows(self, batches: Iterator[Drawn]) -> Iterator[Window]:
        """Each window once the next one is known, so that it knows which of its rows that one gives up."""
        residents, before, held = self.residents, np.empty(0, np.int32), None
        failure: BaseException | None = None
        sketches = self.sketches(batches)
        while True:
            try:
                sketch = next(sketches)
            except StopIteration:
                break
            except BaseException as error:
                failure = error
                break
            residents, change = residents.take(sketch.node, sketch.uses, sketch.limit, before)
            early = change.idle if held is None else change.idle[:0]
            if held is not None:
                yield _linked(*held, change.evicted, change.idle, None)
            held, before = (sketch, change.carried, change.source, early), sketch.node
        if held is not None:
            yield _linked(*held, before[:0], np.empty(0, np.int32), residents)
        if failure is not None:
            raise failure


def _linked(
    sketch: Sketch,
    carried: NDArray[np.int32],
    source: NDArray[np.int32],
    early: NDArray[np.int32],
    evicted: NDArray[Any],
    idle: NDArray[np.int32],
    final: Residents | None,
) -> Window:
    """The window, `evicted` and `idle` being what the next one gives up."""
    going = np.empty(len(sketch.node), np.int32)
    gone = np.empty(int(shared_rows(sketch.node, evicted, going)), np.int32)
    first = np.zeros(len(sketch.batches) + 1, np.int64)
    by_last_use(sketch.last, going, gone, first)
    return Window(sketch, carried, source, early, idle, gone, first, final)


class Reader:
    """Reads windows, in their order, into the pool.

    slot: int32[r], where the rows in memory lie, in the order of `Residents.node`.
    """

    def __init__(self, work: Work, pool: RowPool, slot: Slots) -> None:
        self._work, self._pool, self.slot = work, pool, slot

    def read(self, window: Window) -> Filled:
        """The rows that are not in memory yet, each once. Where that fails, batch by batch as far as it goes."""
        self._pool.give(self.slot[window.early])
        slot = np.full(len(window.carried), -1, np.int32)
        there = window.carried >= 0
        slot[there] = self.slot[window.carried[there]]
        batches = window.sketch.batches
        done, error = len(batches), None
        try:
            self._load(window.sketch, np.flatnonzero(~there), slot)
        except PoolClosed:
            raise
        except Exception as failure:
            done, error = self._one_by_one(window.sketch, slot, failure)
        self.slot = _moved(window.source, self.slot, slot)
        return Filled(window, slot, self.slot[window.idle], done, error)

    def _load(self, sketch: Sketch, row: NDArray[np.int64], slot: Slots) -> None:
        """Read rows `row` (ascending) of the window, in pieces as large as there is room for."""
        work, pool = self._work, self._pool
        assert work.x is not None
        least, most = _PIECE_ROWS
        begin = 0
        while begin < len(row):
            left = len(row) - begin
            own = pool.take(min(least, left), min(most, left), sketch.limit)
            piece = row[begin : begin + len(own)]
            try:
                work.read.add(len(piece), work.x.read(sketch.node[piece].astype(np.int64), pool.rows, own.astype(np.int64)))
            except BaseException:
                pool.give(own)
                raise
            slot[piece] = own
            begin += len(piece)

    def _one_by_one(self, sketch: Sketch, slot: Slots, failure: Exception) -> tuple[int, Exception | None]:
        """(batches that can be served, what the next one fails on)."""
        if len(sketch.batches) == 1:
            return 0, failure
        for done, batch in enumerate(sketch.batches):
            row = np.unique(batch.row)
            try:
                self._load(sketch, row[slot[row] < 0].astype(np.int64), slot)
            except PoolClosed:
                raise
            except Exception as error:
                return done, error
        return len(sketch.batches), None  # it went well the second time


class Server:
    """Takes the batches out of windows, in order, and gives rows back that are not needed any more."""

    def __init__(self, work: Work, pool: RowPool, residents: Residents) -> None:
        self._work, self._pool = work, pool
        self.final: Residents | None = residents
        """what lies in memory: before the first batch, and once the last one is gathered; None in between"""

    def serve(self, windows: Iterator[Filled]) -> Iterator[Portion]:
        """The batches of windows, one after the other."""
        step = 0
        for filled in windows:
            for k in range(filled.done):
                yield Portion(filled, k)
            step += filled.done
            if filled.error is not None:
                filled.error.add_note(f"in stage 'read' at step {step} of the pipeline")
                raise filled.error
            del filled  # while the next one is waited for

    def collate(self, portion: Portion) -> tuple[int, Any]:
        """(steps done with this batch, the batch); its rows are gathered from the pool. One thread, in order."""
        filled, k, pool = portion.filled, portion.k, self._pool
        window = filled.window
        sketch = window.sketch
        batch = sketch.batches[k]
        if k == 0:
            pool.give(filled.idle)  # the window before is through, so nobody needs them
        at = filled.slot[batch.row]
        x = self._work.recycler.empty((len(at), *pool.rows.shape[1:]), pool.rows.dtype)
        np.take(pool.rows, at, axis=0, out=x, mode="clip")  # "clip" writes straight into out
        pool.give(filled.slot[window.gone[window.first[k] : window.first[k + 1]]])
        drawn = batch.unpack(sketch.node)
        self.final = window.final if k + 1 == len(sketch.batches) else None
        return self._work.collate(Loaded(drawn, x, self._work.labels(drawn)))


def _moved(source: NDArray[np.int32], before: Slots, own: Slots) -> Slots:
    """The slots of the rows in memory after a window: see `Change.source`."""
    new = source < 0
    after = np.empty(len(source), np.int32)
    after[new] = own[~source[new]]
    after[~new] = before[source[~new]]
    return after


def windowed(
    work: Work,
    cursors: Iterator[Cursor],
    *,
    pool: int,
    threads: int,
    split: bool,
    clocks: dict[str, Clock],
) -> Pipeline:
    """The pipeline of an epoch's batches through windows: (steps done, batch) in the order of `cursors`.

    pool: bytes for all batches and windows that are alive at once; threads: to sample with; split: halve a batch that does not
    fit; clocks: as of `Pipeline`, for all stages.
    """
    lease, pool = _lent(work, pool)
    try:
        return _chain(work, cursors, lease, pool, threads, split, clocks)
    except BaseException:
        lease.end(None, lease.cache.slot)
        raise


def _lent(work: Work, pool: int) -> tuple[Lease, int]:
    """The rows' cache, and the bytes for this pipeline; a second one at the same time has a cache and room of its own."""
    rows = work.x
    assert rows is not None
    lease = shelf_of(rows).lend(min(pool // rows.row_bytes + 1, rows.shape[0]), rows)
    if lease is not None:
        return lease, pool
    room = pool // SECOND_SHARE
    return own_cache(min(room // rows.row_bytes + work.max_bytes // rows.row_bytes + 1, rows.shape[0]), rows), room


def _chain(
    work: Work, cursors: Iterator[Cursor], lease: Lease, pool: int, threads: int, split: bool, clocks: dict[str, Clock]
) -> Pipeline:
    """The three pipelines of `windowed`."""
    cache = lease.cache
    grouping = Grouping(work, pool, threads, cache.residents)
    reader, server = Reader(work, cache.pool, cache.slot), Server(work, cache.pool, cache.residents)
    alone = work.lockstep is None and not split
    stages = [Stage("sample", work.sample, threads)] if alone else []
    names = [SOURCE, *(stage.name for stage in stages), "read", "collate", CONSUMER]
    own = {name: clocks.setdefault(name, Clock()) for name in names}
    source: Iterator[Any] = cursors
    if not alone:
        source = work.split(cursors) if work.lockstep is None else work.sampled(cursors, split)
    sampled = Pipeline(
        source,
        stages,
        max_bytes=1,  # not a gate: bounded in items, which a window counts
        max_items=threads,
        clocks={name: own[name] for name in names[:-3]},
    )
    filled = Pipeline(
        grouping.windows(sampled),
        [Stage("read", reader.read)],
        max_bytes=1,  # the pool is the gate
        max_items=2,
        clocks={"read": own["read"]},
        before=sampled,
        on_stop=lease.stop,
    )
    # The last to end: its threads stop when all before them have.
    return Pipeline(
        server.serve(filled),
        [Stage("collate", server.collate)],
        max_bytes=1,
        max_items=AHEAD,
        clocks={name: own[name] for name in names[-2:]},
        before=filled,
        on_end=lambda: lease.end(server.final, reader.slot),
    )
