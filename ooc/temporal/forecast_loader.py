"""`ForecastLoader`: windows with the events of the next window as targets, and the state of their nodes.

The nodes of a window, of the next one and of the negatives are known in advance, so their state (`ooc.history.history`) is
prefetched while the model computes earlier windows and patched with what those write. A window's own rows come first and depend
on no later event, not even in summation order: nodes that occur only in the next window follow, without edges.

A window's input rows are features, statistics of the nodes' events, and random identity features. The last are computed from
the node's id alone: they take no memory, are equal in every window and run of a seed, and let the neighbor sum identify the
neighbors. (Sato et al., "Random Features Strengthen Graph Neural Networks", SDM 2021.)
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ooc.graph.blocks import Block
from ooc.graph.relabel import RelabelTable
from ooc.history.history import History
from ooc.history.rows import PrefetchedRows
from ooc.loading.base import Loader
from ooc.loading.collate import Gather
from ooc.loading.event_loader import EventBytes
from ooc.models.builders import full_blocks
from ooc.runtime.buffers import Buffers
from ooc.runtime.memory_plan import words_for
from ooc.runtime.pipeline import Pipeline, Stage
from ooc.runtime.transfer import OnDevice
from ooc.sampling.kernels import stream_of, uniform
from ooc.sampling.negatives import Negatives
from ooc.sampling.time_windows import CountWindows, TimeWindow, TimeWindows, last_labels
from ooc.stores.arrays.rows import AnyArray, Ids, Rows
from ooc.stores.errors import BudgetError
from ooc.stores.events import EventBlock, Events, Reader
from ooc.stores.jit import kernel

PREFETCH = 4
"""most windows between disk and model; fewer if they are large"""
_EVENT_BYTES = 2 * 8 + 8 + 4 * 8
"""per event besides its columns: numbered ends, and the tables that number them"""
_NEGATIVE_BYTES = 5 * 8
"""per negative while nodes are numbered"""
_EDGE_BYTES = 3 * 16 + 2 * 8
"""per edge of the block, including sorting"""
_NODE_BYTES = 8 * 8
"""per node besides its rows: ids, order, the table that numbers it, and the block's arrays"""
_SPREAD = 2 * 3**0.5
"""width of a uniform distribution of variance 1"""


@dataclass(frozen=True)
class Inputs:
    """Computes the input rows of a window's nodes: features x (or None), `identity` features by `key`, and event statistics.

    Events are aggregated separately for sources and destinations: log(1 + count), and the mean of asinh(value) of every column
    (name -> width), which limits long tails without statistics of the future.
    """

    x: Rows | None
    gather: Gather | None
    columns: Mapping[str, int]
    identity: int
    key: int

    @property
    def features(self) -> int:
        return 0 if self.x is None else int(np.prod(self.x.shape[1:], dtype=np.int64))

    @property
    def channels(self) -> int:
        return self.features + self.identity + 2 * (1 + sum(self.columns.values()))

    def rows(
        self, node: Ids, present: int, edge_index: Ids, columns: Mapping[str, AnyArray], buffers: Buffers
    ) -> tuple[Tensor, int]:
        """Return the rows of `node` (int64[n], the window's `present` ones first), float32[n, channels], and the bytes read.

        `edge_index` (int64[2, k]) are the window's events by position in `node`, `columns` ([k, width] each) their columns.
        """
        out = np.empty((len(node), self.channels), np.float32)
        begin = nbytes = 0
        if self.x is not None and self.gather is not None:
            begin = self.features
            features, nbytes = self.gather.read(self.x, node, buffers)
            torch.from_numpy(out)[:, :begin] = self.gather.tensor(features).reshape(len(node), -1)
        identify(node, np.uint64(self.key & (2**64 - 1)), out[:, begin : begin + self.identity])
        begin += self.identity
        width = sum(self.columns.values())
        values = np.empty((edge_index.shape[1], width), np.float32)
        at = 0
        for name, size in self.columns.items():
            np.arcsinh(columns[name].reshape(len(values), -1), out=values[:, at : at + size], casting="same_kind")
            at += size
        for end in edge_index:
            stats = out[:, begin : begin + 1 + width]
            stats[:] = 0
            add_events(np.ascontiguousarray(end), values, stats[:present])
            begin += 1 + width
        return torch.from_numpy(out), nbytes


