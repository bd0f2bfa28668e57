"""Batches sampled on the GPU are the CPU's, and where they are sampled is chosen and said."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ooc
from ooc.graph.aggregation import PreAggregation
from ooc.graph.device_subgraph import DeviceSubgraph
from ooc.loading import choose_pool, choose_read_strategy, sample_device
from ooc.loading.collate import SampledSums
from ooc.loading.sample_device import PoolRoom
from ooc.loading.sample_stage import SamplePlace
from ooc.models.builders import build_model
from ooc.sampling import device_topology, host_edges
from ooc.stores.build import write_store
from ooc.stores.errors import ConfigError, OocWarning
from ooc.stores.graph import Graph
from ooc.stores.sizes import format_bytes
from tests.conftest import random_edges
from tests.ooc.loading.test_row_pool import use_part
from tests.pretended_cuda import PAGEABLE, REGISTERED, SYNC, PretendedDevice, pretended_cuda

NODES = 300


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "weights and loops"])
def store(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    src, dst = random_edges(NODES, 4000)
    columns = {}
    if request.param:
        src[:50] = dst[:50]
        columns["weight"] = rng.random(4000, np.float32)
    else:
        dst[src == dst] = (dst[src == dst] + 1) % NODES
    x, y = rng.standard_normal((NODES, 12), dtype=np.float32), rng.integers(0, 3, NODES)
    splits = {"train": np.arange(0, NODES, 2), "val": np.arange(1, NODES, 4), "test": np.arange(3, NODES, 4)}
    graph = Graph.from_edges(src, dst, NODES, **columns)
    path = tmp_path_factory.mktemp("store") / "s.ooc"
    return write_store(path, graph, x=x, y=y, task="multiclass", num_classes=3, splits=splits)


def fields(batch: Any) -> dict[str, Any]:
    """Everything in a batch, on the host."""
    found = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in batch.to_dict().items()}
    blocks = [[each.cpu() if isinstance(each, torch.Tensor) else each for each in block] for block in found.pop("blocks")]
    x = found.pop("x", None)
    return {**found, "x": [each.cpu() for each in x] if isinstance(x, tuple) else x, "blocks": blocks}


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "options",
    [{}, {"replace": True, "edge_ids": False}, {"split_seeds": True, "shuffle": False}, {"aggregates": True}],
    ids=["all fields", "replace", "in halves", "aggregates"],
)
def test_batches_are_the_cpu_s(store: Path, options: dict[str, Any]) -> None:
    given = {"num_neighbors": [4, 3], "input_nodes": "train", "batch_size": 32, "shuffle": True, "seed": 3, **options}
    given["num_neighbors"] = given["num_neighbors"] if not options.get("split_seeds") else [-1, 3]
    if given.pop("aggregates", False):
        given["pre_aggregation"] = ooc.models.pre_aggregation_of(build_model("sage", 12, 8, 3, 2))
    with ooc.open(store, in_memory=True) as ds, pretended_cuda():
        batches: dict[str, list[Any]] = {}
        for where in ("cpu", "cuda"):
            loader = ooc.NeighborLoader(ds, device="cuda", sample_device=where, **given)
            assert (loader.sample_place.device is not None) == (where == "cuda")
            batches[where] = [fields(batch) for _ in range(2) for batch in loader]
            batches[where].append(fields(loader(torch.tensor([0, 3, 3]))) if "pre_aggregation" not in given else {})
        torch.cuda.synchronize()
    # calls draw by torch's generator: their seeds are the same, their neighbors may differ
    assert alike(batches["cpu"][:-1], batches["cuda"][:-1])


@pytest.mark.cases(1)
def test_tensors_come_from_the_sampler_and_wait_for_nothing(store: Path) -> None:
    with ooc.open(store, in_memory=True) as ds, pretended_cuda() as device:
        loader = ooc.NeighborLoader(ds, [4, 3], "train", 32, device="cuda", seed=0, edge_ids=False)
        assert loader.sample_place.device is not None
        drawn = loader.strategy.stages.sample.sample(ooc.runtime.keyed_random.Cursor(0, 0)).subgraph
        assert isinstance(drawn, DeviceSubgraph)
        assert drawn.edge_index.is_cuda
        assert drawn.host.keys() == ({"edge_slot"} if "weight" in ds.graph.columns else set())  # which mapped columns need
        before = device.counts[SYNC], device.counts[PAGEABLE]
        for batch in loader:
            assert all(each.is_cuda for each in (batch.x, batch.y, batch.edge_index, batch.n_id, batch.blocks[0].degree))
        assert (device.counts[SYNC], device.counts[PAGEABLE]) == before


REFUSED = {
    "weight": ({"weight_attr": "weight"}, "drawn by weight"),
    "labor": ({"sampler": "labor"}, "LABOR draws"),
    "trees": ({"disjoint": True}, "tree of its own"),
    "induced": ({"subgraph_type": "induced"}, "edges are induced"),
    "transform": ({"transform": lambda batch: batch}, "transform takes batches"),
    "split": ({"edge_split": ooc.EdgeSplit(val=0.1, test=0.1)}, "edges of other splits"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_the_gpu_cannot_sample_stays_on_the_cpu(store: Path, kind: str) -> None:
    options, why = REFUSED[kind]
    with ooc.open(store, in_memory=True) as ds, pretended_cuda():
        if kind == "weight" and "weight" not in ds.graph.columns:
            pytest.skip("there are no weights")
        place = ooc.NeighborLoader(ds, [3, 3], "train", 32, device="cuda", **options).sample_place
        assert place.device is None
        assert why in str(place)
        with pytest.raises(ConfigError, match=why):
            ooc.NeighborLoader(ds, [3, 3], "train", 32, device="cuda", sample_device="cuda", **options)


def test_places_say_why(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = ooc.models.pre_aggregation_of(build_model("sage", 12, 8, 3, 2))

    def place(**options: Any) -> str:
        return str(ooc.NeighborLoader(ds, [3, 3], "train", 32, **options).sample_place)

    with ooc.open(store, in_memory=True) as ds, pretended_cuda():
        assert place() == "neighbors are sampled by the CPU: batches go there"
        assert place(device="cuda", sample_device="cpu").endswith("it was asked for")
        assert "of the GPU, which has 0 B beside feature rows" in place(device="cuda", pre_aggregation=step, gpu_memory="190kB")
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (6000, 10**10))
        assert "of the GPU, which has 6 kB free" in place(device="cuda")
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (10**10, 10**10))
        assert place(device="cuda").startswith("neighbors are sampled on cuda: the topology takes")
        with pytest.raises(ConfigError, match="`sample_device='cuda'` is for batches on a GPU: give `device='cuda'` too"):
            place(sample_device="cuda")
        with pytest.raises(ConfigError, match="sample_device 'gpu' is unknown"):
            place(sample_device="gpu")
    with ooc.open(store) as ds, pretended_cuda():
        use_part(0.4, monkeypatch)
        assert "features are read from disk" in place(device="cuda", gpu_memory="1GB")
        with pytest.raises(ConfigError, match="`sample_device='cuda'` cannot be: features are read from disk"):
            place(device="cuda", sample_device="cuda", gpu_memory="1GB")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with ooc.open(store) as ds, pytest.raises(ConfigError, match="`sample_device='cuda'`: torch sees no CUDA device here"):
        place(sample_device="cuda")


KINDS: dict[str, PreAggregation | None] = {
    "rows": None,
    **{kind: PreAggregation(kind, 8) for kind in ("mean", "sum", "expanded", "gcn")},  # type: ignore[arg-type]
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_sampled_beside_a_pool_are_the_cpu_s(store: Path, kind: str, in_memory: bool) -> None:
    given: dict[str, Any] = {"input_nodes": "train", "batch_size": 32, "shuffle": True, "seed": 3, "edge_ids": False}
    given["pre_aggregation"] = KINDS[kind]
    with ooc.open(store, in_memory=in_memory) as ds, pretended_cuda() as device:
        heavy = "weight" in ds.graph.columns and kind == "gcn"
        wanted = [fields(batch) for batch in ooc.NeighborLoader(ds, [4, 3], device="cpu", **given)]
        loader = ooc.NeighborLoader(ds, [4, 3], device="cuda", gpu_memory="1GB", **given)
        assert loader.pool is not None
        assert loader.pool.slots.whole
        assert (loader.sample_place.device is None) == heavy, str(loader.sample_place)
        if heavy:
            assert "weights or self-loops" in str(loader.sample_place)
            loader = ooc.NeighborLoader(ds, [4, 3], device="cuda", gpu_memory="1GB", sample_device="cuda", **given)
        assert loader.budget.device is not None
        assert loader.budget.device.topology > 0 or heavy
        assert alike([fields(batch) for batch in loader], wanted)
        read, locked = loader.bytes_read, device.counts[REGISTERED]
        before = device.counts[SYNC], device.counts[PAGEABLE]
        loader.set_epoch(0)  # whose batches are as large
        again = list(loader)
        assert (device.counts[SYNC], device.counts[PAGEABLE]) == before
        assert (loader.bytes_read, device.counts[REGISTERED]) == (read, locked)
        assert len(again) == len(wanted)


@pytest.mark.parametrize("kind", ["mean", "gcn"])
def test_what_is_summed_up_on_the_device_crosses_no_bus(store: Path, kind: str) -> None:
    with ooc.open(store) as ds, pretended_cuda():
        if "weight" in ds.graph.columns:
            pytest.skip("weights are on the host")
        loader = ooc.NeighborLoader(
            ds, [4, 3], "train", 32, device="cuda", seed=0, edge_ids=False, pre_aggregation=KINDS[kind], gpu_memory="1GB"
        )
        drawn = loader.strategy.stages.sample.sample(ooc.runtime.keyed_random.Cursor(0, 0))
        loaded = loader.strategy.stages.load.load(drawn)
        assert isinstance(loaded.x.sums, SampledSums)
        assert isinstance(drawn.subgraph, DeviceSubgraph)
        assert not drawn.subgraph.host  # neither nodes nor edges were asked for on the host
        assert loaded.drawn.subgraph.host.keys() <= {"n_id"}  # of the destinations, for their labels
        assert loaded.x.place.is_cuda
        assert not loaded.x.values.numel()


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_not_in_the_pool_come_from_the_host(store: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    use_part(0.4, monkeypatch)
    given: dict[str, Any] = {"input_nodes": "train", "batch_size": 32, "seed": 3, "pre_aggregation": KINDS[kind]}
    with ooc.open(store, in_memory=True) as ds, pretended_cuda():
        wanted = [fields(batch) for batch in ooc.NeighborLoader(ds, [4, 3], device="cpu", **given)]
        loader = ooc.NeighborLoader(ds, [4, 3], device="cuda", gpu_memory="1GB", sample_device="cuda", **given)
        assert loader.pool is not None
        assert not loader.pool.slots.whole
        assert loader.sample_place.device is not None
        assert alike([fields(batch) for batch in loader], wanted)
        if kind != "rows":
            place = ooc.NeighborLoader(ds, [4, 3], device="cuda", gpu_memory="1GB", **given).sample_place
            assert "not all feature rows are on the GPU" in str(place)


FREE = 30_000
"""bytes of the GPU: the topology takes more than half of them, and without its edges less"""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedDevice]:
    """A pretended device that is too small for the edges."""
    with pretended_cuda() as device:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (FREE, 10**10))
        yield device


@pytest.mark.cases(1)
@pytest.mark.parametrize("in_memory", [False, True])
def test_a_gpu_that_is_too_small_for_the_edges_reads_them_from_the_host(
    store: Path, small: PretendedDevice, in_memory: bool
) -> None:
    given: dict[str, Any] = {"input_nodes": "train", "batch_size": 32, "shuffle": True, "seed": 3, "edge_ids": False}
    with ooc.open(store, in_memory=in_memory) as ds:
        given["features"] = in_memory  # without a pool, rows on disk are read on the host
        wanted = [fields(batch) for batch in ooc.NeighborLoader(ds, [4, 3], device="cpu", **given)]
        loader = ooc.NeighborLoader(ds, [4, 3], device="cuda", **given)
        edges = ds.graph.indices.nbytes
        assert str(loader.sample_place).endswith(f"of its memory, and edges {format_bytes(edges)} of the host's")
        before = small.counts.nbytes[REGISTERED]
        assert alike([fields(batch) for batch in loader], wanted)
        assert small.counts.nbytes[REGISTERED] - before >= edges
        there = dict(small.locked)
        counts = [small.counts[kind] for kind in (SYNC, PAGEABLE, REGISTERED)]
        loader.set_epoch(0)
        assert len(list(loader)) == len(wanted)
        assert [small.counts[kind] for kind in (SYNC, PAGEABLE, REGISTERED)] == counts
        graph = ds.graph
        assert (graph.indices.ctypes.data in there) == in_memory  # locked where it is, or a copy
        assert device_topology.is_there(graph, torch.device("cuda"), edges_on_host=True)
        del loader
        gc.collect()
        assert edges not in small.locked.values()


@pytest.mark.parametrize("read_only", [False, True], ids=["maps", "read-only in RAM"])
def test_edges_in_the_host_s_memory_leave_less_of_it_to_maps(
    store: Path, small: PretendedDevice, monkeypatch: pytest.MonkeyPatch, read_only: bool
) -> None:
    mapped, made = [], choose_read_strategy.Topology

    def noted(graph: Graph, weight: str | None, max_mapped: int, *given: Any) -> Any:
        mapped.append(max_mapped)
        return made(graph, weight, max_mapped, *given)

    monkeypatch.setattr(choose_read_strategy, "Topology", noted)
    with ooc.open(store, memory="2GB", in_memory=read_only) as ds:
        ds.graph.indices.flags.writeable &= not read_only  # then they are copied
        for where in ("cpu", "auto"):
            loader = ooc.NeighborLoader(ds, [4, 3], "train", 32, device="cuda", features=False, sample_device=where)
        assert loader.sample_place.edges_on_host
        assert mapped[0] - mapped[-1] == ds.graph.indices.nbytes
        assert loader.budget.topology - ds.graph.indptr.nbytes >= ds.graph.indices.nbytes  # which the plan has counted


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", KINDS)
def test_edges_in_the_host_s_memory_beside_a_pool(store: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(choose_pool, "PoolRoom", lambda whole, left: PoolRoom(whole, min(left, FREE // 2)))
    given: dict[str, Any] = {"input_nodes": "train", "batch_size": 32, "seed": 3, "pre_aggregation": KINDS[kind]}
    with ooc.open(store) as ds, pretended_cuda():
        if "weight" in ds.graph.columns and kind == "gcn":
            pytest.skip("weights are on the host")
        wanted = [fields(batch) for batch in ooc.NeighborLoader(ds, [4, 3], device="cpu", **given)]
        loader = ooc.NeighborLoader(ds, [4, 3], device="cuda", gpu_memory="1GB", **given)
        assert loader.sample_place.edges_on_host
        assert loader.budget.device is not None
        assert loader.budget.device.topology == ds.graph.indptr.nbytes + 4 * NODES
        assert alike([fields(batch) for batch in loader], wanted)


@pytest.mark.cases(1)
def test_edges_that_no_kernel_reads_are_read_by_the_host_where_it_is_asked_for(
    store: Path, small: PretendedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {"input_nodes": "train", "batch_size": 32, "seed": 3}
    with ooc.open(store, in_memory=True) as ds:
        wanted = [fields(batch) for batch in ooc.NeighborLoader(ds, [4, 3], device="cpu", **given)]
        monkeypatch.setattr(small, "refuses", 2)
        with pytest.warns(OocWarning, match=r"the host reads edges for the GPU, as CUDA cannot page-lock .*error 2"):
            locked = ooc.NeighborLoader(ds, [4, 3], device="cuda", **given)
        assert alike([fields(batch) for batch in locked], wanted)
        del locked
        gc.collect()
        monkeypatch.setattr(host_edges, "reader_for", lambda _: "Triton is not installed")
        place = ooc.NeighborLoader(ds, [4, 3], device="cuda", **given).sample_place
        assert place.device is None
        assert str(place).endswith("30 kB free, and it does not read edges in the host's: Triton is not installed")
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (FREE // 2, 10**10))
        with pytest.warns(OocWarning, match="the host reads edges for the GPU, as Triton is not installed"):
            asked = ooc.NeighborLoader(ds, [4, 3], device="cuda", sample_device="cuda", **given)
        assert asked.sample_place.edges_on_host
        assert alike([fields(batch) for batch in asked], wanted)


def test_edges_that_fit_neither_memory_are_sampled_by_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, edges = Graph.from_edges([0, 1, 2], [1, 2, 0], 3), 12
    with pretended_cuda() as device:
        for free, edges_room, place in ((112, 0, "GPU"), (88, edges, "host"), (88, edges - 1, ""), (86, edges, "")):
            monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_, free=free: (free, 10**10))
            found = sample_device._with_edges(graph, torch.device("cuda"), "auto", None, edges_room)
            assert isinstance(found, SamplePlace) == bool(place), found
            assert not isinstance(found, SamplePlace) or found.edges_on_host == (place == "host")
        assert not device.locked  # before the first batch


@pytest.mark.cases(1)
def test_loaders_share_the_topology(store: Path) -> None:
    with ooc.open(store, in_memory=True) as ds, pretended_cuda():
        there = torch.device("cuda")
        loaders = [ooc.NeighborLoader(ds, [3], split, 64, device="cuda") for split in ("train", "val")]
        for loader in loaders:
            list(loader)
        assert len(device_topology._made[ds.graph]) == 1
        del loader, loaders[0]
        assert device_topology.is_there(ds.graph, there)
        loaders.clear()
        gc.collect()
        assert not device_topology.is_there(ds.graph, there)  # its memory is free again
