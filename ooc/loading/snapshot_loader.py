"""`SnapshotLoader`: windows of a temporal graph, each a PyG `Data` cut from the events by one sequential read.

A window is a range of the events' arrays, so nothing is sampled or searched: the next windows are read, straight into memory
that is used again, numbered and their nodes' features gathered while the model computes. (Discrete-time graphs as in ROLAND,
You et al., KDD 2022, and PyG Temporal, which keep all snapshots in memory.)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch_geometric.data import Data

from ooc.graph.relabel import RelabelTable
from ooc.loading.base import Epoch
from ooc.loading.event_loader import TemporalLoader
from ooc.loading.feature_gather import Gather
from ooc.runtime.buffers import Buffers
from ooc.runtime.memory_plan import MemoryPlan, words_for
from ooc.runtime.pipeline import Stage
from ooc.sampling.time_windows import CountWindows, TimeWindow, TimeWindows, last_labels, windows
from stores.arrays.rows import AnyArray, Rows
from stores.dataset import Dataset
from stores.errors import BudgetError, ConfigError
from stores.events import EventBlock, Events, Reader

PREFETCH = 4
"""windows between the disk and the model at most; fewer where they are large"""
READERS = 2
"""windows read at once: the disk has work while one's last bytes come, and the next one's reads are prepared"""
FIELDS = frozenset(
    ("edge_index", "x", "y", "t", "n_id", "e_id", "window", "begin", "end", "num_nodes", "edge_attr", "edge_weight")
)
"""of a window, beside the events' columns"""
_EVENT_BYTES = 2 * 8 + 8
"""of an event in a batch beside what is read: edge_index and its number"""
_NODE_BYTES = 8 + 8 + 4 + 8
"""of a node beside its features and label: its id, and the table that numbers it"""


class ReadSnapshot(NamedTuple):
    """A window on its way, and its events."""

    window: TimeWindow
    events: EventBlock


class CutSnapshot(NamedTuple):
    """A window on its way: its events, its nodes (int64[n], in the order they come up), and edge_index int64[2, k] by them."""

    window: TimeWindow
    events: EventBlock
    node: NDArray[np.int64]
    edge_index: NDArray[np.int64]


@dataclass(frozen=True)
class Snapshots:
    """What the pipeline's threads do. gather, x, y: of node features and labels, None where there are none.

    columns: read; label: that of them which holds the labels of the sources, or None.
    """

    events: Events
    columns: tuple[str, ...]
    label: str | None
    overlap: bool
    gather: Gather | None
    x: Rows | None
    y: AnyArray | None
    num_nodes: int
    max_bytes: int
    transform: Callable[[Data], Any] | None
    buffers: Buffers = field(default_factory=lambda: Buffers(2))
    reads: Buffers = field(default_factory=lambda: Buffers(READERS, direct=True))

    def nbytes(self, window: TimeWindow) -> int:
        """Bytes of the window's batch at most. Raises BudgetError for more than there may be."""
        count = window.last - window.first
        labels = 8 if self.y is None else 8 * int(np.prod(self.y.shape[1:], dtype=np.int64))
        rows = 0 if self.gather is None or self.x is None else self.gather.row_bytes(self.x.shape[1:])
        nodes = min(2 * count, self.num_nodes)
        held = (self.events.row_bytes(list(self.columns)) + self._decoded) * (2 if self.overlap else 1)
        need = count * (_EVENT_BYTES + held) + nodes * (_NODE_BYTES + rows + labels)
        if need > self.max_bytes:
            raise BudgetError(
                f"window {window.number} has {count:,} events and may need {words_for(need, self.max_bytes)}; "
                "take shorter windows, fewer columns or more memory"
            )
        return need

    @property
    def _decoded(self) -> int:
        """Bytes of an event's values where they are stored in fewer bits."""
        total = 0
        for name in self.columns:
            encoding, width = self.events.encoding(name), int(np.prod(self.events.width(name), dtype=np.int64))
            total += encoding.dtype.itemsize * width if encoding.is_short else 0
        return total

    def reading(self) -> Stage:
        """Window -> its events. Windows that overlap are read by one thread, which has what they share."""
        columns = list(self.columns)
        reader = Reader(self.events, columns, self._memory) if self.overlap else None

        def read(window: TimeWindow) -> ReadSnapshot:
            if reader is not None:
                return ReadSnapshot(window, reader.read(window.first, window.last))
            return ReadSnapshot(window, self.events.read(window.first, window.last, columns, self._memory))

        return Stage("read", read, READERS if reader is None else 1, nbytes=self.nbytes)

    def _memory(self, nbytes: int) -> NDArray[np.uint8]:
        return self.reads.empty((nbytes,), np.dtype(np.uint8))

    def number(self, read: ReadSnapshot) -> CutSnapshot:
        """Its nodes, and its ends by them."""
        window, block = read
        union = RelabelTable(min(2 * len(block), self.num_nodes))
        edge_index = np.empty((2, len(block)), np.int64)
        for ends, number in zip((block.src, block.dst), edge_index, strict=True):
            union.add(ends, number)
        return CutSnapshot(window, block, union.nodes(), edge_index)

    def collate(self, cut: CutSnapshot) -> tuple[int, Any]:
        """(the number of the window behind it, its batch)."""
        window, block, node, edge_index = cut
        data = Data(edge_index=torch.from_numpy(edge_index), num_nodes=len(node))
        if self.x is not None and self.gather is not None:
            data.x = self.gather.tensor(self.gather.read(self.x, node, self.buffers)[0])
        if self.label is not None:
            data.y = torch.from_numpy(last_labels(len(node), edge_index[0], block.columns[self.label]))
        elif self.y is not None:
            data.y = torch.from_numpy(self.y[node].astype(np.int64))
        data.t = torch.from_numpy(np.ascontiguousarray(block.time))
        data.n_id = torch.from_numpy(node)
        data.e_id = torch.arange(window.first, window.last)
        given = {name: values for name, values in block.columns.items() if name != self.label}
        for name, values in given.items():
            data["edge_weight" if name == "weight" else name] = torch.from_numpy(np.ascontiguousarray(values))
        features = [name for name in given if name != "weight"]
        if len(features) == 1:
            data.edge_attr = data[features[0]]
        data.window, data.begin, data.end = window.number, window.begin, window.end
        return window.number + 1, data if self.transform is None else self.transform(data)