class WindowPair(NamedTuple):
    """A window, and the events first..last-1 of the next one that are not in it."""

    step: int
    window: TimeWindow
    first: int
    last: int
    keep: int
    """no later step needs events before this one"""


def window_pairs(windows: TimeWindows | CountWindows, events: Events, with_targets: bool = True) -> Iterator[WindowPair]:
    """Yield every window that has events, with the new events of the next one; windows without new events are skipped.

    New are events later than all of the window: for windows by count, events of its last time that it does not contain are
    nobody's targets. Without `with_targets`, all windows are yielded without targets.
    """
    if not with_targets:
        for step, window in enumerate(windows.of(events)):
            yield WindowPair(step, window, window.last, window.last, window.first)
        return
    step = 0
    for window, following in pairwise(windows.of(events)):
        known = window.last
        if isinstance(windows, CountWindows):  # it may end within events of equal time
            known = max(known, events.at(events.time(window.last - 1), "right"))
        first = max(known, following.first)
        if following.last > first:
            yield WindowPair(step, window, first, following.last, following.first)
            step += 1


def draw(events: Events, negatives: Negatives, target: EventBlock, known: int, key: int) -> Ids:
    """Sample negatives of the events `target`, int64[k, ratio], which use no event from event `known` on."""
    return negatives.draw(target, np.minimum(events.before(target.time), known), key)


class ReadPair(NamedTuple):
    """A window's events with their ends numbered, and the target events.

    `node` (int64[n]) has the window's nodes ascending, `present` of them, then the others ascending. `src` and `dst` (int64[k])
    and `negative` (int64[k, ratio]) are positions in `node` for the targets.
    """

    ahead: WindowPair
    block: EventBlock
    node: Ids
    present: int
    edge_index: Ids
    src: Ids
    dst: Ids
    negative: Ids
    target: EventBlock


class Forecast(NamedTuple):
    """A window for the model; see `ReadPair` for the nodes.

    `x`: float32[n, channels]; `block`: the window's edges among its `present` nodes; `y`: int64[present, ...], float32 in a
    regression, or None; `t`: [k], times of the targets; `fetched`: the nodes' state in ascending order of their ids, and
    `order`: int64[n], positions in it; `own`: int64[present], the ids of the window's nodes, in the host's memory.
    """

    step: int
    window: int
    end: int
    """events up to the end of the window"""
    num_events: int
    """events in the window"""
    node: Tensor
    present: int
    x: Tensor
    block: Block
    src: Tensor
    dst: Tensor
    negative: Tensor
    t: Tensor
    y: Tensor | None
    fetched: PrefetchedRows | None
    order: Tensor
    own: Ids


