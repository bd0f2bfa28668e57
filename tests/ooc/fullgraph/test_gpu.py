"""Exact training on a GPU: what autograd keeps stays there, in RAM or on disk, and no result depends on it."""

import itertools
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from ooc.config.nodes import FullConfig
from ooc.fullgraph.activation_offload import OffloadMemory
from ooc.fullgraph.executor import Executor
from ooc.fullgraph.placement.step_profile import plan_full
from ooc.fullgraph.program import Placement, TensorPlacement
from ooc.fullgraph.step import FullGraph
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError, ConfigError
from ooc.stores.sizes import format_bytes
from ooc.training.loop import train
from ooc.training.watchers import LineWatcher
from tests.conftest import MakeStore
from tests.ooc.fullgraph.exact import LossOf, agree, cut_into, gradients, make, store_of, whole
from tests.ooc.runs import KillAt, Killed, curve
from tests.pretended_cuda import SYNC, pretended_cuda
from tests.scale import some

ROOM, MUCH = 800_000, 10**8
MORE = ("gcn", "gin", "gcnii")
SAVED = [TensorPlacement.DEVICE, TensorPlacement.RETAINED, TensorPlacement.DISK, TensorPlacement.RECOMPUTED]


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of the tensors that went to RAM."""
    found, put = list[int](), OffloadMemory.put

    def counted(self: OffloadMemory, tensor: torch.Tensor) -> torch.Tensor:
        kept = put(self, tensor)
        assert kept.device.type == "cpu"
        found.append(kept.nbytes)
        return kept

    monkeypatch.setattr(OffloadMemory, "put", counted)
    return found


@pytest.fixture
def in_ram(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of RAM that are counted for what autograd keeps, whenever a chunk's forward is done."""
    found, forward = list[int](), Executor._forward

    def counted(self: Executor, *given: Any) -> Any:
        made = forward(self, *given)
        found.append(self.pending_bytes)
        return made

    monkeypatch.setattr(Executor, "_forward", counted)
    return found


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("name", "dropout"),
    [*itertools.product(("sage", "gat"), (0.0, 0.3)), *(pytest.param(name, 0.0, marks=pytest.mark.slow) for name in MORE)],
)
def test_gradients_do_not_depend_on_where_values_are_kept(
    make_store: MakeStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    copied: list[int],
    in_ram: list[int],
    name: str,
    dropout: float,
) -> None:
    cut_into(5, monkeypatch)
    with Dataset.open(store_of(make_store)) as ds:
        model = make(name, dropout=dropout, norm="batch")
        state = {key: value.clone() for key, value in model.state_dict().items()}
        value, expected = whole(model, ds, torch.float32)
        first: dict[str, torch.Tensor] = {}
        losses = []
        for where, rest in some(itertools.product(SAVED, (TensorPlacement.RETAINED, TensorPlacement.DEVICE)), 3):
            copied.clear()
            in_ram.clear()
            model.load_state_dict(state)
            model.zero_grad()
            with pretended_cuda():
                on_gpu = model.to("cuda")
                with closing(FullGraph(on_gpu, ds, tmp_path / where, room=ROOM, device_memory=MUCH)) as full:
                    assert full.placement.resident
                    full.placement = Placement({v.name: where if v.kind == "saved" else rest for v in full.program.values})
                    torch.manual_seed(7)
                    losses.append(full.step(LossOf(ds)))
                found = {key: gradient.cpu() for key, gradient in gradients(on_gpu).items()}
                model = on_gpu.to("cpu")
            if not dropout:  # a GPU draws other numbers
                assert losses[-1] == pytest.approx(value, rel=1e-5)
                agree(found, expected, 1e-5)
            assert losses[-1] == losses[0]
            assert bool(copied) == (max(in_ram) > 0) == (where is TensorPlacement.RETAINED)
            assert sum(copied) >= max(in_ram)
            first = first or found
            assert all(torch.equal(found[key], gradient) for key, gradient in first.items())


@pytest.mark.slow
def test_a_plan_takes_the_gpu_s_memory_where_there_is_enough(make_store: MakeStore, tmp_path: Path) -> None:
    with Dataset.open(store_of(make_store)) as ds, pretended_cuda():
        model = make("sage", dropout=0.3).to("cuda")
        for memory in (0, 1000, 100_000, 10**9):
            with closing(FullGraph(model, ds, tmp_path / f"{memory}", room=ROOM, device_memory=memory)) as full:
                plan = plan_full(full, tmp_path / f"{memory}", 10**9)
                assert plan.peak[1] <= full.device_room
                saved = [value.name for value in full.program.values if value.kind == "saved"]
                placed = {plan.placement.of(name) for name in saved}
                assert (TensorPlacement.DEVICE in placed) == (memory >= 100_000)
                assert plan.placement.resident == (memory == 10**9)
                assert (plan.peak[0] == 0) == plan.placement.resident
                full.placement = plan.placement
                full.step(LossOf(ds))


