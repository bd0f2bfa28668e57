"""Node memory: what every node remembers of its events, on disk, read ahead of the model and written behind it.

A row and the time of its last update are kept for each node by `ooc.history.history.History`, so what a batch sees are the
writes of all batches before it, whatever was read ahead. A node's message is kept nowhere: with the last message of each node
(the "last" aggregator of TGN, Rossi et al., 2020, and of PyG's TGNMemory) it is the node's latest event before the batch,
which the store knows; so all that a batch needs is known from the events alone, before the model is there.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ooc.history.history import History
from ooc.history.rows import PrefetchedRows
from ooc.loading.event_loader import EventLoader
from ooc.loading.feature_gather import Gather
from ooc.runtime.buffers import Buffers
from ooc.runtime.pipeline import Stage
from ooc.sampling.temporal_index import slots_of
from stores.arrays.rows import AnyArray
from stores.dataset import Dataset
from stores.errors import InputError

Ids = NDArray[np.int64]
_COPIES = 4
"""of a node's row in a batch: as read, its own and that of its last event's other end, and the new one"""

_PLACES = 8 * 8
"""bytes a node of `MemoryRequest` beside its row and the columns of its last event, as read and side by side"""


@dataclass(frozen=True)
class MemoryRequest:
    """What a batch asks of the memory. n: its nodes (n_id); u: all nodes whose rows it needs, `fetched.ids`.

    own, other: int64[n], where each node and the other end of its last event stand among u; time [n]: of that event; known
    bool[n]: whether there is one; columns: name -> [n, ...], the event's; write: int64[w], ascending, nodes that have events
    in the batch; at: int64[w], where they stand in n_id.
    """

    fetched: PrefetchedRows
    own: Ids
    other: Ids
    time: NDArray[Any]
    known: NDArray[np.bool_]
    columns: dict[str, AnyArray]
    write: Ids
    at: Ids


class BatchMemory(NamedTuple):
    """Of a batch's nodes n_id (n of them), on its device: their rows, and each one's last event."""

    memory: Tensor
    """[n, d]: the rows"""
    updated: Tensor
    """[n]: the time of the event that each row has last taken up, `origin` before any"""
    other: Tensor
    """[n, d]: the rows of the other end of the last event"""
    time: Tensor
    """[n]: of the last event; `origin` where there is none"""
    known: Tensor
    """bool[n]: whether there is one"""
    msg: Tensor
    """[n, m]: its columns, side by side"""


class NodeMemory:
    """Rows [N, width] with their times of update, for batches of an `EventLoader` with `n_id`; use `create` or `open`.

    columns: of the events, that make up a message. origin: the time before the first event, by default that of the first.
    Raises InputError for a store of directed edges: only with both directions an event stands among those of both its ends.

    >>> memory = NodeMemory.create("run/memory", ds, 100, columns=["msg"], max_bytes=2**28)
    >>> batch.wanted = memory.ahead(batch)                     # in the order of the batches, ahead of them
    >>> held = memory.pull(batch, torch.device("cpu"))         # when it is the batch's turn
    >>> memory.push(batch, new_rows, held.time)
    """

    def __init__(self, data: Dataset, history: History, columns: tuple[str, ...], origin: Any = None) -> None:
        self.history, self.columns, self._events = history, columns, data.events
        self.origin = (data.events.span[0] if len(data.events) else 0) if origin is None else origin
        self._slots = slots_of(data)
        self._buffers = Buffers(2)
        self._next = history.next_step

    @classmethod
    def create(
        cls,
        path: Path | str,
        data: Dataset,
        width: int,
        *,
        columns: tuple[str, ...] = (),
        max_bytes: int,
        state: dict[str, Any] | None = None,
        engine: str = "auto",
        dtype: str = "float32",
        origin: Any = None,
    ) -> "NodeMemory":
        """Memory of zeros in the directory `path`, or with `state` the one that is there, as it was when that was taken.

        max_bytes: of rows that wait to be written, and of rows kept in RAM. Raises StoreError where the disk has no room.
        """
        check_undirected(data)
        options: dict[str, Any] = {"lag": 0, "max_bytes": max_bytes, "engine": engine, "resident": True}
        if state is None:
            history = History.create(Path(path), data.num_nodes, (width + _time_columns(np.dtype(dtype)),), dtype, **options)
        else:
            history = History.open(Path(path), 1, state, **options)
        return cls(data, history, columns, origin)

    def ahead(self, batch: Any) -> MemoryRequest:
        """Find the last events of a batch's nodes, and read the rows that it needs; for batch after batch."""
        node, first = batch.n_id.numpy(), int(batch.e_id[0])
        begin, past = self._slots.before("edge_id", node, np.full(len(node), first))
        known = past > 0
        slot = (begin + past - 1)[known]
        other, event = node.copy(), self._slots.edge_ids(slot)
        other[known] = self._slots.values("indices", slot)
        ids = np.unique(np.concatenate([node, other]))
        fetched = self.history.fetch(self._next, ids)
        self._next += 1
        time = np.full(len(node), self.origin, self._events.dtype)
        time[known] = self._slots.values("time", slot)
        columns: dict[str, AnyArray] = {}
        for name in self.columns:
            values, _ = Gather(self._events.encoding(name)).read(self._events.rows(name), event, self._buffers)
            columns[name] = np.zeros((len(node), *values.shape[1:]), values.dtype)
            columns[name][known] = values
        write = np.unique(torch.cat([batch.src, batch.dst]).numpy())
        order = np.argsort(node)
        at = order[np.searchsorted(node, write, sorter=order)]
        own, others = np.searchsorted(ids, node), np.searchsorted(ids, other)
        return MemoryRequest(fetched, own, others, time, known, columns, write, at)

    def pull(self, batch: Any, device: torch.device) -> BatchMemory:
        """What the batch's nodes remember: the rows as all batches before it left them. Once for each batch, in order."""
        wanted: MemoryRequest = batch.wanted
        held, times = apart(self.history.pull(wanted.fetched)[0], self._events.dtype)
        rows, at = torch.from_numpy(held), torch.from_numpy(times)
        own, other = torch.from_numpy(wanted.own), torch.from_numpy(wanted.other)
        messages = [flat(torch.from_numpy(values)).to(rows.dtype) for values in wanted.columns.values()]
        msg = torch.cat(messages, dim=1) if messages else rows.new_empty((len(own), 0))
        time, known = torch.from_numpy(wanted.time), torch.from_numpy(wanted.known)
        found = BatchMemory(rows[own], at[own] + self.origin, rows[other], time, known, msg)
        return BatchMemory(*(tensor.to(device) for tensor in found))

    def push(self, batch: Any, memory: Tensor, updated: Tensor) -> None:
        """Keep the new rows [n, d] and times [n] of those of the batch's nodes that have events in it."""
        wanted: MemoryRequest = batch.wanted
        rows = memory.detach().cpu().numpy()[wanted.at]
        at = (updated.detach().cpu().numpy()[wanted.at] - self.origin).astype(self._events.dtype)
        self.history.push(
            wanted.fetched.step, wanted.write, [together(rows.astype(self.history.rows[0].dtype, copy=False), at)]
        )

    def end_pass(self) -> None:
        """No batch read ahead will come any more: behind a pass over events, or one that was left in the middle."""
        self.history.end_epoch()
        self.history.begin_epoch()
        self._next = self.history.next_step

    def reset(self) -> None:
        """Nothing has happened yet: rows of zeros, without writing any."""
        self.end_pass()
        self.history.forget()


