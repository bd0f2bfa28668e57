"""A graph's topology for sampling on a device, in its memory or with the edges in the host's, and what is kept beside it."""

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ooc.runtime.transfer import to_device
from ooc.sampling.host_edges import PIECE, HostEdges, checked_pieces
from ooc.sampling.neighbor import damaged_slot
from ooc.stores.errors import StoreError
from ooc.stores.graph import Graph

UNSEEN = 2**31 - 1
"""of a node that the batch has not met"""
_made: "weakref.WeakKeyDictionary[Graph, weakref.WeakValueDictionary[tuple[torch.device, bool], DeviceTopology]]"
_made = weakref.WeakKeyDictionary()
_made_lock = threading.Lock()


def device_bytes(graph: Graph, edges_on_host: bool = False) -> int:
    """Bytes that sampling a graph on a device takes of its memory, beside batches."""
    return graph.indptr.nbytes + 4 * graph.num_nodes + (0 if edges_on_host else graph.indices.nbytes)


class DeviceTopology:
    """`indptr` (int64[N+1]) on the device and `indices` (int32|int64[E]) there too or, with `edges_on_host`, in the host's
    memory (`HostEdges`); copied when they are first asked for.

    `seen` (int32[N]) numbers the nodes of the batch under way: one batch is sampled at a time, on a stream of its own.
    """

    def __init__(self, graph: Graph, device: torch.device, edges_on_host: bool = False) -> None:
        self.device, self.edges_on_host, self._lock = device, edges_on_host, threading.Lock()
        self._host: tuple[NDArray[Any], NDArray[Any], int] | None = graph.indptr, graph.indices, graph.num_sources
        """what is to be copied"""
        self._stream: Any = None
        self.indptr, self.seen = torch.empty(0), torch.empty(0)
        self._indices: Tensor | HostEdges = torch.empty(0)

    @property
    def copied(self) -> bool:
        """Whether it is there."""
        return self._host is None

    def sources(self, slot: Tensor) -> Tensor:
        """The sources of slots (int64[e]): int64[e], all on the device."""
        return self._indices[slot].to(torch.int64)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """For a batch: no other one is sampled meanwhile, and when it ends all streams may read what it made."""
        with self._lock, self._on_stream():
            if self._host is not None:
                self._copy(*self._host)
                self._host = None
            try:
                yield
            except BaseException:
                self.seen.fill_(UNSEEN)
                raise
            finally:
                if self._stream is not None:
                    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # lets the thread sleep
                    event.record(self._stream)
                    event.synchronize()

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self.device.type != "cuda":
            with nullcontext():
                yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def _copy(self, indptr: NDArray[Any], indices: NDArray[Any], num_sources: int) -> None:
        """Copy the topology. Raises StoreError where it is damaged."""
        indptr, num_edges = np.asarray(indptr), len(indices)
        falls = np.flatnonzero(indptr[1:] < indptr[:-1])
        if len(falls):
            raise StoreError(f"indptr decreases at node {falls[0]}: the store is damaged; run `ooc verify` on it")
        if indptr[0] < 0 or indptr[-1] > num_edges:
            raise damaged_slot(min(int(indptr[0]), num_edges))
        self.indptr = _copied(indptr, ((at, indptr[at : at + PIECE]) for at in range(0, len(indptr), PIECE)), self.device)
        if self.edges_on_host:
            self._indices = HostEdges(indices, num_sources, self.device)
        else:
            self._indices = _copied(indices, checked_pieces(indices, num_sources), self.device)
        self.seen = torch.full((len(indptr) - 1,), UNSEEN, dtype=torch.int32, device=self.device)


def _copied(array: NDArray[Any], pieces: Iterable[tuple[int, NDArray[Any]]], device: torch.device) -> Tensor:
    """A copy on the device, made of pieces."""
    out = torch.empty(len(array), dtype=torch.from_numpy(np.empty(0, array.dtype)).dtype, device=device)
    for first, piece in pieces:
        out[first : first + len(piece)] = to_device([torch.from_numpy(np.array(piece))], device)[0]
    return out


def device_topology(graph: Graph, device: torch.device, edges_on_host: bool = False) -> DeviceTopology:
    """The one of a graph on a device, which loaders share; it goes with the last of them."""
    key = device, _ = _numbered(device), edges_on_host
    with _made_lock:
        made = _made.setdefault(graph, weakref.WeakValueDictionary())
        topology = made.get(key)
        if topology is None:
            made[key] = topology = DeviceTopology(graph, device, edges_on_host)
        return topology


def is_there(graph: Graph, device: torch.device, edges_on_host: bool = False) -> bool:
    """Whether the graph's topology has its memory already, for a loader that sampled on the device."""
    with _made_lock:
        made = _made.get(graph)
        topology = None if made is None else made.get((_numbered(device), edges_on_host))
        return topology is not None and topology.copied


def _numbered(device: torch.device) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" and device.index is None else device