@pytest.mark.cases(1)
@pytest.mark.parametrize("model", ["sage", "gat"])
def test_a_killed_run_goes_on_with_another_gpu_memory(make_store: MakeStore, tmp_path: Path, model: str) -> None:
    store = make_store(num_nodes=300, num_edges=2000)

    def run(out: Path, memory: str, **options: Any) -> bytes:
        given: dict[str, Any] = {"model": model, "layers": 2, "hidden": 8, "epochs": 4, "checkpoint_every": 1, "threads": 1}
        with pretended_cuda():
            train(FullConfig(store=store, out=out, device="cuda", gpu_memory=memory, **given), **options)
        return curve(out)

    wanted = run(tmp_path / "whole", "6GB")
    with pytest.raises(Killed):
        run(tmp_path / "killed", "4GB", watcher=KillAt(2))
    assert run(tmp_path / "killed", "100MB", resume=True) == wanted


def test_gpu_memory_that_is_not_there_is_refused(make_store: MakeStore, tmp_path: Path) -> None:
    store = make_store(num_nodes=300, num_edges=2000)
    given: dict[str, Any] = {"store": store, "out": tmp_path / "run", "model": "sage", "layers": 2}
    with pytest.raises(ConfigError, match="`gpu_memory` needs a CUDA device"):
        train(FullConfig(**given, device="cpu", gpu_memory="8GB"))
    with pretended_cuda():
        with pytest.raises(BudgetError, match=r"1 kB of GPU memory .* give `gpu_memory` at least .*, or a smaller `hidden`"):
            train(FullConfig(**given, device="cuda", gpu_memory="1kB"))
        with pytest.raises(ConfigError, match=r"`gpu_memory` is 80 GB, and 8 GB of it are free"):
            train(FullConfig(**given, device="cuda", gpu_memory="80GB"))
    assert not (tmp_path / "run").exists()


def test_a_hub_that_the_gpu_has_no_memory_for_is_refused_with_what_would_do(make_store: MakeStore, tmp_path: Path) -> None:
    with Dataset.open(store_of(make_store)) as ds, pretended_cuda():
        model = make("gat").to("cuda")
        with pytest.raises(BudgetError, match=r"in-edges of node .* of GPU memory in a layer .*: give .* more"):
            FullGraph(model, ds, tmp_path / "few", room=ROOM, device_memory=1000)


class Noted(LineWatcher):
    """The notes of a run."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_features_and_edges_on_the_gpu_are_booked(make_store: MakeStore, tmp_path: Path) -> None:
    store, watcher = make_store(num_nodes=300, num_edges=2000), Noted()
    settings: dict[str, Any] = {"model": "sage", "layers": 2, "hidden": 8, "epochs": 2, "memory": "3GB", "gpu_memory": "1GB"}
    with pretended_cuda():
        train(FullConfig(store=store, out=tmp_path / "run", device="cuda", **settings), watcher=watcher)
    with Dataset.open(store) as ds:
        features, edges = 300 * ds.stored("x").row_bytes, 2 * (4 * len(ds.graph.indices) + 8 * 301)
    (division,) = [note for note in watcher.notes if note.startswith("memory")]
    sizes = {line[:-8].strip(): line[-8:].strip() for line in division.splitlines()}
    assert sizes["GPU feature rows"] == format_bytes(features)
    assert sizes["GPU edges"] == format_bytes(edges)


def test_what_is_copied_to_the_gpu_is_reported_and_copied_once(make_store: MakeStore, tmp_path: Path) -> None:
    told: list[str] = []
    with Dataset.open(store_of(make_store)) as ds, pretended_cuda():
        model = make("gcn").to("cuda")
        with closing(FullGraph(model, ds, tmp_path / "full", room=ROOM, device_memory=MUCH)) as full:

            def interrupting(what: str, done: int, total: int) -> None:
                told.append(what)
                if what == "edges":
                    raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                full.load(interrupting)
            full.load(lambda what, done, total: told.append(what))
            assert set(told) == {"features", "edges"}
            told.clear()
            full.step(LossOf(ds), lambda what, done, total: told.append(what))
            assert not {"features", "edges"} & set(told)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["sage", "gcn", "gat"])
def test_a_step_waits_once_or_for_each_chunk_and_operation(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied: list[int], name: str
) -> None:
    chunks = 5
    cut_into(chunks, monkeypatch)
    with Dataset.open(store_of(make_store)) as ds, pretended_cuda() as device:
        model = make(name, norm="batch").to("cuda")
        for where in (TensorPlacement.DEVICE, TensorPlacement.RECOMPUTED, TensorPlacement.RETAINED):
            with closing(FullGraph(model, ds, tmp_path / where, room=ROOM, device_memory=MUCH)) as full:
                resident = where is TensorPlacement.DEVICE
                if not resident:
                    saved = {v.name: where for v in full.program.values if v.kind == "saved"}
                    rest = {v.name: TensorPlacement.RETAINED for v in full.program.values}
                    full.placement = Placement(rest | saved)
                full.load()
                ops = len(full.program.ops) + (where is TensorPlacement.RECOMPUTED) * len(full.program.forward)
                for _ in range(2):
                    copied.clear()
                    before = device.counts[SYNC]
                    full.step(LossOf(ds))
                    most = 1 if resident else chunks * ops + len(copied) + 1
                    assert device.counts[SYNC] - before <= most, device.counts.told(SYNC)
