"""Edges that are sampled on a GPU and stay in the host's memory, page-locked: a kernel reads those that a hop needs (UVA)."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ooc.runtime.buffers import lock_failed, own_pages, page_lock
from ooc.runtime.messages import warn_user
from ooc.runtime.transfer import HostCopy, to_device
from ooc.sampling.neighbor import damaged_slot
from ooc.stores.io.segments import forget, mapping_of

PIECE = 2**21
"""numbers copied at once"""
_CHECKED = 2**16
"""numbers that the kernel reads to be compared"""
Read = Callable[[Tensor, Tensor], Tensor]
"""(numbers int32|int64[n] in page-locked memory, positions int64[e] on a device) -> int64[e] on the device"""


class HostEdges:
    """`indices` (int32|int64[E]) in page-locked memory, read by a device. Those of a memory map, read-only ones and those with
    gaps are copied, in the topology's part of the memory; others are locked where they are, once for all devices. Where CUDA
    cannot lock them, or no kernel reads them, the host does, and the thread that samples waits for it.

    Raises StoreError for node ids outside 0..num_sources-1.

    >>> HostEdges(graph.indices, graph.num_sources, torch.device("cuda"))[slot].device
    device(type='cuda', index=0)
    """

    def __init__(self, indices: NDArray[Any], num_sources: int, device: torch.device) -> None:
        there = mapping_of(indices) is None and indices.flags.writeable and indices.flags.c_contiguous  # as torch wants it
        own = indices if there else own_pages(len(indices), indices.dtype)
        for first, piece in checked_pieces(indices, num_sources):
            if not there:
                own[first : first + len(piece)] = piece
        self._indices, self._read = torch.from_numpy(own), self._reader(own, device)

    def _reader(self, own: NDArray[Any], device: torch.device) -> Read:
        """What reads them, page-locked from now on if that is the device."""
        if device.type != "cuda" or not own.nbytes:
            return _read_by_host
        found = reader_for(device)
        if not isinstance(found, str):
            error = page_lock(self, own.ctypes.data, own.nbytes)
            if not error:
                return found
            found = lock_failed(own.nbytes, error)
        warn_user(f"the host reads edges for the GPU, as {found}: the CPU may sample faster, by `sample_device='cpu'`")
        return _read_by_host

    def __getitem__(self, slot: Tensor) -> Tensor:
        """The sources of slots (int64[e]) on the device: int64[e] there."""
        return self._read(self._indices, slot.contiguous())


def _read_by_host(numbers: Tensor, slot: Tensor) -> Tensor:
    """A `Read` of any memory: the host waits for the slots, and copies what is there."""
    (wanted,) = HostCopy([slot]).tensors()
    return to_device([numbers[wanted].to(torch.int64)], slot.device)[0]


def checked_pieces(indices: NDArray[Any], num_sources: int) -> Iterator[tuple[int, NDArray[Any]]]:
    """(slot, the sources from it on), a piece at a time; of a memory map no more is mapped at once. Raises StoreError for node
    ids outside 0..num_sources-1."""
    for first in range(0, len(indices), PIECE):
        piece = indices[first : first + PIECE]
        if not 0 <= int(piece.min()) <= int(piece.max()) < num_sources:
            raise damaged_slot(first + int(np.argmax((piece < 0) | (piece >= num_sources))))
        yield first, piece
        forget(indices)


@cache
def reader_for(device: torch.device) -> Read | str:
    """The kernel by which a GPU reads page-locked memory of the host, compared with what is there; else why there is none."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    try:
        module = import_module("ooc.sampling.triton_reads")
        read: Read = module.read
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # where Triton starts kernels
            return read if agrees(read, device) else "Triton's kernel reads something else"
    except Exception as error:
        return f"Triton cannot: {(str(error).splitlines() or [type(error).__name__])[0]}"


def agrees(read: Read, device: torch.device) -> bool:
    """Whether a kernel reads what is there, of numbers of 4 and of 8 bytes that were locked as `HostEdges` does it. Raises
    RuntimeError where they cannot be."""
    slot = torch.randint(_CHECKED, (_CHECKED,), generator=torch.Generator().manual_seed(0))
    (there,) = to_device([slot], device)
    for dtype in (np.int32, np.int64):
        numbers = own_pages(_CHECKED, dtype)
        numbers[:] = np.arange(_CHECKED) * 7919 + 3
        if device.type == "cuda" and (error := page_lock(numbers, numbers.ctypes.data, numbers.nbytes)):
            raise RuntimeError(lock_failed(numbers.nbytes, error))
        (found,) = HostCopy([read(torch.from_numpy(numbers), there)]).arrays()
        if not np.array_equal(found, numbers[slot.numpy()].astype(np.int64)):
            return False
    return True
