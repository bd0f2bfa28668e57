"""On a pretended CUDA device (`tests.pretended_cuda`): every kind of run has the CPU's losses, and its steps do not wait."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data

import ooc
from ooc.config.modes import class_of
from ooc.fullgraph.activation_offload import OffloadFile, OffloadMemory
from ooc.fullgraph.step import FullGraph
from ooc.loading.choose_pool import _Chooser
from ooc.runtime.memory_plan import DevicePlan
from ooc.stores.build import write_store
from ooc.stores.errors import ConfigError
from ooc.stores.graph import Graph
from ooc.training.checkpoint import read_metrics
from ooc.training.loop import train
from ooc.training.run import Run
from ooc.training.watchers import LineWatcher
from tests.conftest import random_edges
from tests.ooc.hetero_batches import hetero_data
from tests.ooc.temporal_stores import Edges
from tests.ooc.training.test_graph_runs import labelled
from tests.ooc.training.test_hetero_runs import graph_of, write
from tests.pretended_cuda import OPERATION, PAGEABLE, REGISTERED, SYNC, PretendedDevice, pretended_cuda

NODES = 300
OFF: dict[str, Any] = {"dropout": 0.0, "plan": False, "checkpoint_every": 10**6}
"""set where the mode has it; a checkpoint waits for losses, and by default one is due every few seconds"""
HOPS: dict[str, Any] = {"fanout": [3, 3], "batch_size": 64}
PARTS: dict[str, Any] = {"parts": 6, "parts_per_batch": 2}
WINDOWS: dict[str, Any] = {"mode": "snapshots", "store": "events", "window": "40", "by": "count", "identity": 4}
KINDS: dict[str, dict[str, Any]] = {
    "sage": HOPS,
    "sage, rows in RAM": {**HOPS, "in_memory": True},
    "sage, planned": {**HOPS, "plan": True},
    "sage, labor": {**HOPS, "sampler": "labor"},
    "sage, bf16": {**HOPS, "precision": "bf16"},
    "sage, checkpoints": {
        "batch_size": 64,
        "fanout": [3, 3, 3],
        "norm": "batch",
        "residual": True,
        "activation_checkpointing": True,
    },
    "gcn, weights": {**HOPS, "model": "gcn", "weight_attr": "weight"},
    "gat": {**HOPS, "model": "gat", "heads": 2},
    "gat, sampled on the GPU": {**HOPS, "model": "gat", "heads": 2, "in_memory": True},
    "gin": {**HOPS, "model": "gin"},
    "gcnii": {"model": "gcnii", "layers": 4, "batch_size": 64, "fanout": [3] * 4},
    "appnp": {"model": "appnp", "layers": 3, "batch_size": 64, "fanout": [3] * 3},
    "sgc": {**HOPS, "model": "sgc"},
    "balanced": {**HOPS, "class_weights": "balanced", "label_smoothing": 0.1},
    "multilabel": {**HOPS, "store": "multilabel"},
    "binary": {**HOPS, "store": "binary", "class_weights": "balanced"},
    "layer by layer": {**HOPS, "evaluate": "layerwise"},
    "sgd, clipped": {**HOPS, "optimizer": "sgd", "grad_clip": 1.0, "accumulate": 2},
    "cluster": {"mode": "cluster", "layers": 2, **PARTS},
    "saint": {"mode": "saint", "layers": 2, "roots": 30, "saint_coverage": 5.0},
    "history": {"mode": "history", "layers": 3, **PARTS},
    "history, refreshed": {"mode": "history", "layers": 3, "refresh": 1, **PARTS},
    "full": {"mode": "full", "layers": 2, "epochs": 4},
    "full, norms": {"mode": "full", "layers": 3, "norm": "batch", "residual": True, "plan": True},
    "full, gat": {"mode": "full", "layers": 2, "model": "gat", "heads": 2},
    "full, gcn": {"mode": "full", "layers": 2, "model": "gcn", "epochs": 4},
    "full, in RAM": {"mode": "full", "layers": 2, "norm": "batch", "placement": "retained"},
    "full, on disk": {"mode": "full", "layers": 2, "placement": "disk"},
    "full, recomputed": {"mode": "full", "layers": 2, "placement": "recomputed"},
    "types": {**HOPS, "store": "types", "model": "rsage", "batch_size": 8},
    "types, rgcn": {**HOPS, "store": "types", "model": "rgcn", "batch_size": 8},
    "types, hgt": {**HOPS, "store": "types", "model": "hgt", "heads": 2, "batch_size": 8},
    "gine": {**HOPS, "store": "edge features", "model": "gine"},
    "links": {**HOPS, "task": "link", "batch_size": 256},
    "links, mlp": {**HOPS, "task": "link", "decoder": "mlp", "loss": "bpr", "batch_size": 256},
    "edges": {**HOPS, "task": "edge", "store": "edges", "batch_size": 256},
    "graphs": {"task": "graph", "store": "graphs", "model": "gin", "pooling": "sum", "batch_size": 16},
    "events": {"mode": "events", "store": "events", "num_neighbors": [3], "memory_dim": 6, "time_dim": 4, "batch_size": 20},
    "tgat": {"mode": "events", "store": "events", "model": "tgat", "num_neighbors": [3], "time_dim": 4, "batch_size": 20},
    "graphmixer": {"mode": "events", "store": "events", "model": "graphmixer", "time_dim": 4, "batch_size": 20},
    "windows": WINDOWS,
    "windows, roland": {**WINDOWS, "model": "roland"},
    "windows, evolvegcn": {**WINDOWS, "model": "evolvegcn"},
}
GROWING = {"events": 1, "tgat": 1, "graphmixer": 5}
"""memory that is page-locked after the first step of a run: later events have a longer past, and their batches are larger"""
IN_SHORT = {"sage", "history", "events", "windows", "full", "graphs"}
"""kinds that short runs of the tests have too"""


def some(kinds: Iterable[str], in_short: Collection[str] = IN_SHORT) -> list[Any]:
    return [pytest.param(kind, marks=() if kind in in_short else pytest.mark.slow) for kind in kinds]


def node_store(path: Path, task: str = "multiclass") -> Path:
    rng, classes = np.random.default_rng(0), 2 if task == "binary" else 3
    src, dst = random_edges(NODES, 5000)
    y = rng.integers(0, classes, NODES) if task != "multilabel" else (rng.random((NODES, classes)) < 0.3).astype(np.float32)
    order = rng.permutation(NODES)
    splits = {"train": order[:180], "val": order[180:240], "test": order[240:]}
    x, weight = rng.standard_normal((NODES, 24), dtype=np.float32), rng.random(5000, np.float32) + 0.1
    graph = Graph.from_edges(src, dst, NODES, weight=weight)
    return write_store(path, graph, x=x, y=y, task=task, num_classes=classes, splits=splits)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("stores")
    made = {task: node_store(folder / f"{task}.ooc", task) for task in ("multiclass", "multilabel", "binary")}
    made["types"] = write(folder / "types.ooc", graph_of(hetero_data()))
    made["edges"] = folder / "edges.ooc"
    src, dst = random_edges(200, 3000)
    x = torch.randn(200, 6, generator=torch.Generator().manual_seed(0))
    part = torch.arange(3000) % 5
    data = Data(x=x, edge_index=torch.from_numpy(np.stack([src, dst])), edge_y=(x[src, 0] > x[dst, 1]).long())
    data.edge_train_mask, data.edge_val_mask, data.edge_test_mask = part < 3, part == 3, part == 4
    ooc.from_data(data, made["edges"]).close()
    made["edge features"] = folder / "edge-features.ooc"
    data = Data(x=x, edge_index=data.edge_index, edge_attr=torch.randn(3000, 5), y=(x[:, 0] > 0).long())
    ooc.from_data(data, made["edge features"], random_split=(0.6, 0.2, 0.2)).close()
    made["graphs"] = folder / "graphs.ooc"
    ooc.from_data(labelled(80), made["graphs"], random_split=(0.6, 0.2, 0.2)).close()
    made["events"] = Edges(span=3000).store(folder, undirected=True)
    return made


class Noted(LineWatcher):
    """The notes of a run."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


