"""`SnapshotLoader`: windows of a temporal graph, each a PyG `Data` cut from the events by one sequential read.

A window is a range of the events' arrays, so nothing is sampled or searched: the next windows are read, straight into memory
that is used again, numbered and their nodes' features gathered while the model computes. (Discrete-time graphs as in ROLAND,
You et al., KDD 2022, and PyG Temporal, which keep all snapshots in memory.)
"""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch_geometric.data import Data

from ooc.graph.relabel import RelabelTable
from ooc.loading.arguments import check_pyg_arguments, dataset_of
from ooc.loading.event_loader import TemporalLoader
from ooc.runtime.buffers import Buffers
from ooc.runtime.keyed_random import Cursor
from ooc.runtime.memory_plan import MemoryPlan, words_for
from ooc.runtime.pipeline import Pipeline, Stage
from ooc.runtime.transfer import OnDevice
from ooc.sampling.time_windows import CountWindows, TimeWindow, TimeWindows, last_labels, windows
from ooc.stores.arrays.rows import Ids
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError, ConfigError
from ooc.stores.events import EventBlock, Reader

PREFETCH = 4
"""windows between the disk and the model at most; fewer where they are large"""
READERS = 2
"""windows read at once: the disk has work while one's last bytes come, and the next one's reads are prepared"""
FIELDS = frozenset(("edge_index", "x", "y", "t", "n_id", "e_id", "window", "begin", "end", "num_nodes", "edge_attr"))
FIELDS |= {"edge_weight"}
"""of a window, beside the events' columns"""
_EVENT_BYTES = 2 * 8 + 8
"""of an event in a batch beside what is read: edge_index and its number"""
_NODE_BYTES = 8 + 8 + 4 + 8
"""of a node beside its features and label: its id, and the table that numbers it"""


class CutSnapshot(NamedTuple):
    """A window on its way: its events, its nodes (int64[n], in the order they come up), and edge_index int64[2, k] by them."""

    window: TimeWindow
    events: EventBlock
    node: Ids
    edge_index: Ids


