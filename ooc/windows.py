"""Look-ahead windows: the rows of many sampled batches, each read once, in file order, for all of them.

Sampling needs no features, so batches are sampled ahead and grouped until the union of their rows fills its share of the
memory. Many rows lie closer together than few: the reads merge, and rows that several batches want are read once. (The
look-ahead of Ginex and MariusGNN's partition buffer rest on the same fact.) Batches are the same as read one by one.

Three pipelines in a chain: sample batches -> read windows -> gather and collate batches; see `windowed`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.collate import Drawn, Loaded
from ooc.loading import Work
from ooc.order import Cursor
from ooc.pipeline import CONSUMER, SOURCE, Clock, Pipeline, Stage
from stores.jit import kernel
from stores.rows import AnyArray

FIRST_BATCHES, GROWTH, MOST_BATCHES = 2, 4, 64
"""Batches of an epoch's first window, so that training starts at once; how much more each next one may have; the most"""
WINDOWS_SHARE = 3 / 4
"""Of the batches' memory, for windows: they fill it to the last byte, and the allocator and the model need room besides"""
AHEAD = 2
"""Batches gathered before the model asks for them"""
_PLAN_BYTES = 64
"""a row of the union, while its reads are planned"""
_TABLE_LEAST = 2**10


class Union:
    """Node ids of several batches, each once and numbered as it first came up: a hash table that grows.

    (Nothing needs them sorted: the read planner sorts, and so a batch's new rows lie in one piece.)

    >>> union = Union()
    >>> union.add(np.array([7, 3])), union.add(np.array([9, 7])), union.size
    (array([0, 1]), array([2, 0]), 3)
    """

    def __init__(self) -> None:
        self.size = 0
        self._node = np.empty(0, np.int64)
        self._table = np.zeros(_TABLE_LEAST, np.int32)  # number + 1 of a node, 0 where empty

    def add(self, node: NDArray[np.int64]) -> NDArray[np.int64]:
        """The numbers of `node` (int64[n], duplicates allowed): int64[n]. Those not met before get the next ones."""
        most = self.size + len(node)
        if most > len(self._node):
            grown = np.empty(max(most, self.size * 3 // 2), np.int64)
            grown[: self.size] = self._node[: self.size]
            self._node = grown
        if most * 4 > len(self._table) * 3:
            self._table = np.zeros(1 << (most * 4 // 3).bit_length(), np.int32)
            _number(self._table, self._node, 0, self._node[: self.size].copy(), np.empty(self.size, np.int64))
        position = np.empty(len(node), np.int64)
        self.size = int(_number(self._table, self._node, self.size, node, position))
        return position

    def node(self, size: int) -> NDArray[np.int64]:
        """int64[size]: the first `size` nodes; a copy."""
        return self._node[:size].copy()


@kernel
def _number(
    table: NDArray[np.int32], node: NDArray[np.int64], size: int, ids: NDArray[np.int64], position: NDArray[np.int64]
) -> int:
    """position[i]: where ids[i] stands in node[:size], behind which it is put where it is not there. Returns the new size.

    Linear probing over a power of two, with Fibonacci hashing (the product's high bits).
    """
    bits = 0
    while (1 << bits) < len(table):
        bits += 1
    for i in range(len(ids)):
        at = np.int64((np.uint64(ids[i]) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(64 - bits))
        while table[at] != 0 and node[table[at] - 1] != ids[i]:
            at = (at + 1) & (len(table) - 1)
        if table[at] == 0:
            node[size] = ids[i]
            size += 1
            table[at] = size
        position[i] = table[at] - 1
    return size


@dataclass(frozen=True)
class Window:
    """Batches whose rows are read together. A window of one batch has the batch's own nodes in their order."""

    batches: tuple[Drawn, ...]
    node: NDArray[np.int64]
    """int64[u]: the rows to read, those of batch 0 first, then what batch 1 needs besides, and so on"""
    end: tuple[int, ...]
    """batch k needs none but node[:end[k]]"""
    position: tuple[NDArray[np.int64], ...]
    """int64[n] a batch: where its nodes stand in `node`; empty for a window of one batch"""
    nbytes: int
    """of memory, with its share of what else is alive meanwhile; two windows at most half the batches' memory each"""


@dataclass(frozen=True)
class Filled:
    """A window that was read."""

    window: Window
    x: AnyArray
    """[u, *feature shape], rows of `window.node`; valid for the first `done` batches"""
    done: int
    error: Exception | None
    """what batch `done` failed on"""


@dataclass(frozen=True)
class Portion:
    """One batch of a window."""

    drawn: Drawn
    x: AnyArray
    """[u, *feature shape], the window's"""
    position: NDArray[np.int64] | None
    """int64[n]: the batch's rows in x; None where x is the batch's own"""


class _Draft:
    """A window in the making."""

    def __init__(self, grouping: "Grouping", most: int) -> None:
        self._grouping, self._most = grouping, most
        self._union = Union()
        self._batches: list[Drawn] = []
        self._position: list[NDArray[np.int64]] = []
        self._end: list[int] = []
        self._kept = self._largest = self._subgraph = self._nbytes = 0

    def add(self, drawn: Drawn) -> bool:
        """Take a batch in, unless the window is full; the first always fits. False: finish, this draft takes no more."""
        if len(self._batches) == self._most:
            return False
        position = self._union.add(drawn.subgraph.node)
        own, subgraph = self._grouping.work.nbytes(drawn), drawn.subgraph.nbytes
        self._kept += subgraph + position.nbytes
        self._largest, self._subgraph = max(self._largest, own), max(self._subgraph, subgraph)
        nbytes = self._charge()
        if self._batches and nbytes > self._grouping.most_bytes:
            return False
        self._batches.append(drawn)
        self._position.append(position)
        self._end.append(self._union.size)
        self._nbytes = nbytes if len(self._batches) > 1 else 2 * own
        return True

    def _charge(self) -> int:
        """Half of what is alive while one such window is in use, one is being read and one is put together.

        Two times the rows; three times the subgraphs and positions; `AHEAD` batches and one at the model; the sampler's.
        """
        row_bytes = self._grouping.row_bytes + 24 + _PLAN_BYTES // 2
        batches = (AHEAD + 1) * self._largest + 4 * self._grouping.sample_threads * self._subgraph
        return self._union.size * row_bytes + (3 * self._kept + batches + 1) // 2

    def finish(self) -> Window:
        if len(self._batches) == 1:
            node = self._batches[0].subgraph.node
            return Window(tuple(self._batches), node, (len(node),), (), self._nbytes)
        node = self._union.node(self._end[-1])
        return Window(tuple(self._batches), node, tuple(self._end), tuple(self._position), self._nbytes)


@dataclass(frozen=True)
class Grouping:
    """How sampled batches become windows, and windows batches again."""

    work: Work
    most_bytes: int
    """of a window of more than one batch"""
    sample_threads: int
    first: int = FIRST_BATCHES
    growth: int = GROWTH
    most: int = MOST_BATCHES

    @property
    def row_bytes(self) -> int:
        assert self.work.x is not None
        return self.work.x.row_bytes

    def group(self, batches: Iterator[Drawn]) -> Iterator[Window]:
        """Windows of consecutive batches, none left out. A failure comes after the window of the batches before it."""
        most = min(self.first, self.most)
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
                draft = _Draft(self, most)
            if not draft.add(drawn):
                yield draft.finish()
                most = min(most * self.growth, self.most)
                draft = _Draft(self, most)
                draft.add(drawn)
        if draft is not None:
            yield draft.finish()
        if failure is not None:
            raise failure

    def read(self, window: Window) -> Filled:
        """The window's rows, each read once. Where that fails, batch by batch as far as it goes."""
        work = self.work
        assert work.x is not None
        x = np.empty((len(window.node), *work.x.shape[1:]), work.x.dtype)  # numpy asks for huge pages, torch does not
        try:
            work.read.add(len(x), work.x.read(window.node, x))
        except Exception as error:
            if len(window.batches) == 1:
                return Filled(window, x, 0, error)
        else:
            return Filled(window, x, len(window.batches), None)
        begin = 0
        for done, end in enumerate(window.end):
            try:
                work.read.add(end - begin, work.x.read(window.node[begin:end], x[begin:end]))
            except Exception as error:
                return Filled(window, x, done, error)
            begin = end
        return Filled(window, x, len(window.batches), None)  # it went well the second time

    def serve(self, windows: Iterator[Filled]) -> Iterator[Portion]:
        """The batches of windows, one after the other."""
        step = 0
        for filled in windows:
            window = filled.window
            for k in range(filled.done):
                yield Portion(window.batches[k], filled.x, window.position[k] if window.position else None)
            step += filled.done
            if filled.error is not None:
                filled.error.add_note(f"in stage 'read' at step {step} of the pipeline")
                raise filled.error
            del filled, window  # while the next one is waited for

    def collate(self, portion: Portion) -> tuple[int, Any]:
        """(steps done with this batch, the batch); its rows are gathered from the window."""
        x = portion.x
        if portion.position is not None:
            x = np.empty((len(portion.position), *x.shape[1:]), x.dtype)
            np.take(portion.x, portion.position, axis=0, out=x, mode="clip")  # "clip" writes straight into out
        return self.work.collate(Loaded(portion.drawn, x, self.work.labels(portion.drawn)))

    def nbytes(self, portion: Portion) -> int:
        """Bytes of the batch."""
        return self.work.nbytes(portion.drawn)


def windowed(
    work: Work,
    cursors: Iterator[Cursor],
    *,
    pool: int,
    threads: tuple[int, int],
    prefetch: int,
    split: bool,
    clocks: dict[str, Clock],
) -> Pipeline:
    """The pipeline of an epoch's batches through windows: (steps done, batch) in the order of `cursors`.

    pool: bytes for all batches and windows that are alive at once; threads: to sample and to read with; prefetch: batches
    gathered ahead, `AHEAD` at most; split: halve a batch that does not fit; clocks: as of `Pipeline`, for all stages.
    """
    sample_threads, read_threads = threads
    pool = int(pool * WINDOWS_SHARE)
    grouping = Grouping(work, pool // 2, sample_threads)
    stages = [] if split else [Stage("sample", work.sample, sample_threads)]
    names = [SOURCE, *(stage.name for stage in stages), "read", "collate", CONSUMER]
    own = {name: clocks.setdefault(name, Clock()) for name in names}
    sampled = Pipeline(
        work.split(cursors) if split else cursors,
        stages,
        max_bytes=1,  # not a gate: bounded in items, which a window counts
        max_items=sample_threads,
        clocks={name: own[name] for name in names[:-3]},
    )
    filled = Pipeline(
        grouping.group(sampled),
        [Stage("read", grouping.read, read_threads, nbytes=lambda window: window.nbytes)],
        max_bytes=pool,
        max_items=2,
        clocks={"read": own["read"]},
        before=sampled,
    )
    return Pipeline(
        grouping.serve(filled),
        [Stage("collate", grouping.collate, nbytes=grouping.nbytes)],
        max_bytes=pool // 3,
        max_items=min(prefetch, AHEAD),
        clocks={name: own[name] for name in names[-2:]},
        before=filled,
    )
