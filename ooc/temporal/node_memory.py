"""Node memory on disk: a row and an update time per node, prefetched before the model needs them and written afterwards.

`ooc.history.history.History` keeps the rows, so a batch sees the writes of all earlier batches no matter what was prefetched.
Messages are not stored: with the "last" aggregator (TGN, Rossi et al., 2020; PyG's TGNMemory) a node's message is its latest
event before the batch, so a batch's needs are known from the events alone.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ooc.history.history import History, open_history
from ooc.history.rows import PrefetchedRows
from ooc.loading.collate import Gather
from ooc.loading.event_loader import EventLoader
from ooc.runtime.buffers import Buffers
from ooc.runtime.pipeline import Stage
from ooc.runtime.transfer import HostCopy, to_device
from ooc.sampling.temporal_neighbor import TemporalIndex
from ooc.stores.arrays.rows import AnyArray, Ids
from ooc.stores.dataset import Dataset
from ooc.stores.errors import InputError

_COPIES = 4
"""copies of a node's row in a batch: as read, its own, that of its last event's other end, and the new one"""
_PLACES = 8 * 8
"""bytes per node of `MemoryRequest` besides its row and the columns of its last event"""


@dataclass(frozen=True)
class MemoryRequest:
    """What a batch needs from the memory. n: its nodes (n_id); u: all nodes whose rows it needs (`fetched.ids`).

    `own`, `other`: int64[n], positions in u of each node and of its last event's other end; `time` [n] of that event; `known`
    bool[n], whether there is one; `columns`: name -> [n, ...]; `write`: int64[w] ascending, nodes with events in the batch;
    `at`: int64[w], their positions in n_id. A part of a batch that is ranked writes nothing.
    """

    fetched: PrefetchedRows
    own: Ids
    other: Ids
    time: AnyArray
    known: NDArray[np.bool_]
    columns: dict[str, AnyArray]
    write: Ids
    at: Ids


class BatchMemory(NamedTuple):
    """The rows and last events of a batch's nodes n_id (n of them), on its device.

    `memory` [n, d]: the rows; `updated` [n]: time of the last event in each, `origin` without one; `other` [n, d]: rows of the
    last event's other end; `time` [n] of that event, `origin` without one; `known` bool[n]: whether there is one; `msg` [n, m]:
    its columns, concatenated.
    """

    memory: Tensor
    updated: Tensor
    other: Tensor
    time: Tensor
    known: Tensor
    msg: Tensor


class NodeMemory:
    """Rows [N, width] with update times, for batches of an `EventLoader` with `n_id`; use `create`.

    `columns` are the event columns of a message, `origin` the time before the first event (default: that of the first event).
    Raises InputError for a directed store, in which an event is not among those of its source.

    >>> memory = NodeMemory.create("run/memory", ds, 100, columns=["msg"], max_bytes=2**28)
    >>> batch.memory_request = memory.ahead(batch)                     # for each batch in order, ahead of training
    >>> rows = memory.pull(batch, torch.device("cpu"))         # at the batch's turn
    >>> memory.push(batch, new_rows)
    """

    def __init__(self, data: Dataset, history: History, columns: tuple[str, ...], origin: Any = None) -> None:
        self.history, self.columns, self._events = history, columns, data.events
        self.origin = (data.events.span[0] if len(data.events) else 0) if origin is None else origin
        self._slots = TemporalIndex.of(data)
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
        grown: bool = False,
        engine: str = "auto",
        dtype: str = "float32",
        origin: Any = None,
    ) -> "NodeMemory":
        """Create a memory of zeros in the directory `path`, or reopen the one there as it was when `state` was taken.

        `grown`: the store has more nodes since. `max_bytes` bounds both the rows waiting to be written and those cached in RAM.
        Raises StoreError if the disk is full.
        """
        check_undirected(data)
        options: dict[str, Any] = {"lag": 0, "max_bytes": max_bytes, "engine": engine, "resident": True}
        widths = (width + _time_columns(np.dtype(dtype)),)
        return cls(data, open_history(Path(path), data.num_nodes, widths, dtype, state, grown, **options), columns, origin)

    def ahead(self, batch: Any) -> MemoryRequest:
        """Find the last events of a batch's nodes and prefetch the rows it needs; call for every batch in order."""
        ranked = "part_of" in batch
        node, first = batch.n_id.numpy(), batch.part_of if ranked else int(batch.e_id[0])
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
        write = np.unique(torch.cat([batch.src, batch.dst]).numpy())[: 0 if ranked else None]
        order = np.argsort(node)
        at = order[np.searchsorted(node, write, sorter=order)]
        own, others = np.searchsorted(ids, node), np.searchsorted(ids, other)
        return MemoryRequest(fetched, own, others, time, known, columns, write, at)

    def pull(self, batch: Any, device: torch.device) -> BatchMemory:
        """Return the memory of the batch's nodes after all earlier batches; call once per batch, in order."""
        request: MemoryRequest = batch.memory_request
        values, times = unpack_time(self.history.pull(request.fetched)[0], self._events.dtype)
        rows, at = torch.from_numpy(values), torch.from_numpy(times)
        own, other = torch.from_numpy(request.own), torch.from_numpy(request.other)
        messages = [flat(torch.from_numpy(column)).to(rows.dtype) for column in request.columns.values()]
        msg = torch.cat(messages, dim=1) if messages else rows.new_empty((len(own), 0))
        time, known = torch.from_numpy(request.time), torch.from_numpy(request.known)
        memory = BatchMemory(rows[own], at[own] + self.origin, rows[other], time, known, msg)
        return BatchMemory(*to_device(memory, device))

    def push(self, batch: Any, memory: Tensor) -> None:
        """Store the new rows [n, d] of those of the batch's nodes that have events in it, and their last events' times."""
        request: MemoryRequest = batch.memory_request
        at = (request.time[request.at] - self.origin).astype(self._events.dtype)
        dtype = self.history.rows[0].dtype

        def rows(arrays: list[AnyArray]) -> list[AnyArray]:
            return [pack_time(arrays[0][request.at].astype(dtype, copy=False), at)]

        self.history.push(request.fetched.step, request.write, HostCopy([memory]).now_or_later(rows))

    def end_pass(self) -> None:
        """Discard prefetched batches, after a pass over the events or one that was interrupted."""
        self.history.end_epoch()
        self.history.begin_epoch()
        self._next = self.history.next_step

    def reset(self) -> None:
        self.end_pass()
        self.history.forget()