@dataclass(frozen=True)
class ForecastWork:
    """The work of the pipeline's stages; `activations` gives a step's bytes from its numbers of nodes and scored pairs."""

    events: Events
    columns: tuple[str, ...]
    inputs: Inputs
    label: str | None
    y: AnyArray | None
    weighted: bool
    both_ways: bool
    state_bytes: int
    activations: Callable[[int, int], int]
    max_bytes: int
    max_activations: int
    num_nodes: int
    buffers: Buffers = field(default_factory=lambda: Buffers(2))
    moved: EventBytes = field(default_factory=EventBytes)

    def read(self, reader: Reader, negatives: Negatives | None, key: int, ahead: WindowPair) -> ReadPair:
        """Read the events of a window and its targets. Raises BudgetError if there are too many."""
        window = ahead.window
        need = (window.last - window.first + ahead.last - ahead.first) * (
            _EVENT_BYTES + 2 * self.events.row_bytes(list(self.columns))
        )
        need += (ahead.last - ahead.first) * _NEGATIVE_BYTES * (0 if negatives is None else negatives.ratio)
        if need > self.max_bytes:
            raise self._too_large(ahead, *self._most_bytes(ahead, negatives), "which may need")
        block = reader.read(window.first, window.last, keep=ahead.keep)
        target = block.part(block.last, block.last)
        if ahead.last > ahead.first:
            begin = max(window.last, ahead.keep)  # the next window may begin with events that are nobody's targets
            target = reader.read(begin, ahead.last, keep=ahead.keep)
        self.moved.events += block.nbytes + target.nbytes
        target = target.part(max(ahead.first, target.first), target.last)
        table = RelabelTable()
        number = table.add(np.concatenate([block.src, block.dst]).astype(np.int64, copy=False))
        present, rank = table.ascending(table.size)
        negative = np.empty((len(target), 0), np.int64)
        if negatives is not None and len(target):
            negative = draw(self.events, negatives, target, window.last, key)
        ends = np.concatenate([target.src, target.dst, negative.ravel()]).astype(np.int64, copy=False)
        others = np.setdiff1d(ends, present)
        position = np.searchsorted(present, ends)
        known = position < len(present)
        known[known] = present[position[known]] == ends[known]
        position = np.where(known, position, len(present) + np.searchsorted(others, ends))
        src, dst, sampled = np.split(position, [len(target), 2 * len(target)])
        node = np.concatenate([present, others])
        edge_index = rank[number].astype(np.int64).reshape(2, len(block))
        return ReadPair(ahead, block, node, len(present), edge_index, src, dst, sampled.reshape(negative.shape), target)

    def nbytes(self, read: ReadPair) -> int:
        """Bytes of the window from here to the model. Raises BudgetError if there are too many."""
        need, activations = self._sizes(len(read.block), len(read.target), read.negative.shape[1], len(read.node))
        if need > self.max_bytes or activations > self.max_activations:
            raise self._too_large(read.ahead, need, activations)
        return need

    def _sizes(self, events: int, targets: int, ratio: int, nodes: int) -> tuple[int, int]:
        """Bytes of a window on its way to the model, and of the model's activations."""
        values = sum(self.inputs.columns.values())
        need = (events + targets) * (_EVENT_BYTES + 2 * self.events.row_bytes(list(self.columns)) + 4 * values)
        need += 16 * targets * ratio + events * (1 + self.both_ways) * _EDGE_BYTES
        need += nodes * (_NODE_BYTES + 8 * self.inputs.channels + 3 * self.state_bytes)
        return need, self.activations(nodes, targets * (1 + ratio))

    def _most_bytes(self, ahead: WindowPair, negatives: Negatives | None) -> tuple[int, int]:
        """`_sizes` where every end and negative is another node."""
        events, targets = ahead.window.last - ahead.window.first, ahead.last - ahead.first
        ratio = 0 if negatives is None else negatives.ratio
        nodes = min(self.num_nodes, 2 * (events + targets) + targets * ratio)
        need, activations = self._sizes(events, targets, ratio, nodes)
        return need + targets * ratio * _NEGATIVE_BYTES, activations

    def _too_large(self, ahead: WindowPair, need: int, activations: int, which: str = "which need") -> BudgetError:
        """The error that names the part which wants the most memory of the process."""
        parts = [(need, self.max_bytes), (activations, self.max_activations)]
        worst, limit = max(parts, key=lambda part: part[0] / max(part[1], 1))
        events, more = ahead.window.last - ahead.window.first, ahead.last - ahead.first
        return BudgetError(
            f"window {ahead.window.number} has {events:,} events and the next one {more:,} more, {which} "
            f"{words_for(worst, limit)}; use shorter windows, narrower rows, fewer negatives or more memory"
        )

    def make(self, read: ReadPair) -> Forecast:
        """Build the window's edges and input rows, without the nodes' state."""
        ahead, block, present = read.ahead, read.block, read.present
        columns = {name: values for name, values in block.columns.items() if name in self.inputs.columns}
        x, nbytes = self.inputs.rows(read.node, present, read.edge_index, columns, self.buffers)
        self.moved.gathered += nbytes
        self.moved.rows += len(read.node) if self.inputs.x is not None else 0
        edges, weight = torch.from_numpy(read.edge_index), None
        if self.weighted:
            weight = torch.from_numpy(np.ascontiguousarray(block.columns["weight"], np.float32))
        if self.both_ways:
            edges = torch.cat([edges, edges.flip(0)], dim=1)
            weight = None if weight is None else weight.repeat(2)
        y = None
        if self.label is not None:
            y = torch.from_numpy(last_labels(present, read.edge_index[0], block.columns[self.label]))
        elif self.y is not None:
            rows = np.asarray(self.y[read.node[:present]])
            y = torch.from_numpy(rows.astype(np.int64) if rows.dtype.kind in "iu" else rows)
        return Forecast(
            step=ahead.step,
            window=ahead.window.number,
            end=ahead.window.last,
            num_events=len(block),
            node=torch.from_numpy(read.node),
            present=present,
            x=x,
            block=full_blocks(edges, present, 1, weight)[0],
            src=torch.from_numpy(read.src),
            dst=torch.from_numpy(read.dst),
            negative=torch.from_numpy(read.negative),
            t=torch.from_numpy(np.ascontiguousarray(read.target.time)),
            y=y,
            fetched=None,
            order=torch.empty(0, dtype=torch.int64),
            own=read.node[:present],
        )


