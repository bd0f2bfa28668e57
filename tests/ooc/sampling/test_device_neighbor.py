"""Sampling by torch operations gives the batches of the CPU's sampler, to the bit."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.runtime import keyed_random
from ooc.runtime.keyed_tensors import mix64, signed, stream_of, uniform
from ooc.sampling import NeighborSampler, device_draws, host_edges, kernels
from ooc.sampling.device_neighbor import DeviceNeighborSampler
from ooc.sampling.device_topology import UNSEEN
from ooc.sampling.host_edges import reader_for
from ooc.stores.errors import BudgetError, InputError, OocWarning, StoreError
from ooc.stores.graph import Graph
from tests.pretended_cuda import pretended_cuda

CPU = torch.device("cpu")
BITS = st.integers(0, 2**64 - 1)


@given(st.lists(BITS, min_size=1, max_size=20), BITS, st.integers(0, 2**20))
@settings(max_examples=50, deadline=None)
def test_hashes_and_uniforms_have_the_bits_of_python_s_integers(values: list[int], key: int, counter: int) -> None:
    given = torch.tensor([signed(value) for value in values])
    assert mix64(given).tolist() == [signed(keyed_random.mix(value)) for value in values]
    streams = [keyed_random.mix(key ^ keyed_random.mix(value)) for value in values]
    assert stream_of(key, given).tolist() == [signed(each) for each in streams]
    golden = 0x9E3779B97F4A7C15
    wanted = [(keyed_random.mix((each + counter * golden) % 2**64) >> 11) * 2.0**-53 for each in streams]
    assert uniform(stream_of(key, given), torch.tensor(counter)).tolist() == wanted
    assert [kernels.uniform(np.uint64(each), counter) for each in streams] == wanted


def graph_of(rng: np.random.Generator, num_nodes: int, edges: int, hubs: int) -> Graph:
    """Random edges, of nodes half of which have no in-edges, among them self-loops, and hubs with many more."""
    dst = rng.integers(0, max(1, num_nodes // 2), edges)
    src = np.where(rng.random(edges) < 0.1, dst, rng.integers(0, num_nodes, edges))
    hub = np.repeat(rng.integers(0, num_nodes, hubs), rng.integers(1, 4 * num_nodes + 1, hubs))
    src, dst = np.concatenate([src, rng.integers(0, num_nodes, len(hub))]), np.concatenate([dst, hub])
    return Graph.from_edges(src, dst, num_nodes)


def same(host: NeighborSampler, on_device: DeviceNeighborSampler, seeds: Any, key: int) -> None:
    wanted, found = host.sample(seeds, key), on_device.sample(seeds, key)
    assert (found.num_nodes, found.num_edges, found.nbytes) == (wanted.num_nodes, wanted.num_edges, wanted.nbytes)
    for name in ("node", "indptr", "source", "slot"):
        array, other = getattr(found, name), getattr(wanted, name)
        assert array.dtype == other.dtype
        np.testing.assert_array_equal(array, other, err_msg=name)
    target = np.repeat(np.arange(len(wanted.indptr) - 1), np.diff(wanted.indptr))
    np.testing.assert_array_equal(found.edge_index[1].cpu(), target)
    np.testing.assert_array_equal(found.degree.cpu(), np.diff(host.indptr)[wanted.node])
    assert (on_device.topology.seen == UNSEEN).all()


@given(
    seed=st.integers(0, 2**32),
    num_nodes=st.integers(1, 60),
    edges=st.integers(0, 300),
    hubs=st.integers(0, 4),
    fanout=st.lists(st.integers(-1, 12), min_size=1, max_size=3),
    replace=st.booleans(),
    key=BITS,
    count=st.integers(0, 30),
    edges_on_host=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_batches_equal_the_cpu_sampler_s(
    seed: int,
    num_nodes: int,
    edges: int,
    hubs: int,
    fanout: list[int],
    replace: bool,
    key: int,
    count: int,
    edges_on_host: bool,
) -> None:
    rng = np.random.default_rng(seed)
    graph = graph_of(rng, num_nodes, edges, hubs)
    host = NeighborSampler(graph, fanout, replace)
    on_device = DeviceNeighborSampler(host, graph, CPU, edges_on_host)
    for number in range(2):  # the table is as it was after a batch
        same(host, on_device, rng.integers(0, num_nodes, count), (key + number) % 2**64)


def test_nodes_are_drawn_again_where_too_few_numbers_were_distinct(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of(np.random.default_rng(0), 50, 100, 8)
    attempts = []

    def few(fanout: int, attempt: int) -> int:
        attempts.append(attempt)
        return fanout + attempt

    monkeypatch.setattr(device_draws, "most_draws", few)
    host = NeighborSampler(graph, [7, 7])
    for key in range(10):
        same(host, DeviceNeighborSampler(host, graph, CPU), np.arange(50), key)
    assert max(attempts) > 0


@pytest.mark.parametrize("elements", [1, 100])
def test_draws_in_pieces_are_the_same(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    monkeypatch.setattr(device_draws, "_ELEMENTS", elements)
    graph = graph_of(np.random.default_rng(1), 200, 1500, 8)
    for replace in (False, True):
        host = NeighborSampler(graph, [5, 3], replace)
        same(host, DeviceNeighborSampler(host, graph, CPU), np.arange(100), 3)


def test_large_fan_outs_at_hubs() -> None:
    rng = np.random.default_rng(2)
    degree = np.array([399, 400, 401, 4000, 40_000, 100])
    graph = Graph.from_edges(rng.integers(0, 6, degree.sum()), np.repeat(np.arange(6), degree), 6)
    for fanout in (1, 2, 100):
        host = NeighborSampler(graph, [fanout, fanout])
        for key in range(20):
            same(host, DeviceNeighborSampler(host, graph, CPU), np.arange(6), key)


def test_what_does_not_fit_is_refused_as_by_the_cpu_sampler() -> None:
    graph = graph_of(np.random.default_rng(3), 100, 1000, 3)
    host = NeighborSampler(graph, [5, 5], max_bytes=30_000)
    on_device = DeviceNeighborSampler(host, graph, CPU)
    for seeds, kind in ((np.arange(100), BudgetError), (np.array([3, 100]), InputError)):
        messages = []
        for sampler in (host, on_device):
            with pytest.raises(kind) as error:
                sampler.sample(seeds, 1)
            messages.append(str(error.value))
        assert messages[0] == messages[1]
    same(host, on_device, np.arange(90, 95), 1)


@pytest.mark.parametrize("edges_on_host", [False, True])
@pytest.mark.parametrize(("slot", "source"), [(0, 9), (2, -1)])
def test_a_damaged_topology_is_an_error(monkeypatch: pytest.MonkeyPatch, slot: int, source: int, edges_on_host: bool) -> None:
    monkeypatch.setattr(host_edges, "PIECE", 1)
    graph = Graph.from_edges([0, 1, 2], [1, 1, 1], 3)
    graph.indices[slot] = source
    with pytest.raises(StoreError, match=f"slot {slot} holds no valid node id"):
        DeviceNeighborSampler(NeighborSampler(graph, [2]), graph, CPU, edges_on_host).sample(np.array([1]), 1)


def test_an_indptr_that_falls_is_an_error() -> None:
    graph = Graph(np.array([0, 2, 1, 3]), np.array([0, 1, 2], np.int32))
    with pytest.raises(StoreError, match="indptr decreases at node 1"):
        DeviceNeighborSampler(NeighborSampler(graph, [2]), graph, CPU).sample(np.array([1]), 1)


class OtherKernels:
    """In place of `triton_draws`."""

    MOST_DRAWS = 64

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def select(self, *_: Any) -> None:
        if self.fails:
            raise RuntimeError("no C compiler\nfurther lines")

    def draw_numbers(self, *_: Any) -> torch.Tensor:
        return torch.zeros(())


@pytest.mark.parametrize(("fails", "why"), [(True, "no C compiler$"), (False, "its draws are others$")])
def test_kernels_that_do_not_give_torch_s_draws_are_not_used(monkeypatch: pytest.MonkeyPatch, fails: bool, why: str) -> None:
    monkeypatch.setattr(device_draws, "find_spec", lambda _: object())
    monkeypatch.setattr(device_draws, "import_module", lambda _: OtherKernels(fails))
    device_draws.compiled_for.cache_clear()
    with pytest.warns(OocWarning, match=f"as Triton cannot: {why}"):
        assert device_draws.compiled_for(3, False, CPU) is None
    monkeypatch.setattr(device_draws, "find_spec", lambda _: None)
    assert device_draws.compiled_for(4, False, CPU) is None
    device_draws.compiled_for.cache_clear()


class FirstOnly:
    """In place of `triton_reads`."""

    @staticmethod
    def read(numbers: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        return numbers[:1].to(torch.int64).expand(len(slot))


def test_a_kernel_that_does_not_read_what_is_there_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_edges, "find_spec", lambda _: object())
    for module, why in ((FirstOnly, "something else"), (object(), "Triton cannot: .* no attribute 'read'")):
        monkeypatch.setattr(host_edges, "import_module", lambda _, module=module: module)
        found = reader_for.__wrapped__(CPU)
        assert isinstance(found, str)
        assert re.search(why, found)
    assert host_edges.agrees(host_edges._read_by_host, CPU)
    monkeypatch.setattr(host_edges, "find_spec", lambda _: None)
    assert reader_for.__wrapped__(CPU) == "Triton is not installed"


def test_a_kernel_is_tried_on_the_gpu_that_is_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended_cuda() as device:
        current: list[torch.device] = []
        there = torch.device("cuda", 0)

        @contextmanager
        def made_current(which: torch.device) -> Iterator[None]:
            current.append(which)
            yield
            current.pop()

        class Kernel:
            @staticmethod
            def read(numbers: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
                assert current == [there]
                return device.read_locked(numbers, slot)

        monkeypatch.setattr(torch.cuda, "device", made_current)
        monkeypatch.setattr(host_edges, "find_spec", lambda _: object())
        monkeypatch.setattr(host_edges, "import_module", lambda _: Kernel)
        assert reader_for.__wrapped__(there) is Kernel.read
        monkeypatch.setattr(device, "refuses", 2)
        assert "CUDA cannot page-lock 262 kB (error 2; raise `ulimit -l`)" in str(reader_for.__wrapped__(there))
        assert torch.ones(2, device=there).sum().item() == 2  # the error is not a later kernel's
    assert not device.locked