def batch_memory_bytes(data: Dataset, width: int, columns: Iterable[str]) -> int:
    """Bytes that a node of a batch takes on a device: its `BatchMemory`, and its new row."""
    values = sum(math.prod(data.events.width(name)) for name in columns)
    return 3 * 4 * width + 4 * values + 2 * 8 + 1


def pack_time(rows: AnyArray, time: AnyArray) -> AnyArray:
    """Append the bits of times [n] to rows [n, width] of float32 or float64, so that both are one read and write."""
    return np.concatenate([rows, time.view(rows.dtype).reshape(len(rows), _time_columns(rows.dtype))], axis=1)


def unpack_time(packed: AnyArray, time: np.dtype[Any]) -> tuple[AnyArray, AnyArray]:
    """Split the result of `pack_time` into rows [n, width] and times [n]."""
    width = packed.shape[1] - _time_columns(packed.dtype)
    return packed[:, :width], np.ascontiguousarray(packed[:, width:]).view(time)[:, 0]


def _time_columns(dtype: np.dtype[Any]) -> int:
    """Columns that a time's eight bytes take."""
    return 8 // dtype.itemsize


def flat(values: Tensor) -> Tensor:
    """Reshape [n, ...] to [n, width]."""
    return values.reshape(len(values), math.prod(values.shape[1:]))


class MemoryLoader(EventLoader):
    """`EventLoader` that prefetches the nodes' memory: `batch.memory_request` is the argument of `NodeMemory.pull`.

    Set `memory` before the first batch, and call `NodeMemory.end_pass` after a pass that ends early.
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
        item[1].memory_request = self.memory.ahead(item[1])
        return item


def check_undirected(data: Dataset) -> None:
    """Raise InputError if the store is directed."""
    if not data.manifest.undirected:
        raise InputError(
            f"{data.path} has directed edges, but a node's past includes the events it is the source of: "
            "ingest it with `undirected=True`"
        )