class ExactStep(NamedTuple):
    """What was counted in a step on the whole graph."""

    ops: int
    resident: bool
    moved: int
    """tensors that autograd keeps and that were moved to the host's memory or to disk"""
    found: Counter[str]


class Counted:
    """What was counted up to the end of each step, its loss being read or not, and in each exact step."""

    def __init__(self, device: PretendedDevice) -> None:
        self._counts, self.steps = device.counts, []  # type: ignore[var-annotated]
        self.exact: list[ExactStep] = []
        self.epochs: list[Counter[str]] = []
        """up to the end of each epoch, scores included"""

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the steps of runs in the block."""
        end_step, end_epoch, exact_step, moved = Run.end_step, Run.end_epoch, FullGraph.step, [0]

        def counted(run: Run, loss: Tensor) -> None:
            epoch = run.state.epoch
            end_step(run, loss)
            self.steps.append((epoch, self._counts.number.copy()))

        def counted_epoch(run: Run, *given: Any) -> None:
            end_epoch(run, *given)
            self.epochs.append(self._counts.number.copy())

        def counted_exactly(full: FullGraph, *given: Any) -> float:
            before, moved_before = self._counts.number.copy(), moved[0]
            loss = exact_step(full, *given)
            ops, resident = len(full.program.ops), full.placement.resident
            self.exact.append(ExactStep(ops, resident, moved[0] - moved_before, self._counts.number - before))
            return loss

        def moving(put: Any) -> Any:
            def counted(offload: Any, tensor: Tensor) -> Any:
                moved[0] += 1
                return put(offload, tensor)

            return counted

        with pytest.MonkeyPatch.context() as patch:
            for where in (OffloadMemory, OffloadFile):
                patch.setattr(where, "put", moving(where.put))
            patch.setattr(Run, "end_step", counted)
            patch.setattr(Run, "end_epoch", counted_epoch)
            patch.setattr(FullGraph, "step", counted_exactly)
            yield

    def of_epoch(self, number: int) -> list[Counter[str]]:
        """Up to the end of each step of an epoch."""
        return [each for epoch, each in self.steps if epoch == number]

    def most(self, kind: str) -> int:
        """Of one step."""
        inside = [pair for pair in pairwise(self.steps) if pair[0][0] == pair[1][0]]
        return max((after[kind] - before[kind] for (_, before), (_, after) in inside), default=0)


@pytest.fixture
def trained(stores: dict[str, Path], tmp_path: Path) -> Callable[[str], tuple[Path, Path]]:
    """(kind) -> (run, store): a run of one epoch on the CPU."""

    def make(kind: str) -> tuple[Path, Path]:
        given = {"store": "multiclass", "hidden": 8, "threads": 1, **KINDS[kind], "epochs": 1}
        given["store"] = stores[given["store"]]
        train(class_of(given)(**given, out=tmp_path / "run", device="cpu"))
        return tmp_path / "run", given["store"]

    return make


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", some(["sage", "gcn, weights", "gat", "types", "links", "edges", "graphs"]))
@pytest.mark.parametrize("verb", ["infer", "embed"])
def test_outputs_of_all_nodes_are_computed_on_the_device(trained: Any, kind: str, verb: str) -> None:
    run, store = trained(kind)
    if verb == "embed" and kind in ("edges", "graphs"):
        pytest.skip("there are no embeddings of these")
    compute = getattr(ooc, verb)
    wanted = np.asarray(compute(run, store, device="cpu"))
    with pretended_cuda() as device:
        found = np.asarray(compute(run, store, device="cuda"))
        operations = device.counts[OPERATION]
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    assert operations > 4


@pytest.mark.slow
def test_destinations_are_ranked_by_rows_computed_on_the_device(trained: Any, tmp_path: Path) -> None:
    run, store = trained("links")
    with pretended_cuda() as device:
        for name in ("cpu", "cuda"):
            before = device.counts[OPERATION]
            ooc.rank(run, store, tmp_path / f"{name}.csv", k=3, device=name)
            assert (device.counts[OPERATION] > before) == (name == "cuda")
    found, wanted = (np.loadtxt(tmp_path / f"{name}.csv", delimiter=",", skiprows=1) for name in ("cuda", "cpu"))
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model", some(["sage", "gcn", "gat"], {"gat"}))
def test_runs_sampled_on_the_device_have_the_same_bits(stores: dict[str, Path], tmp_path: Path, model: str) -> None:
    given = {**HOPS, "model": model, "store": stores["multiclass"], "in_memory": True, "hidden": 8, "epochs": 2, "threads": 1}
    given["checkpoint_every"] = OFF["checkpoint_every"]
    losses, notes = {}, {}
    with pretended_cuda() as device:
        for name in ("cpu", "cuda"):
            counted, watcher, out = Counted(device), Noted(), tmp_path / name
            with counted.counting():
                train(class_of(given)(**given, out=out, device="cuda", sample_device=name), watcher=watcher)
            losses[name], notes[name] = [line["loss"] for line in read_metrics(out)[0]], watcher.notes
            assert counted.most(SYNC) <= 1, device.counts.told(SYNC)
            assert counted.most(PAGEABLE) == 0, device.counts.told(PAGEABLE)
    assert losses["cuda"] == losses["cpu"]
    assert any(note.startswith("neighbors are sampled on cuda") for note in notes["cuda"])
    assert "neighbors are sampled by the CPU: it was asked for" in notes["cpu"]
    with pytest.raises(ConfigError, match="`sample_device='cuda'`"):
        train(class_of(given)(**given, out=tmp_path / "no", device="cpu", sample_device="cuda"))


@pytest.mark.slow
def test_runs_on_a_gpu_too_small_for_the_edges_have_the_same_bits(
    stores: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {**HOPS, "model": "gat", "store": stores["multiclass"], "in_memory": True, "hidden": 8, "epochs": 2, "threads": 1}
    given["checkpoint_every"] = OFF["checkpoint_every"]
    losses = []
    with pretended_cuda() as device:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (25_000, 10**10))
        for name in ("cpu", "auto"):
            counted, watcher, out = Counted(device), Noted(), tmp_path / name
            with counted.counting():
                train(class_of(given)(**given, out=out, device="cuda", sample_device=name), watcher=watcher)
            losses.append([line["loss"] for line in read_metrics(out)[0]])
    assert any(note.endswith("of its memory, and edges 20 kB of the host's") for note in watcher.notes), watcher.notes
    assert losses[0] == losses[1]
    assert counted.most(SYNC) <= 1, device.counts.told(SYNC)
    assert counted.most(PAGEABLE) == 0, device.counts.told(PAGEABLE)
    assert len({each[REGISTERED] for each in counted.epochs}) == 1, device.counts.told(REGISTERED)


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", some(KINDS))
def test_losses_are_the_cpu_s_and_steps_do_not_wait(stores: dict[str, Path], tmp_path: Path, kind: str) -> None:
    check_losses(stores, tmp_path, kind)


@pytest.mark.parametrize("kind", some(["sage", "sage, rows in RAM", "sage, bf16", "gcn, weights", "gat", "links", "edges"]))
def test_rows_that_do_not_all_fit_the_device(
    stores: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    beside = DevicePlan.beside
    monkeypatch.setattr(DevicePlan, "beside", lambda self, *sizes: replace(beside(self, *sizes), pool=sizes[3] // 3))
    monkeypatch.setattr(_Chooser, "_pays", lambda self, slots: True)
    check_losses(stores, tmp_path, kind)


PULLING = {"history": "history.halo", "events": "temporal.node_memory", "windows": "temporal.window_task"}


@pytest.mark.cases(1)
@pytest.mark.parametrize(("kind", "module"), PULLING.items())
def test_rows_of_histories_and_of_node_memory_are_booked(
    stores: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, module: str
) -> None:
    pulled, booked, to_device = [], [], import_module(f"ooc.{module}").to_device
    given = {"store": "multiclass", "hidden": 8, "epochs": 1, "threads": 1, "memory": "3GB", **KINDS[kind]}
    given["store"] = stores[given["store"]]

    def noted(tensors: Any, device: Any) -> Any:
        tensors = list(tensors)
        pulled.append(sum(tensor.nbytes for tensor in tensors))
        return to_device(tensors, device)

    monkeypatch.setattr(f"ooc.{module}.to_device", noted)
    monkeypatch.setattr(DevicePlan, "with_states", lambda plan, nbytes: booked.append(nbytes) or replace(plan, states=nbytes))
    with pretended_cuda():
        train(class_of(given)(**given, out=tmp_path / "run", device="cuda"))
    assert len(booked) == 1
    assert 0 < max(pulled) <= booked[0] <= 40 * max(pulled)


def check_losses(stores: dict[str, Path], tmp_path: Path, kind: str) -> None:
    given = {"store": "multiclass", "hidden": 8, "epochs": 2, "seed": 5, "threads": 1, **KINDS[kind]}
    fields = class_of(given).model_fields
    given = {name: value for name, value in OFF.items() if name in fields} | given
    given["store"] = stores[given["store"]]
    losses = {}
    with pretended_cuda() as device:
        for name in ("cpu", "cuda"):
            counted, out = Counted(device), tmp_path / name
            with counted.counting():
                train(class_of(given)(**given, out=out, device=name))
            losses[name] = [line["loss"] for line in read_metrics(out)[0]]
    np.testing.assert_allclose(losses["cuda"], losses["cpu"], rtol=1e-5, atol=1e-5)
    counts = device.counts
    assert counts[OPERATION] > len(losses["cuda"])
    assert counted.most(SYNC) <= 1, counts.told(SYNC)
    assert counted.most(PAGEABLE) == 0, counts.told(PAGEABLE)
    assert len(counted.exact) == (len(losses["cuda"]) if given.get("mode") == "full" else 0)
    for step in counted.exact:
        assert step.found[PAGEABLE] == 0, counts.told(PAGEABLE)
        assert step.resident == (given.get("placement", "planned") == "planned")
        # One chunk's rows and gradients for each op, if the host adds them up, what autograd keeps, and the loss.
        most = 1 if step.resident else step.ops + step.moved + 1
        assert step.found[SYNC] <= most, counts.told(SYNC)
    first, epochs = ([each[REGISTERED] for each in found] for found in (counted.of_epoch(0), counted.epochs))
    assert first[-1] - first[0] <= GROWING.get(kind, 0), counts.told(REGISTERED)
    assert len(epochs) >= 2
    assert len(set(epochs)) == 1, counts.told(REGISTERED)  # second steps and second scores have the first ones' buffers
