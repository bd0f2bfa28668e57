"""What autograd keeps of a chunk, between the forward pass and the backward pass: where it was computed, in RAM as it is or
compressed, or on disk.

A chunk's function is run under saved-tensor hooks. Parameters are left where they are; the chunk's inputs, which have
placements of their own, are put in again in the backward pass; only the rest is kept. Its gradients are caught where they
enter, so that no input is kept for them. (torch's saved-tensor hooks; offloaded asynchronously as in FlexGNN and SSDTrain.)
"""

import shutil
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ooc.layerwise.io_stats import IoStats
from ooc.layerwise.ops import Tensors
from ooc.layerwise.row_files import MOST_KEPT, copy
from ooc.models.compression import CompressedTensor, ExactMasks, compressed, compresses, uncompressed
from ooc.models.quantization import BITS, Compression
from ooc.runtime.buffers import PAGE_BYTES, Buffers
from ooc.runtime.keyed_random import numbered
from ooc.runtime.range_io import WriteBehind
from ooc.runtime.transfer import HostCopy, to_device
from ooc.stores.io.pages import PageFile

SEGMENT_BYTES = 64 * 2**20
_PENDING, _WAITING = 4, 2
_PIECE_BYTES = 8 * 2**20
"""copied and written at a time: a range of a layer that gathers keeps tensors of a hundred megabytes"""


class OffloadedTensor(NamedTuple):
    """A tensor on disk. pieces: (file, offset, bytes), whole pages each."""

    pieces: list[tuple[int, int, int]]
    shape: torch.Size
    dtype: torch.dtype


class OffloadMemory:
    """Tensors of a GPU in the host's memory."""

    def put(self, tensor: Tensor) -> Tensor:
        """A copy of it. It is not page-locked: torch rounds the bytes of that memory up to a power of two."""
        (values,) = HostCopy([tensor.contiguous()]).tensors()
        return values.clone()


class CompressedMemory:
    """Tensors in the host's memory in fewer bits; see `ooc.models.compression`. key: of the draws of the first one."""

    def __init__(self, compression: Compression, key: int) -> None:
        self._bits, self._key, self._count = BITS[compression], key, 0

    def put(self, tensor: Tensor) -> Tensor | CompressedTensor:
        """Compress it, where that is worth it."""
        self._count += 1
        return compressed(tensor, self._bits, numbered(self._key, self._count)) if compresses(tensor) else tensor


