"""`ForecastLoader`: windows, each with the events behind it that it is to foresee, and what all their nodes carry.

The nodes of a window, of the next one and of the negatives are known ahead, so what they carry (`ooc.history.history`) is read
while the model computes earlier windows; what those write meanwhile is patched in. A window's own rows come first and depend
on no later event, not even in the order of a sum: the nodes that only the next window meets stand behind them, without edges.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ooc.graph.blocks import Block
from ooc.graph.relabel import RelabelTable
from ooc.history.history import History
from ooc.history.rows import PrefetchedRows
from ooc.loading.event_loader import EventBytes
from ooc.models.builders import full_blocks
from ooc.runtime.buffers import Buffers
from ooc.runtime.clock import Clock
from ooc.runtime.memory_plan import words_for
from ooc.runtime.pipeline import Pipeline, Stage
from ooc.runtime.transfer import OnDevice, on_device
from ooc.sampling.event_labels import last_labels
from ooc.sampling.negatives import Negatives
from ooc.sampling.time_windows import CountWindows, TimeWindow, TimeWindows
from ooc.temporal.window_inputs import Inputs
from stores.arrays.rows import AnyArray, Ids
from stores.errors import BudgetError
from stores.events import EventBlock, Events, Reader

PREFETCH = 4
"""windows between the disk and the model at most; fewer where they are large"""
_EVENT_BYTES = 2 * 8 + 8 + 4 * 8
"""of an event beside its columns: ends by their numbers, and the tables that number them"""
_EDGE_BYTES = 3 * 16 + 2 * 8
"""of an edge of the block, and while it is sorted"""
_NODE_BYTES = 8 * 8
"""of a node beside its rows: ids, order, the table that numbers it, and the block's"""


class WindowPair(NamedTuple):
    """A window, and the events first..last-1 of the next one that are not in it."""

    step: int
    window: TimeWindow
    first: int
    last: int
    keep: int
    """no later step wants events before this one"""


def aheads(windows: TimeWindows | CountWindows, events: Events, foresee: bool = True) -> Iterator[WindowPair]:
    """Every window that has events, with what is new in the next one; where nothing is, the window is passed over.

    New is what is later than all of the window: where windows count events, those of its last time that it has no more are
    for nobody to foresee. foresee: else all windows, with nothing behind them.

    >>> [(each.window.last, each.first, each.last) for each in aheads(CountWindows(100, 50), ds.events)][:2]
    [(100, 100, 150), (150, 150, 200)]
    """
    if not foresee:
        for step, window in enumerate(windows.of(events)):
            yield WindowPair(step, window, window.last, window.last, window.first)
        return
    step = 0
    for window, following in pairwise(windows.of(events)):
        known = window.last
        if isinstance(windows, CountWindows):  # it may end among events of one time
            known = max(known, events.at(events.time(window.last - 1), "right"))
        first = max(known, following.first)
        if following.last > first:
            yield WindowPair(step, window, first, following.last, following.first)
            step += 1


def draw(events: Events, negatives: Negatives, target: EventBlock, known: int, key: int) -> Ids:
    """int64[k, ratio]: negatives of the events `target`, of which those from event `known` on know nothing."""
    return negatives.draw(target, np.minimum(events.before(target.time), known), key)


class ReadPair(NamedTuple):
    """A window's events by the numbers of its nodes, and those to foresee.

    node: int64[n], the window's nodes, ascending, then the others, ascending; present: how many are the window's;
    src, dst: int64[k], of the events to foresee; negative: int64[k, ratio]; all by place in `node`.
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
    """A window for the model. See `ReadPair` for the nodes.

    x: float32[n, channels]; block: the window's edges among its `present` nodes; y: int64[present, ...] or None; t: [k], times
    of the events to foresee; fetched: what the nodes carry, ascending, and order: int64[n], where each one stands there.
    """

    step: int
    window: int
    end: int
    """events up to the window's end"""
    num_events: int
    """of the window"""
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


