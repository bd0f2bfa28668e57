"""Transfer of batches to the GPU, copied on a separate stream while the model computes on the previous batch.

A batch's tensors are views of few arrays, so each array is copied once and the views are recreated over the copies. Arrays in a
page-locked lease (`ooc.runtime.buffers`: the features) are copied directly; the rest is packed into one lease first.
(Prefetching on a second stream as in DGL, GraphBolt and apex' data_prefetcher; leases that end with an event as in SPDK and
io_uring's registered buffers.)
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.data.data import BaseData

from ooc.runtime.buffers import Buffers
from ooc.runtime.clock import Clock
from ooc.runtime.messages import warn_user
from ooc.runtime.pipeline import CONSUMER, Pipeline, Stage

COPY = "copy"
"""name of the stage in a loader's times"""
AHEAD = 1
"""batches on the device before the model requests them"""
_ALIGN = 512  # bytes, as torch's allocator for CUDA aligns
_STAGING_KEPT = 1
T = TypeVar("T")


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to every leaf of Data (changed in place), tuples, NamedTuples, lists and mappings."""
    if isinstance(value, BaseData):
        return value.apply(lambda leaf: map_leaves(leaf, change))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_leaves(part, change) for part in value))
    if isinstance(value, tuple | list):
        return type(value)(map_leaves(part, change) for part in value)
    if isinstance(value, Mapping):
        return {key: map_leaves(part, change) for key, part in value.items()}
    return change(value)


@dataclass
class StorageRegion:
    """Bytes first:stop of a storage, the part a batch's tensors use."""

    storage: torch.UntypedStorage
    first: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.first

    def bytes(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The memory itself, uint8[nbytes]."""
        view = torch.empty(0, dtype=torch.uint8).set_(self.storage, self.first, (self.nbytes,), (1,))
        return view.numpy()


class StorageRegions:
    """The distinct arrays behind a batch's tensors, and those tensors recreated over copies of the arrays.

    Only plain tensors in CPU memory are included; sparse tensors, subclasses and tensors with a gradient are left unchanged.
    """

    def __init__(self, batch: Any) -> None:
        self.at: dict[int, StorageRegion] = {}
        self.complete = True
        """whether everything in the batch that could be on a device is included, or in `elsewhere`"""
        self.elsewhere: list[Tensor] = []
        """tensors that are on a device"""
        self._batch = batch
        self._tensors: list[Tensor] = []
        map_leaves(batch, self._add)

    def _add(self, leaf: Any) -> Any:
        if _is_plain(leaf) and leaf.numel():
            self._tensors.append(leaf)
            storage = leaf.untyped_storage()
            first, stop = _bytes_seen(leaf)
            first = first // _ALIGN * _ALIGN
            region = self.at.setdefault(storage.data_ptr(), StorageRegion(storage, first, stop))
            region.first, region.stop = min(region.first, first), max(region.stop, stop)
            if storage.nbytes() > region.storage.nbytes():  # two storages over one array
                region.storage = storage
        elif type(leaf) is Tensor and leaf.device.type != "cpu":
            self.elsewhere.append(leaf)
        elif not _is_plain(leaf):
            self.complete = self.complete and not callable(getattr(leaf, "to", None))
        return leaf

    def rebuilt(self, copies: Mapping[int, Tensor]) -> Any:
        """Return the batch over `copies` (uint8[nbytes] per region, by address, on any device); changes Data in place."""
        views = {id(tensor): self._view(tensor, copies) for tensor in self._tensors}
        empty_on = next(iter(copies.values())).device if copies else None

        def change(leaf: Any) -> Any:
            if _is_plain(leaf) and not leaf.numel() and empty_on is not None:
                return leaf.to(empty_on)
            return views.get(id(leaf), leaf)

        return map_leaves(self._batch, change)

    def _view(self, tensor: Tensor, copies: Mapping[int, Tensor]) -> Tensor:
        address, size = tensor.untyped_storage().data_ptr(), tensor.element_size()
        copy = copies[address]
        begin = copy.storage_offset() + tensor.storage_offset() * size - self.at[address].first
        view = torch.empty(0, dtype=tensor.dtype, device=copy.device)
        return view.set_(copy.untyped_storage(), begin // size, tensor.size(), tensor.stride())


def _is_plain(leaf: Any) -> bool:
    if type(leaf) is not Tensor or leaf.layout != torch.strided or leaf.device.type != "cpu":
        return False
    return not (leaf.requires_grad or leaf.is_quantized or leaf.is_conj() or leaf.is_neg())


def _bytes_seen(tensor: Tensor) -> tuple[int, int]:
    """The range of bytes of its storage that a non-empty tensor uses."""
    first = int(tensor.storage_offset())
    last = first + sum((n - 1) * step for n, step in zip(tensor.size(), tensor.stride(), strict=True))
    return first * tensor.element_size(), (last + 1) * tensor.element_size()


def _packed(regions: Mapping[int, StorageRegion]) -> tuple[dict[int, int], int]:
    """Return the offset of each region in one packed array, and that array's bytes."""
    at, total = {}, 0
    for address, region in regions.items():
        at[address] = total
        total += -(-region.nbytes // _ALIGN) * _ALIGN
    return at, total


def pin(batch: Any) -> Any:
    """Return the batch in one piece of torch's page-locked memory; changes Data in place.

    torch's allocator tracks the user's copies in flight and does not reuse the memory before they complete.
    """
    regions = StorageRegions(batch)
    at, total = _packed(regions.at)
    piece = torch.empty(total, dtype=torch.uint8, pin_memory=True)
    copies = {}
    for address, region in regions.at.items():
        copies[address] = piece[at[address] : at[address] + region.nbytes]
        np.copyto(copies[address].numpy(), region.bytes())
    return regions.rebuilt(copies)


class ResidentBatch(NamedTuple):
    """A batch on the device and the memory of its tensors, those that were there among them."""

    batch: Any
    memory: list[Tensor]
    complete: bool
    """see `StorageRegions.complete`"""


class Copier:
    """Copies batches to a device, from any thread, and returns when the copies are complete; see `deliver`.

    Arrays in buffers of `leases` are copied directly, others through a staging lease of at most `max_bytes`. Host memory is
    released when the copy's event has passed, also after an error. A CPU device works the same without streams.
    """

    def __init__(self, device: torch.device, leases: Buffers | None = None, max_bytes: int | None = None) -> None:
        self._on_cuda = device.type == "cuda"
        if self._on_cuda and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.staging = Buffers(_STAGING_KEPT, max_bytes=max_bytes, pinned=self._on_cuda, least_bytes=1)
        self._leases = leases
        self._stream = torch.cuda.Stream(device) if self._on_cuda else None  # type: ignore[no-untyped-call]

    def __call__(self, batch: Any) -> ResidentBatch:
        """Copy a batch to the device and wait for the copies."""
        regions = StorageRegions(batch)
        with ExitStack() as stack:
            if self._stream is not None:
                stack.enter_context(torch.cuda.device(self.device))
                stack.enter_context(torch.cuda.stream(self._stream))
            under_way: list[tuple[Tensor, Tensor]] = []  # sources, alive until the event has passed, and copies
            try:
                copies = self._copies(regions, under_way)
            finally:
                if self._stream is not None:
                    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # lets the thread sleep
                    event.record(self._stream)
                    event.synchronize()
            complete = regions.complete and all(each.device == self.device for each in regions.elsewhere)
            return ResidentBatch(regions.rebuilt(copies), [copy for _, copy in under_way] + regions.elsewhere, complete)

    def _copies(self, regions: StorageRegions, under_way: list[tuple[Tensor, Tensor]]) -> dict[int, Tensor]:
        """Return uint8 device copies of the regions, by address."""
        leased = {address for address in regions.at if self._leases is not None and self._leases.holds(address)}
        copies = {address: self._copy(regions.at[address].bytes(), under_way) for address in leased}
        others = {address: region for address, region in regions.at.items() if address not in leased}
        at, total = _packed(others)
        if others:
            staged = self.staging.empty((total,), np.dtype(np.uint8))
            for address, region in others.items():
                np.copyto(staged[at[address] : at[address] + region.nbytes], region.bytes())
            packed = self._copy(staged, under_way)
            copies |= {address: packed[at[address] : at[address] + region.nbytes] for address, region in others.items()}
        return copies

    def _copy(self, source: np.ndarray[Any, np.dtype[np.uint8]], under_way: list[tuple[Tensor, Tensor]]) -> Tensor:
        copy = torch.empty(len(source), dtype=torch.uint8, device=self.device)
        under_way.append((torch.from_numpy(source), copy))
        return copy.copy_(under_way[-1][0], non_blocking=True)

    def deliver(self, resident: ResidentBatch) -> Any:
        """Return the batch for use on the current thread and stream.

        Records the stream, so that torch does not reuse memory the consumer drops while kernels still read it. Moves what was
        not copied (sparse tensors, objects with a `to`).
        """
        if self._on_cuda:
            stream, usual = torch.cuda.current_stream(self.device), torch.cuda.default_stream(self.device)
            if stream != usual:  # on which batches are collated that have tensors on the device
                stream.wait_stream(usual)
            for memory in resident.memory:
                memory.record_stream(stream)
        return resident.batch if resident.complete else moved(resident.batch, self.device)


def moved(batch: Any, device: torch.device) -> Any:
    """Move everything in the batch to `device` on the current stream; changes Data in place."""

    def change(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf if leaf.device == device else leaf.to(device, non_blocking=True)
        return leaf.to(device) if callable(getattr(leaf, "to", None)) else leaf

    return map_leaves(batch, change)


def placed(batch: Any, device: torch.device) -> Any:
    """`moved` of what is in the host's memory; to CUDA through page-locked memory, without waiting."""
    return moved(pin(batch) if device.type == "cuda" else batch, device)


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """`placed` of tensors."""
    return [*placed(tuple(tensors), device)] if tensors else []


class HostCopy:
    """Copies of tensors in the host's memory. From CUDA they are made behind the kernels so far, while the host goes on.

    >>> copy = HostCopy([rows])
    >>> next_step()
    >>> copy.arrays()[0]  # waits, if it must
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._event: Any = None
        self._tensors = [tensor.detach() for tensor in tensors]
        if any(tensor.is_cuda for tensor in tensors):
            self._tensors = [_locked_copy(tensor) for tensor in self._tensors]
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    @property
    def done(self) -> bool:
        """Whether the copies are there: on the CPU the tensors themselves, which may change later."""
        return self._event is None or bool(self._event.query())

    def tensors(self) -> list[Tensor]:
        """The copies, once they are there."""
        if not self.done:
            self._event.synchronize()
        return self._tensors

    def arrays(self) -> list[NDArray[Any]]:
        """`tensors` of types that numpy has."""
        return [tensor.numpy() for tensor in self.tensors()]

    def now_or_later(self, made: Callable[[list[NDArray[Any]]], T]) -> T | Callable[[], T]:
        """`made(arrays())`: at once where they are there, as the host's tensors may change, else a function that gives it."""
        if self.done:
            return made(self.arrays())
        return lambda: made(self.arrays())


def on_host(named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Named tensors in the host's memory, for which it waits once."""
    named = list(named)
    copies = HostCopy([tensor for _, tensor in named]).tensors()
    return [(name, copy) for (name, _), copy in zip(named, copies, strict=True)]


def _locked_copy(tensor: Tensor) -> Tensor:
    """A copy that is begun, in page-locked memory."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


class OnDevice:
    """Iterator over batches on a device, as returned by `on_device`."""

    def __init__(self, batches: Iterator[Any], deliver: Callable[[Any], Any], source: Iterator[Any] | None = None) -> None:
        self._batches, self._deliver, self._source = batches, deliver, source

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return self._deliver(next(self._batches))

    def close(self) -> None:
        """Stop copying and close the source of the batches; idempotent."""
        for each in (self._batches, self._source):  # in this order: a running generator must not be closed
            getattr(each, "close", lambda: None)()


def on_device(
    batches: Iterable[Any], device: torch.device, copier: Copier | None = None, clocks: dict[str, Clock] | None = None
) -> OnDevice:
    """Yield `batches` (Data, tensors and containers of them) on a device other than the CPU.

    For CUDA, or with a `copier` (of an earlier call, whose stream and page-locked memory are reused), a thread copies the next
    one on a separate stream while the consumer computes; else they are moved when requested. The first failure, of `batches` or
    of a copy, is raised at the consumer in its place. A `Pipeline` stops and closes with this iterator.
    """
    if copier is None and device.type != "cuda":
        return OnDevice(iter(batches), lambda batch: moved(batch, device))
    copier = Copier(device) if copier is None else copier
    own = {} if clocks is None else {name: clocks.setdefault(name, Clock()) for name in (COPY, CONSUMER)}
    source = iter(batches)
    before = source if isinstance(source, Pipeline) else None
    pipeline = Pipeline(source, [Stage(COPY, copier)], max_bytes=1, max_items=AHEAD, clocks=own, before=before)
    return OnDevice(pipeline, copier.deliver, source)


def pins(pin_memory: bool) -> bool:
    """Whether batches should be in page-locked memory for the user's own copies to CUDA; warns without CUDA."""
    if pin_memory and not torch.cuda.is_available():
        warn_user("pin_memory has no effect: torch finds no CUDA device")
    return pin_memory and torch.cuda.is_available()