class OffloadFile:
    """Tensors on disk, in files of 64 MB below `folder` that are written front to back and used again after `clear`."""

    def __init__(self, folder: Path, stats: IoStats) -> None:
        self._folder, self._stats = folder, stats
        self._files: list[PageFile] = []
        self._end = 0
        self._writes = WriteBehind("ooc-offload", _PENDING)
        self._copies = Buffers(kept=2 * _PENDING, direct=True, least_bytes=1)
        self._buffers = Buffers(kept=_WAITING, direct=True, least_bytes=1, most_kept=MOST_KEPT)

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return len(self._files) * SEGMENT_BYTES

    def begin(self) -> None:
        """Before the first `put`: remove what a killed process left."""
        if not self._files:
            shutil.rmtree(self._folder, ignore_errors=True)

    def put(self, tensor: Tensor) -> OffloadedTensor:
        """Write a copy of it in the background. Raises StoreError where the disk is full or an earlier write failed."""
        (values,) = HostCopy([tensor.contiguous()]).tensors()
        size = values.numel() * values.element_size()
        padded = -(-size // PAGE_BYTES) * PAGE_BYTES
        whole, pieces, done = values.reshape(-1).view(torch.uint8).numpy(), [], 0
        while done < padded:
            number, at = divmod(self._end, SEGMENT_BYTES)
            count = min(padded - done, SEGMENT_BYTES - at, _PIECE_BYTES)
            copied = self._copies.empty((count,), np.dtype(np.uint8))
            copy(whole[done : done + count], copied[: min(count, size - done)])
            self._writes.submit(partial(self._write, self._file(number), at, copied))
            pieces.append((number, at, count))
            done, self._end = done + count, self._end + count
        return OffloadedTensor(pieces, values.shape, values.dtype)

    def _write(self, file: PageFile, at: int, data: NDArray[np.uint8]) -> None:
        began = perf_counter()
        file.store(at, data)
        self._stats.written(len(data), began)

    def _file(self, number: int) -> PageFile:
        while len(self._files) <= number:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"{len(self._files)}.bin"
            path.unlink(missing_ok=True)
            PageFile.allocate(path, SEGMENT_BYTES)
            self._files.append(PageFile(path, SEGMENT_BYTES))
        return self._files[number]

    def drain(self) -> None:
        """Wait until all is written. Raises StoreError where something could not be."""
        self._writes.drain()

    def get(self, offloaded: OffloadedTensor) -> Tensor:
        """Read it, once `drain` has returned. Thread-safe."""
        began = perf_counter()
        buffer = self._buffers.empty((sum(count for _, _, count in offloaded.pieces),), np.dtype(np.uint8))
        done = 0
        for number, at, count in offloaded.pieces:
            self._files[number].load(at, buffer[done : done + count])
            done += count
        self._stats.read(done, began)
        size = offloaded.shape.numel() * offloaded.dtype.itemsize
        return torch.from_numpy(buffer[:size]).view(offloaded.dtype).view(offloaded.shape)

    def clear(self) -> None:
        """What was put may be overwritten."""
        self._end = 0

    def close(self) -> None:
        """End the threads, and remove the files; idempotent."""
        self._writes.close()
        while self._files:
            file = self._files.pop()
            file.close()
            file.path.unlink(missing_ok=True)


class _Entry(torch.autograd.Function):
    """Passes rows on, and catches their gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, rows: Tensor, name: str, caught: Tensors) -> Tensor:
        ctx.name, ctx.caught = name, caught
        return rows.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None]:
        ctx.caught[ctx.name] = grad
        return None, None, None, None


class _Exit(torch.autograd.Function):
    """Ends a graph in nothing, so that no output is kept for its backward pass; gradients are handed over by name."""

    @staticmethod
    def forward(ctx: Any, handed: Tensors, names: list[str], *rows: Tensor) -> Tensor:
        ctx.handed, ctx.names = handed, names
        return rows[0].new_zeros(()) if rows else torch.zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(ctx.handed.get(name) for name in ctx.names)


class PendingChunk:
    """A chunk whose forward is done: its outputs, for the caller to take away, and what autograd keeps for its backward.

    compute: of the inputs `given`; wanted: those that need a gradient; own: storages of parameters, by address; offload: where
    what is kept goes, None where it stays on the device that computes. `backward` is to be called once, with the inputs again.
    nbytes: of memory that what is kept takes; needed_inputs: those that the backward needs. Where it is compressed, masks of
    torch's own ReLU and dropout are kept as such.
    """

    def __init__(
        self,
        compute: Callable[[Tensors], Tensors],
        given: Tensors,
        wanted: Iterable[str],
        own: set[int],
        offload: OffloadFile | OffloadMemory | CompressedMemory | None,
    ) -> None:
        self._given, self._own, self._offload = dict(given), own, offload
        self._device = next(iter(given.values())).device
        self._kept: list[Tensor | OffloadedTensor | CompressedTensor] = []
        self._caught: Tensors = {}
        self._handed: Tensors = {}
        self.needed_inputs: set[str] = set()
        self.nbytes = 0
        anchor = torch.zeros((), requires_grad=True, device=self._device)
        entered = dict(given)
        for name in wanted:
            entered[name] = _Entry.apply(anchor, given[name], name, self._caught)  # type: ignore[no-untyped-call]
        masks = ExactMasks() if isinstance(offload, CompressedMemory) else nullcontext()
        with torch.enable_grad(), saved_tensors_hooks(self._pack, self._unpack), masks:
            outputs = compute(entered)
            learned = {name: rows for name, rows in outputs.items() if rows.requires_grad}
            end = _Exit.apply(self._handed, list(learned), *learned.values())  # type: ignore[no-untyped-call]
        if offload is not None:  # not sooner: some ops keep what they fill only then, as RReLU its noise
            self._kept = [offload.put(tensor) for tensor in self._kept if isinstance(tensor, Tensor)]
        if isinstance(offload, CompressedMemory):
            self.nbytes = sum(kept.nbytes for kept in self._kept if isinstance(kept, Tensor | CompressedTensor))
        self._end: Tensor | None = end if learned else None
        self.outputs = {name: rows.detach() for name, rows in outputs.items()}
        self._given = {}

    def _pack(self, tensor: Tensor) -> Any:
        at = tensor.untyped_storage().data_ptr()
        if at in self._own:
            return tensor
        for name, rows in self._given.items():
            if at == rows.untyped_storage().data_ptr() and tensor.dtype == rows.dtype and tensor.numel():
                self.needed_inputs.add(name)
                return name, tensor.storage_offset() - rows.storage_offset(), tensor.size(), tensor.stride()
        if not isinstance(self._offload, OffloadFile):
            self.nbytes += tensor.numel() * tensor.element_size()
        self._kept.append(tensor)
        return len(self._kept) - 1

    def packing(self, compression: Compression) -> tuple[float, float, float]:
        """(share of the bytes, seconds to compress, seconds to undo it) of what is kept, which stays as it is."""
        memory, plain = CompressedMemory(compression, 0), [kept for kept in self._kept if isinstance(kept, Tensor)]
        begun = perf_counter()
        packed = [memory.put(tensor) for tensor in plain]
        packed_at = perf_counter()
        for each in packed:
            if isinstance(each, CompressedTensor):
                uncompressed(each)
        nbytes = sum(each.nbytes for each in packed)
        return nbytes / max(1, self.nbytes), packed_at - begun, perf_counter() - packed_at

    def bytes_of(self, rows: int) -> int:
        """Bytes of memory of what is kept with so many rows."""
        kept = [tensor for tensor in self._kept if isinstance(tensor, Tensor) and tensor.dim() and len(tensor) == rows]
        return sum(tensor.numel() * tensor.element_size() for tensor in kept)

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if isinstance(packed, int):
            kept = self._kept[packed]
            if isinstance(kept, CompressedTensor):
                return uncompressed(kept)
            assert isinstance(kept, Tensor), "what is on disk is fetched first"
            return kept if kept.device == self._device else to_device([kept], self._device)[0]
        name, offset, size, stride = packed
        rows = self._given[name]
        return rows.as_strided(size, stride, rows.storage_offset() + offset)

    def fetch(self) -> None:
        """Read what is on disk; in any thread, before `backward`."""
        if isinstance(self._offload, OffloadFile):
            self._kept = [self._offload.get(kept) if isinstance(kept, OffloadedTensor) else kept for kept in self._kept]

    def backward(self, given: Tensors, grads: Tensors) -> Tensors:
        """Gradients of the inputs that wanted one, from those of the outputs (others have none); parameters' are added up."""
        self._given = dict(given)
        if self._end is not None and grads:
            self._handed.update(grads)
            self._end.backward()  # type: ignore[no-untyped-call]
        caught = dict(self._caught)
        self.end()
        return caught

    def end(self) -> None:
        """Drop everything."""
        self.outputs, self._given, self._kept, self._end = {}, {}, [], None
        self.nbytes = 0
        self._handed.clear()
        self._caught.clear()