@dataclass(frozen=True)
class ForecastWork:
    """What the pipeline's threads do. activations: bytes of a step's, of nodes and of pairs to score."""

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
    buffers: Buffers = field(default_factory=lambda: Buffers(2))
    moved: EventBytes = field(default_factory=EventBytes)

    def read(self, reader: Reader, negatives: Negatives | None, key: int, ahead: WindowPair) -> ReadPair:
        """Events of the window and behind it, and their nodes. Raises BudgetError for more than there may be."""
        window = ahead.window
        wanted = (window.last - window.first + ahead.last - ahead.first) * (
            _EVENT_BYTES + 2 * self.events.row_bytes(list(self.columns))
        )
        self._check(ahead, wanted)
        block = reader.read(window.first, window.last, keep=ahead.keep)
        target = block.part(block.last, block.last)
        if ahead.last > ahead.first:
            begin = max(window.last, ahead.keep)  # the next window may begin with events that nobody is to foresee
            target = reader.read(begin, ahead.last, keep=ahead.keep)
        self.moved.events += block.nbytes + target.nbytes
        target = target.part(max(ahead.first, target.first), target.last)
        union = RelabelTable()
        number = union.add(np.concatenate([block.src, block.dst]).astype(np.int64, copy=False))
        present, rank = union.ascending(union.size)
        negative = np.empty((len(target), 0), np.int64)
        if negatives is not None and len(target):
            negative = draw(self.events, negatives, target, window.last, key)
        ends = np.concatenate([target.src, target.dst, negative.ravel()]).astype(np.int64, copy=False)
        others = np.setdiff1d(ends, present)
        place = np.searchsorted(present, ends)
        known = place < len(present)
        known[known] = present[place[known]] == ends[known]
        place = np.where(known, place, len(present) + np.searchsorted(others, ends))
        src, dst, drawn = np.split(place, [len(target), 2 * len(target)])
        node = np.concatenate([present, others])
        edge_index = rank[number].astype(np.int64).reshape(2, len(block))
        return ReadPair(ahead, block, node, len(present), edge_index, src, dst, drawn.reshape(negative.shape), target)

    def nbytes(self, read: ReadPair) -> int:
        """Bytes from here to the model. Raises BudgetError for more than there may be."""
        count, nodes = len(read.block) + len(read.target), len(read.node)
        values = sum(self.inputs.columns.values())
        need = count * (_EVENT_BYTES + 2 * self.events.row_bytes(list(self.columns)) + 4 * values) + 16 * read.negative.size
        need += len(read.block) * (1 + self.both_ways) * _EDGE_BYTES
        need += nodes * (_NODE_BYTES + 8 * self.inputs.channels + 3 * self.state_bytes)
        self._check(read.ahead, need)
        self._check(read.ahead, self.activations(nodes, read.src.size * (1 + read.negative.shape[1])), self.max_activations)
        return need

    def _check(self, ahead: WindowPair, need: int, most: int | None = None) -> None:
        if need > (most := self.max_bytes if most is None else most):
            events, more = ahead.window.last - ahead.window.first, ahead.last - ahead.first
            raise BudgetError(
                f"window {ahead.window.number} has {events:,} events, the next one {more:,} more, and they need "
                f"{words_for(need, most)}; take shorter windows, narrower rows, fewer negatives or more memory"
            )

    def make(self, read: ReadPair) -> Forecast:
        """The window's edges and first rows; nothing that nodes carry yet."""
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
            y = torch.from_numpy(self.y[read.node[:present]].astype(np.int64))
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
        )


def fetch(history: History, base: int, forecast: Forecast) -> Forecast:
    """With what its nodes carried when it was fetched; base: the history's step of step 0."""
    node = forecast.node.numpy()
    ids = np.sort(node)
    found = history.fetch(base + forecast.step, ids)
    return forecast._replace(fetched=found, order=torch.from_numpy(np.searchsorted(ids, node)))


class ForecastLoader:
    """Forecasts of a store's events, in the order of time: `run(first, last)` gives those of steps first..last-1.

    windows: of `ooc.sampling.time_windows.windows`; inputs: of its nodes; history: what nodes carry, or None where nothing is;
    device: where forecasts are moved, all but what nodes carry, which `History.pull` gives at the step. foresee: whether
    windows come with the next one's events; else there is one more of them, the last.

    >>> for forecast in loader.run(0, 100, negatives=RandomNegatives(0, ds.num_nodes), key=7):
    ...     rows = history.pull(forecast.fetched)
    """

    def __init__(
        self,
        work: ForecastWork,
        windows: TimeWindows | CountWindows,
        history: History | None,
        in_flight: int,
        device: torch.device,
        prefetch: int = PREFETCH,
        foresee: bool = True,
    ) -> None:
        self.work, self.windows, self.history, self.device = work, windows, history, device
        self._foresee = foresee
        self._in_flight, self._prefetch = in_flight, prefetch
        self.clocks: dict[str, Clock] = {}

    def times(self) -> dict[str, dict[str, float]]:
        """Seconds of work and waiting, and items, by stage, over all runs so far; see `Pipeline.times`."""
        return {name: clock.sums() for name, clock in self.clocks.items()}

    def aheads(self) -> Iterator[WindowPair]:
        """All steps."""
        return aheads(self.windows, self.work.events, self._foresee)

    def run(
        self, first: int, last: int, *, negatives: Negatives | None = None, key: int = 0, base: int = 0
    ) -> Pipeline | OnDevice:
        """Steps first..last-1; key: of the negatives; base: the history's step of step 0. Close what it returns.

        While iterating, raises BudgetError for a window that does not fit the memory, and what reading raises.
        """
        work = self.work
        reader = Reader(work.events, list(work.columns))
        stages = [
            Stage("read", partial(work.read, reader, negatives, key)),
            Stage("make", work.make, nbytes=work.nbytes),
        ]
        if self.history is not None:
            stages.append(Stage("pull", partial(fetch, self.history, base)))
        found = Pipeline(islice(self.aheads(), first, last), stages, self._in_flight, self._prefetch, self.clocks)
        return found if self.device.type == "cpu" else on_device(found, self.device)