class SnapshotLoader(TemporalLoader):
    """Windows of a store's events in time order, each a PyG `Data`; each `iter` goes over all of them again.

    window, stride: durations ("7d", "12h", "250ms", or a number in the store's unit of time), or numbers of events where `by`
    is "count"; without a stride windows tumble: each event is in just one. start: where the first window begins, by default
    at the first event. columns: of the events to read, None for all (edge features, and the weight). features: whether to give
    x. labels: whether to give y, the nodes' of the store, the same in all windows; or the name of a column of the events:
    labels that change are what the events say of their sources, so a node's in a window is that of the last event it is the
    source of, -1 where there is none. empty: give windows without events too. prefetch: windows made in advance, as far as the
    memory goes. transform: called with every window, in a thread. device: windows are moved there.

    A window is a `Data` with edge_index int64[2, k] in time order, t [k] (the events' times), e_id int64[k] (their numbers),
    a field for every column (`msg` [k, d]; the only one also as edge_attr; the weight as edge_weight), n_id int64[n] (the
    nodes it meets, by which state is carried from window to window), x [n, f], y [n], window (its number), begin and end.
    Raises ConfigError for an argument that does not fit, InputError for a store without times; while iterating, BudgetError
    for a window that does not fit the memory.

    >>> for snapshot in SnapshotLoader(ds, window="7d", stride="1d"):
    ...     model(snapshot.x, snapshot.edge_index, snapshot.edge_attr)
    """

    def __init__(
        self,
        data: Dataset,
        window: str | float,
        stride: str | float | None = None,
        *,
        by: str = "time",
        start: Any = None,
        columns: Sequence[str] | None = None,
        features: bool = True,
        labels: bool | str = True,
        empty: bool = False,
        prefetch: int = PREFETCH,
        transform: Callable[[Data], Any] | None = None,
        device: torch.device | str | None = None,
        budget: MemoryPlan | None = None,
    ) -> None:
        label = labels if isinstance(labels, str) else None
        kept: dict[str, Any] = {"features": features, "prefetch": prefetch, "device": device, "budget": budget}
        super().__init__(data, columns, FIELDS, label=label, **kept)
        self.empty = empty
        self.windows: TimeWindows | CountWindows = windows(data.events, window, stride, by, start)
        overlap = self.windows.stride < self.windows.length
        y = data.labels if labels is True else None
        found = self._gather, self._x, y, data.num_nodes, self.budget.batch
        self._work = Snapshots(data.events, self._columns, label, overlap, *found, transform)
        self._start = self._next = 0

    def __len__(self) -> int:
        """Windows that an `iter` from the beginning gives."""
        return sum(1 for _ in self.windows.of(self.data.events, self.empty))

    def __iter__(self) -> Epoch:
        start, self._start = self._start, 0
        self._next = start
        found = (window for window in self.windows.of(self.data.events, self.empty) if window.number >= start)
        work = self._work
        stages = [work.reading(), Stage("number", work.number), Stage("collate", work.collate)]
        return Epoch(self, self._batches(found, stages), 0)

    def _took(self, epoch: int, behind: int) -> None:
        self._next = behind

    def state_dict(self) -> dict[str, Any]:
        """Which window comes next, and what that is only valid with."""
        return {"next": self._next, "windows": repr(self.windows), "events": len(self.data.events)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next `iter` begins there. Raises ConfigError where this loader's windows are other ones.

        >>> loader.load_state_dict(saved)
        """
        if state["windows"] != repr(self.windows):
            raise ConfigError(f"cannot resume: windows were {state['windows']} and are {self.windows!r} now; use the old ones")
        if state["events"] > len(self.data.events):
            raise ConfigError(f"cannot resume: there were {state['events']} events and are {len(self.data.events)} now")
        self._start = self._next = int(state["next"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.windows!r}, events={len(self.data.events)})"
