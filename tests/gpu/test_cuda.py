"""On a CUDA device: batches are those of the CPU, leases come back, copies run beside kernels, losses agree."""

import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ooc
from ooc.config.nodes import FullConfig
from ooc.loading.neighbor_loader import NeighborLoader
from ooc.runtime.buffers import LEAST_BYTES, Buffers
from ooc.runtime.device_reads import DeviceRing, describe_gpu
from ooc.runtime.memory import cuda_bytes
from ooc.runtime.transfer import Copier, moved, on_device, pin
from ooc.sampling import NeighborSampler, device_draws, host_edges
from ooc.sampling.device_neighbor import DeviceNeighborSampler
from ooc.stores.io.engines import gds, open_engine
from ooc.stores.io.read_plan import plan_reads
from ooc.stores.io.segments import Segments
from ooc.training import checkpoint
from ooc.training.loop import train
from tests.ooc.batches import same
from tests.ooc.loading.test_feature_gather import TYPES
from tests.ooc.loading.test_row_pool import SETTINGS, stored, use_part
from tests.ooc.runs import configure
from tests.ooc.runtime.test_transfer import batch_of
from tests.ooc.sampling.test_device_neighbor import graph_of
from tests.ooc.sampling.test_device_neighbor import same as same_subgraph
from tools.bench.gpu.device import counted_waits

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")]
CPU = torch.device("cpu")


def loader(ds: Any, **settings: Any) -> NeighborLoader:
    return NeighborLoader(ds, [5, 5], "train", batch_size=16, shuffle=True, seed=3, **settings)


@pytest.mark.parametrize("in_memory", [True, False])
def test_batches_are_those_of_the_cpu(make_store: Any, in_memory: bool) -> None:
    with ooc.open(make_store(num_nodes=3000, num_edges=30_000, weight=True), in_memory=in_memory) as ds:
        taken = list(loader(ds, device="cuda"))
        assert all(batch.x.is_cuda and batch.blocks[0].indptr.is_cuda for batch in taken)
        wanted = list(loader(ds))
        assert len(taken) == len(wanted)
        assert all(same(moved(batch, CPU), other) for batch, other in zip(taken, wanted, strict=True))


@pytest.mark.parametrize("edges_on_host", [False, True])
@pytest.mark.parametrize("by_triton", [True, False])
@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize("fanout", [[10, 10], [15, 10, 5], [1, 26], [-1, 40]], ids=str)
def test_neighbors_sampled_on_the_device_are_the_cpu_s(
    monkeypatch: pytest.MonkeyPatch, fanout: list[int], replace: bool, by_triton: bool, edges_on_host: bool
) -> None:
    if not by_triton:
        monkeypatch.setattr(device_draws, "compiled_for", lambda *_: None)
    if edges_on_host and isinstance(reader := host_edges.reader_for(torch.device("cuda")), str):
        pytest.skip(reader)
    graph = graph_of(np.random.default_rng(0), 20_000, 300_000, 30)
    host = NeighborSampler(graph, fanout, replace)
    on_device = DeviceNeighborSampler(host, graph, torch.device("cuda"), edges_on_host)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Triton's kernels are used where it is installed
        for key in range(5):
            same_subgraph(host, on_device, np.arange(key, 20_000, 40), key)


def test_a_thousand_batches_lose_no_lease_and_mix_nothing_up() -> None:
    leases = Buffers(4, max_bytes=64 * LEAST_BYTES, pinned=True)
    copier = Copier(torch.device("cuda"), leases, max_bytes=8 * LEAST_BYTES)
    rows = LEAST_BYTES // 64

    def batches() -> Any:
        for step in range(1000):
            x = leases.empty((rows + step % 13, 32), np.dtype(np.float32))
            x[:] = step
            assert torch.from_numpy(x).is_pinned()
            yield {"x": torch.from_numpy(x), "step": torch.tensor([step])}

    for step, batch in enumerate(on_device(batches(), torch.device("cuda"), copier)):
        total = (batch["x"] - batch["step"]).abs().sum() + batch["x"].sum() * 0  # kernels that still run as it is let go
        assert total.item() == 0
        assert batch["step"].item() == step
    assert leases.out_bytes == copier.staging.out_bytes == 0
    assert leases.refused == copier.staging.refused == 0


def test_copies_run_on_a_stream_of_their_own_while_kernels_run() -> None:
    copier = Copier(torch.device("cuda"))
    busy, done = torch.randn(4096, 4096, device="cuda"), torch.cuda.Event()
    for _ in range(200):
        busy = busy @ busy * 1e-3
    done.record()
    resident = copier(batch_of())  # comes back when the copy is there
    assert not done.query(), "the copy waited for the kernels"
    assert same(moved(copier.deliver(resident), CPU), batch_of())
    torch.cuda.synchronize()


def test_pinned_batches_for_copies_of_the_user_s_own() -> None:
    batch = pin(batch_of())
    assert batch.x.is_pinned()
    assert batch.blocks[1].edge_index.is_pinned()
    assert same(batch, batch_of())