def fetch(history: History, base: int, forecast: Forecast) -> Forecast:
    """Prefetch the state of the forecast's nodes; `base` is the history's step of step 0."""
    node = forecast.node.numpy()
    ids = np.sort(node)
    fetched = history.fetch(base + forecast.step, ids)
    return forecast._replace(fetched=fetched, order=torch.from_numpy(np.searchsorted(ids, node)))


class ForecastLoader(Loader):
    """Yields forecasts of a store's events in time order: `run(first, last)` gives those of steps first..last-1.

    `history` is the state of the nodes or None; forecasts are moved to `device` except this state, which `History.pull` returns
    at the step. At most `in_flight` bytes and `prefetch` windows are ahead. Without `with_targets`, all windows come without
    targets.
    """

    def __init__(
        self,
        work: ForecastWork,
        windows: TimeWindows | CountWindows,
        history: History | None,
        in_flight: int,
        device: torch.device,
        prefetch: int = PREFETCH,
        with_targets: bool = True,
    ) -> None:
        super().__init__(in_flight, device, prefetch)
        self.work, self.windows, self.history = work, windows, history
        self.moved = work.moved
        self._with_targets = with_targets

    def window_pairs(self) -> Iterator[WindowPair]:
        return window_pairs(self.windows, self.work.events, self._with_targets)

    def run(
        self, first: int, last: int, *, negatives: Negatives | None = None, key: int = 0, base: int = 0
    ) -> Pipeline | OnDevice:
        """Run steps first..last-1; close the result. `key` is that of the negatives, `base` the history's step of step 0.

        Iterating raises BudgetError if a window does not fit the memory, and errors of reading.
        """
        work = self.work
        reader = Reader(work.events, list(work.columns))
        stages = [Stage("read", partial(work.read, reader, negatives, key)), Stage("make", work.make, nbytes=work.nbytes)]
        if self.history is not None:
            stages.append(Stage("pull", partial(fetch, self.history, base)))
        return self._batches(islice(self.window_pairs(), first, last), stages)


@kernel
def identify(node: Ids, key: np.uint64, out: NDArray[np.float32]) -> None:
    """Fill out[i] with numbers of mean 0 and variance 1 that depend on (key, node[i]) only."""
    for i in range(len(node)):
        stream = stream_of(key, node[i])
        for j in range(out.shape[1]):
            out[i, j] = (uniform(stream, j) - 0.5) * _SPREAD


@kernel
def add_events(node: Ids, values: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """Set out[v] to log(1 + events of v) and the mean of their values.

    `out` is zeros [n, 1 + w], `node` int64[k] and `values` [k, w].
    """
    for i in range(len(node)):
        row = out[node[i]]
        row[0] += 1
        for j in range(values.shape[1]):
            row[1 + j] += values[i, j]
    for v in range(len(out)):
        count = out[v, 0]
        if count > 0:
            for j in range(values.shape[1]):
                out[v, 1 + j] /= count
            out[v, 0] = np.log1p(count)