def together(rows: AnyArray, time: AnyArray) -> AnyArray:
    """Rows [n, width] of float32 or float64 with the bits of times [n] behind them: one read and one write for both."""
    return np.concatenate([rows, time.view(rows.dtype).reshape(len(rows), _time_columns(rows.dtype))], axis=1)


def apart(held: AnyArray, time: np.dtype[Any]) -> tuple[AnyArray, AnyArray]:
    """(rows [n, width], times [n]) of what `together` gave.

    >>> apart(together(rows, times), times.dtype)
    """
    width = held.shape[1] - _time_columns(held.dtype)
    return held[:, :width], np.ascontiguousarray(held[:, width:]).view(time)[:, 0]


def _time_columns(dtype: np.dtype[Any]) -> int:
    """Columns that a time's eight bytes take."""
    return 8 // dtype.itemsize


def flat(values: Tensor) -> Tensor:
    """[n, ...] as [n, width]."""
    return values.reshape(len(values), math.prod(values.shape[1:]))


class MemoryLoader(EventLoader):
    """`EventLoader` whose nodes' memory is read ahead: `batch.wanted` is what `NodeMemory.pull` takes.

    memory: set before the first batch. A pass that ends early wants `NodeMemory.end_pass` before the next begins.
    """

    memory: NodeMemory

    def __init__(self, data: Dataset, batch_size: int = 200, *, width: int, **options: Any) -> None:
        names = options.get("columns")
        values = (data.events.width(name) for name in (data.events.columns if names is None else names))
        own = _COPIES * 4 * width + 2 * 4 * sum(math.prod(each) for each in values) + _PLACES
        super().__init__(data, batch_size, beside=own, **options)

    def _stages(self, epoch: int) -> list[Stage]:
        return [*super()._stages(epoch), Stage("memory", self._ahead)]

    def _ahead(self, item: tuple[int, Any]) -> tuple[int, Any]:
        item[1].wanted = self.memory.ahead(item[1])
        return item


def check_undirected(data: Dataset) -> None:
    """Raise InputError for a store of directed edges."""
    if not data.manifest.undirected:
        raise InputError(
            f"{data.path} has directed edges, and a node's past are the events that it is the source of as well: "
            "ingest it with --undirected"
        )