@pytest.mark.parametrize("part", [0.3, 1.0])
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", ["rows", "mean", "expanded", "gcn", "bfloat16"])
def test_rows_that_stay_give_the_batches_of_the_cpu_to_the_bit(
    make_store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str, part: float
) -> None:
    store, source = stored(make_store, tmp_path, kind)
    given: dict[str, Any] = {"batch_size": 40, "shuffle": True, "seed": 2, **SETTINGS[name]}
    with ooc.open(store, features={"x": source}) as ds:
        wanted = list(NeighborLoader(ds, [4, 3], **given))
        use_part(part, monkeypatch)
        pooled = NeighborLoader(ds, [4, 3], **given, device="cuda", gpu_memory="1GB")
        assert pooled.pool is not None
        assert same([batch.cpu() for batch in pooled], wanted)
        before = pooled.bytes_read
        list(pooled)
        assert part < 1 or pooled.bytes_read == before


@pytest.mark.parametrize("placement", ["planned", "device", "retained", "disk", "recomputed"])
@pytest.mark.parametrize("model", ["sage", "gcn", "gin", "gat"])
def test_exact_losses_are_those_of_the_cpu_wherever_values_are(
    make_store: Any, tmp_path: Path, model: str, placement: str
) -> None:
    store, curves = make_store(num_nodes=300, num_edges=3000), []
    for device, more in (("cpu", {}), ("cuda", {"plan": True, "placement": placement, "gpu_memory": "1GB"})):
        out = tmp_path / device
        train(FullConfig(store=store, out=out, model=model, layers=2, hidden=8, epochs=3, dropout=0.0, device=device, **more))
        curves.append([line["loss"] for line in checkpoint.read_metrics(out)[0]])
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_losses_are_those_of_the_cpu_and_the_same_again(make_store: Any, tmp_path: Path, precision: str) -> None:
    store, curves = make_store(num_nodes=300, num_edges=3000), []
    for number, device in enumerate(("cpu", "cuda", "cuda")):
        out = tmp_path / str(number)
        train(configure(store, out, device=device, precision=precision, dropout=0.0))
        curves.append([line["loss"] for line in checkpoint.read_metrics(out)[0]])
    tolerance = {"fp32": 1e-3, "bf16": 5e-2}[precision]
    np.testing.assert_allclose(curves[1], curves[0], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(curves[2], curves[1], rtol=1e-5)


@pytest.mark.skipif(gds.unavailable() is not None, reason=str(gds.unavailable()))
@pytest.mark.parametrize("gap_bytes", [0, 2**20])
def test_gds_fills_gpu_memory(tmp_path: Path, gap_bytes: int) -> None:
    data = np.random.default_rng(0).integers(0, 256, 40 * 2**20 + 123).astype(np.uint8)
    path = tmp_path / "data"
    path.write_bytes(data.tobytes())
    engine = open_engine("gds", Segments((path,), np.array([len(data)])))
    ids = np.arange(0, len(data) // 512, 16)
    plan = plan_reads(ids, 512, count=len(data) // 512, gap_bytes=gap_bytes, max_extent_bytes=2**24)
    buffer, host = torch.zeros(plan.nbytes, dtype=torch.uint8, device="cuda"), np.zeros(plan.nbytes, np.uint8)
    assert engine.read(plan, buffer) == engine.read(plan, host)
    np.testing.assert_array_equal(buffer.cpu().numpy(), host)
    engine.close()


@pytest.mark.parametrize("name", ["uring", "pread", "gds"])
def test_pieces_of_a_file_reach_gpu_memory_while_kernels_use_those_before(tmp_path: Path, name: str) -> None:
    if name == "gds" and gds.unavailable() is not None:
        pytest.skip(str(gds.unavailable()))
    data = np.random.default_rng(0).integers(0, 256, 60 * 2**20 + 123).astype(np.uint8)
    path, pages = tmp_path / "data", -(-len(data) // 4096)
    path.write_bytes(data.tobytes())
    device, found = torch.device("cuda", torch.cuda.current_device()), []
    plans = [plan_reads(np.arange(low, min(low + 1024, pages)), 4096, count=pages) for low in range(0, pages, 1024)]
    engine = open_engine(name, Segments((path,), np.array([len(data)])))
    busy = torch.randn(2048, 2048, device=device)
    with closing(engine), closing(DeviceRing(engine, device, 2**22)) as ring:
        assert ring.direct == (name == "gds")
        for _, piece in ring.pieces(plans):
            busy = busy @ busy * 1e-3
            found.append(piece + 1)  # behind the products, when the next pieces are there
    found = torch.cat(found)[: len(data)].cpu().numpy()
    np.testing.assert_array_equal(found, data + 1)


def test_what_is_active_is_described(tmp_path: Path) -> None:
    lines = describe_gpu(tmp_path).splitlines()
    assert lines[0].startswith(f"GPU: {torch.cuda.get_device_name()}, ")
    assert lines[-1].startswith("so GPU memory is filled by the engine ")


def test_bytes_of_tensors_are_the_allocator_s() -> None:
    block = torch.empty(2**24, dtype=torch.uint8, device="cuda")
    assert cuda_bytes() == (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated())
    assert cuda_bytes()[0] >= block.nbytes


def test_waits_are_counted() -> None:
    with counted_waits(torch.device("cuda")) as waits:
        total = torch.ones(8, device="cuda").sum()
        assert waits.count == 0
        total.item()
        assert waits.count == 1
