"""Edges in page-locked memory of the host: locked once for all that read them, whatever array they come in."""

import gc
import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ooc.runtime.buffers import own_pages
from ooc.runtime.messages import OocWarning
from ooc.sampling.host_edges import HostEdges
from tests.pretended_cuda import REGISTERED, pretended_cuda

CUDA = torch.device("cuda", 0)


def made(count: int = 5000) -> NDArray[Any]:
    """Edges of a graph of 1,000 nodes, in pages of their own."""
    indices = own_pages(count, np.int32)
    indices[:] = np.random.default_rng(0).integers(0, 1000, count)
    return indices


def read(edges: HostEdges, slot: torch.Tensor) -> NDArray[Any]:
    return edges[slot.to(CUDA)].cpu().numpy()


def test_edges_are_locked_once_for_all_that_read_them() -> None:
    indices, slot = made(), torch.arange(0, 5000, 7)
    with pretended_cuda() as device:
        first, second = HostEdges(indices, 1000, CUDA), HostEdges(indices, 1000, CUDA)
        assert device.counts[REGISTERED] == 1
        del first
        gc.collect()
        assert indices.ctypes.data in device.locked
        np.testing.assert_array_equal(read(second, slot), indices[slot])
        del second
        gc.collect()
        assert not device.locked
        again = HostEdges(indices, 1000, CUDA)  # it can be locked once more
        np.testing.assert_array_equal(read(again, slot), indices[slot])
        assert device.counts[REGISTERED] == 2


def test_edges_that_something_else_has_locked_are_read_by_the_host() -> None:
    indices, slot = made(), torch.arange(0, 5000, 7)
    with pretended_cuda() as device:
        assert device.cudaHostRegister(indices.ctypes.data, 4096, 1) == 0
        with pytest.warns(OocWarning, match=r"error 712; part of it is page-locked by something else in this process\)"):
            edges = HostEdges(indices, 1000, CUDA)
        np.testing.assert_array_equal(read(edges, slot), indices[slot])
        device.cudaHostUnregister(indices.ctypes.data)
        del edges
        np.testing.assert_array_equal(read(HostEdges(indices, 1000, CUDA), slot), indices[slot])  # nobody counts as an owner


@pytest.mark.parametrize("how", ["gaps", "backwards", "read-only"])
def test_edges_that_cannot_be_locked_where_they_are_are_copied(how: str) -> None:
    indices, slot = made(), torch.arange(0, 2500, 7)
    given = {"gaps": indices[::2], "backwards": indices[::-1], "read-only": indices.view()}[how]
    given.flags.writeable = how != "read-only"
    with pretended_cuda() as device:
        edges = HostEdges(given, 1000, CUDA)
        assert [*device.locked.values()] == [given.nbytes]
        assert given.ctypes.data not in device.locked
        np.testing.assert_array_equal(read(edges, slot), given[slot])
        np.testing.assert_array_equal(edges[slot.to(CUDA)[::3]].cpu().numpy(), given[slot[::3]])


def test_the_kernel_refuses_tensors_with_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where Triton is not installed: it is asked before the kernel is started."""
    language = SimpleNamespace(constexpr=int)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(jit=lambda **_: lambda kernel: kernel, language=language))
    monkeypatch.setitem(sys.modules, "triton.language", language)
    monkeypatch.delitem(sys.modules, "ooc.sampling.triton_reads", raising=False)
    read = import_module("ooc.sampling.triton_reads").read
    monkeypatch.delitem(sys.modules, "ooc.sampling.triton_reads")
    numbers, slot = torch.arange(9, dtype=torch.int32), torch.arange(8)
    for given in ((numbers[::2], slot), (numbers, slot[::2])):
        with pytest.raises(ValueError, match="not with strides of"):
            read(*given)
    assert read(numbers, slot[:0]).tolist() == []