class SnapshotLoader(TemporalLoader):
    """Windows of a store's events in time order, each a PyG `Data`; each `iter` goes over all of them again.

    A window is a `Data` with edge_index int64[2, k] in time order, t [k] (the events' times), e_id int64[k] (their numbers),
    a field for every column (`msg` [k, d]; the only one also as edge_attr; the weight as edge_weight), n_id int64[n] (the
    nodes it meets, by which state is carried from window to window), x [n, f], y [n], window (its number), begin and end.

    Args:
        data: A store with times.
        window: Its length: a duration ("7d", "12h", "250ms", or a number in the store's unit of time), or a number of events
            where `by` is "count".
        stride: Between the beginnings of two windows; None: the length, so that each event is in just one.
        by: "time" or "count".
        start: Where the first window begins, by default at the first event.
        columns: Of the events to read (edge features, and the weight); None: all.
        features: Whether to give x.
        labels: Whether to give y, the nodes' of the store, the same in all windows. Or the name of a column of the events, for
            labels that change: a node's in a window is that of the last event it is the source of, -1 where there is none.
        empty: Whether windows without events come too.
        prefetch: Windows made in advance, as far as the memory goes.
        transform: Called with every window, in a thread.
        device: Where windows are moved.
        budget: A plan of the memory other than `plan_memory(data)`.
        arguments: PyG's and DataLoader's others, as NeighborLoader's.

    Raises:
        ConfigError: An argument does not fit.
        InputError: The store has no times.
        BudgetError: While iterating, a window does not fit the memory.

    >>> for snapshot in SnapshotLoader(ds, window="7d", stride="1d"):
    ...     model(snapshot.x, snapshot.edge_index, snapshot.edge_attr)
    """

    def __init__(
        self,
        data: Dataset | Path | str,
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
        **arguments: Any,
    ) -> None:
        check_pyg_arguments(arguments, list(inspect.signature(SnapshotLoader).parameters), type(self).__name__)
        data = dataset_of(data, homogeneous=type(self).__name__)
        self._label = labels if isinstance(labels, str) else None
        common: dict[str, Any] = {"transform": transform, "device": device, "budget": budget, "label": self._label}
        super().__init__(data, columns, FIELDS, features=features, prefetch=prefetch, **common)
        self.empty = empty
        self.windows: TimeWindows | CountWindows = windows(data.events, window, stride, by, start)
        self._overlap = self.windows.stride < self.windows.length
        self._y = data.labels if labels is True else None
        self._reads = Buffers(READERS, direct=True)
        self._start_at(Cursor(0, 0))

    def _windows(self, first: int = 0) -> Iterator[TimeWindow]:
        """From window number `first` on."""
        return (window for window in self.windows.of(self._events, self.empty) if window.number >= first)

    def __len__(self) -> int:
        """Windows that an `iter` from the beginning gives."""
        return sum(1 for _ in self._windows())

    def _from(self, start: Cursor) -> Pipeline | OnDevice:
        stages = [self._reading(), Stage("number", self._number), Stage("collate", self._collate)]
        return self._batches(self._windows(start.step), stages)

    @property
    def _until(self) -> None:
        return None

    def _ended(self, epoch: int) -> None:
        """The cursor stays behind the last window: appended events may fill the next one."""

    def state_dict(self) -> dict[str, Any]:
        """Which window comes next, and what that is only valid with."""
        return {"next": self._cursor.step, "windows": repr(self.windows), "events": len(self._events), **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at `state` with the next `iter`, also on a store that has grown since.

        Raises:
            ConfigError: This loader's windows are other ones, of another store or of other lengths.

        >>> loader.load_state_dict(saved)
        """
        if not {"next", "windows", "events"} <= state.keys():
            raise ConfigError(f"cannot resume: a state of SnapshotLoader has 'next', 'windows' and 'events', not {[*state]}")
        if "store" in state and self.data.grown_since(state["store"]) is None:
            raise ConfigError(f"cannot resume: the state is of another store than {self.data.path}")
        if state["windows"] != repr(self.windows):
            raise ConfigError(f"cannot resume: windows were {state['windows']} and are {self.windows!r} now; use the old ones")
        if state["events"] > len(self._events):
            raise ConfigError(f"cannot resume: there were {state['events']} events and are {len(self._events)} now")
        self._start_at(Cursor(0, int(state["next"])))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.windows!r}, events={len(self._events)})"

    def _nbytes(self, window: TimeWindow) -> int:
        """Bytes of the window's batch at most. Raises BudgetError for more than there may be."""
        count = window.last - window.first
        labels = 8 if self._y is None else 8 * math.prod(self._y.shape[1:])
        nodes = min(2 * count, self.data.num_nodes)
        short = [(name, each) for name in self._columns if (each := self._events.encoding(name)).is_short]
        decoded = sum(each.dtype.itemsize * math.prod(self._events.width(name)) for name, each in short)
        read = (self._events.row_bytes(list(self._columns)) + decoded) * (2 if self._overlap else 1)
        need = count * (_EVENT_BYTES + read) + nodes * (_NODE_BYTES + self._node_bytes + labels)
        if need > self._max_bytes:
            raise BudgetError(
                f"window {window.number} has {count:,} events and may need {words_for(need, self._max_bytes)}; "
                "take shorter windows, fewer columns or more memory"
            )
        return need

    def _reading(self) -> Stage:
        """Window -> its events. Windows that overlap are read by one thread, which has what they share."""
        columns = list(self._columns)
        reader = Reader(self._events, columns, self._memory) if self._overlap else None

        def read(window: TimeWindow) -> tuple[TimeWindow, EventBlock]:
            if reader is not None:
                return window, reader.read(window.first, window.last)
            return window, self._events.read(window.first, window.last, columns, self._memory)

        return Stage("read", read, READERS if reader is None else 1, nbytes=self._nbytes)

    def _memory(self, nbytes: int) -> NDArray[np.uint8]:
        return self._reads.empty((nbytes,), np.dtype(np.uint8))

    def _number(self, read: tuple[TimeWindow, EventBlock]) -> CutSnapshot:
        """Its nodes, and its ends by them."""
        window, block = read
        self.moved.events += block.nbytes
        union = RelabelTable(min(2 * len(block), self.data.num_nodes))
        edge_index = np.empty((2, len(block)), np.int64)
        for ends, number in zip((block.src, block.dst), edge_index, strict=True):
            union.add(ends, number)
        return CutSnapshot(window, block, union.nodes(), edge_index)

    def _collate(self, cut: CutSnapshot) -> tuple[int, Any]:
        """(the number of the window behind it, its batch)."""
        window, block, node, edge_index = cut
        data = Data(edge_index=torch.from_numpy(edge_index), num_nodes=len(node))
        self._add_features(data, node)
        if self._label is not None:
            data.y = torch.from_numpy(last_labels(len(node), edge_index[0], block.columns[self._label]))
        elif self._y is not None:
            data.y = torch.from_numpy(self._y[node].astype(np.int64))
        data.t = torch.from_numpy(np.ascontiguousarray(block.time))
        data.n_id = torch.from_numpy(node)
        data.e_id = torch.arange(window.first, window.last)
        given = {name: values for name, values in block.columns.items() if name != self._label}
        for name, values in given.items():
            data["edge_weight" if name == "weight" else name] = torch.from_numpy(np.ascontiguousarray(values))
        features = [name for name in given if name != "weight"]
        if len(features) == 1:
            data.edge_attr = data[features[0]]
        data.window, data.begin, data.end = window.number, window.begin, window.end
        return window.number + 1, data if self._transform is None else self._transform(data)
