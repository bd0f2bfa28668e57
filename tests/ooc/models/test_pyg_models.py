"""PyG's ready models as classes of the user's own, in every mode that takes them, against PyG in memory."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch_geometric.nn as pyg
from torch_geometric.utils import degree, k_hop_subgraph

from ooc.config.nodes import FullConfig
from ooc.layerwise import full_neighbor_pass
from ooc.models.pyg_models import degree_histogram
from ooc.runtime.keyed_random import Purpose, key
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError
from ooc.training.infer import embed, infer
from ooc.training.loop import train
from ooc.training.watchers import LineWatcher
from tests.conftest import MakeStore
from tests.ooc.runs import Killed, configure

MODELS = ["GraphSAGE", "GCN", "GAT", "GIN", "PNA", "EdgeCNN"]
SOME = [pytest.param(name, marks=[] if name in ("GCN", "PNA") else [pytest.mark.slow]) for name in MODELS]
PNA = {"aggregators": ["mean", "min", "max", "std"], "scalers": ["identity", "amplification", "attenuation"]}


def whole(store: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x, edge_index, y, training nodes) in memory."""
    with Dataset.open(store) as ds:
        x = torch.empty(ds.num_nodes, ds.num_features)
        ds.rows("x").read(np.arange(ds.num_nodes), x.numpy())
        target = np.repeat(np.arange(ds.num_nodes), np.diff(ds.graph.indptr))
        edge_index = torch.from_numpy(np.stack([np.asarray(ds.graph.indices, np.int64), target]))
        members, labels = ds.members("train"), torch.from_numpy(np.asarray(ds.labels[np.arange(50)])).long()
        return x, edge_index, labels, torch.from_numpy(members[np.arange(len(members))])


def in_memory(name: str, edge_index: torch.Tensor, seed: int = 5, **more: Any) -> torch.nn.Module:
    """PyG's model, made as a script of PyG would, from the seed of the run."""
    if name == "PNA":
        deg = torch.bincount(degree(edge_index[1], 50, torch.long))
        more |= {**PNA, "deg": deg}
    torch.manual_seed(key(seed, Purpose.INIT) >> 1)
    made: torch.nn.Module = getattr(pyg, name)(8, 8, 2, 3, **more)
    return made


def first_loss(store: Path, out: Path, name: str, **settings: Any) -> float:
    common: dict[str, Any] = {"dropout": 0.0, "max_steps": 1, "batch_size": 64, "eval_splits": []}
    train(configure(store, out, model=f"torch_geometric.nn:{name}", **{**common, **settings}))
    return float(json.loads((out / "metrics.jsonl").read_text().splitlines()[0])["loss"])


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_pygs(make_store: MakeStore, tmp_path: Path, name: str) -> None:
    """On full neighborhoods, as NeighborLoader cuts them, and on all nodes in one part."""
    store = make_store()
    x, edge_index, y, node = whole(store)
    model = in_memory(name, edge_index).eval()  # without dropout and norms, as in training
    subset, edges, place, _ = k_hop_subgraph(node, 2, edge_index, relabel_nodes=True, directed=True)
    expected = torch.nn.functional.cross_entropy(model(x[subset], edges)[place], y[node])
    found = first_loss(store, tmp_path / "sampled", name, fanout=[-1, -1])
    assert found == pytest.approx(expected.item(), rel=1e-4)
    expected = torch.nn.functional.cross_entropy(model(x, edge_index)[node], y[node])
    found = first_loss(store, tmp_path / "cluster", name, mode="cluster", fanout=[], layers=2, parts=1)
    assert found == pytest.approx(expected.item(), rel=1e-4)
    assert np.isfinite(first_loss(store, tmp_path / "saint", name, mode="saint", fanout=[], layers=2, roots=20))


@pytest.mark.parametrize("name", SOME)
def test_inference_is_pygs(make_store: MakeStore, name: str) -> None:
    store = make_store()
    x, edge_index, *_ = whole(store)
    model = in_memory(name, edge_index).eval()
    with torch.inference_mode():
        expected = model(x, edge_index)
    with infer(model, store) as rows:
        np.testing.assert_allclose(rows, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("jk", ["cat", *(pytest.param(name, marks=pytest.mark.slow) for name in ("max", "lstm"))])
def test_inference_joins_layers_as_pygs(make_store: MakeStore, jk: str) -> None:
    """Jumping knowledge, which PyG's own layer-wise `inference(loader)` leaves out."""
    store = make_store()
    x, edge_index, *_ = whole(store)
    model = in_memory("GraphSAGE", edge_index, jk=jk).eval()
    with torch.inference_mode():
        expected = model(x, edge_index)
    with infer(model, store) as rows:
        np.testing.assert_allclose(rows, expected, atol=1e-4, rtol=1e-4)


def test_settings_reach_pygs_models(make_store: MakeStore, tmp_path: Path) -> None:
    store = make_store()
    x, edge_index, y, node = whole(store)
    model = in_memory("GAT", edge_index, heads=2, norm="LayerNorm", norm_kwargs={"mode": "node"})
    subset, edges, place, _ = k_hop_subgraph(node, 2, edge_index, relabel_nodes=True, directed=True)
    expected = torch.nn.functional.cross_entropy(model(x[subset], edges)[place], y[node])
    found = first_loss(store, tmp_path / "run", "GAT", fanout=[-1, -1], heads=2, norm="layer")
    assert found == pytest.approx(expected.item(), rel=1e-4)
    assert np.isfinite(first_loss(store, tmp_path / "batch", "GraphSAGE", fanout=[-1, -1], norm="batch"))


def test_degrees_are_counted_as_in_pygs_example(make_store: MakeStore) -> None:
    store = make_store()
    _, edge_index, *_ = whole(store)
    with Dataset.open(store) as ds:
        assert torch.equal(degree_histogram(ds.graph), torch.bincount(degree(edge_index[1], 50, torch.long)))


def test_exact_scores_of_a_model_with_its_own_forward(make_store: MakeStore, tmp_path: Path) -> None:
    """By full neighborhoods, of one hop more than layers for GCN; what else cannot be done is said before training."""
    store, said = make_store(), list[str]()
    x, edge_index, y, _ = whole(store)
    settings: dict[str, Any] = {"model": "torch_geometric.nn:GCN", "epochs": 1, "fanout": [2, 2], "evaluate": "layerwise"}
    watcher = LineWatcher()
    watcher.note = said.append  # type: ignore[method-assign]
    summary = train(configure(store, tmp_path / "run", **settings, dropout=0.0, eval_splits=["test"]), watcher=watcher)
    assert any("GCN has its own forward" in each and "history and full refuse it" in each for each in said)
    model = in_memory("GCN", edge_index).eval()
    model.load_state_dict(torch.load(tmp_path / "run" / "model.pt", weights_only=True)["model"])
    with Dataset.open(store) as ds, torch.inference_mode():
        node = torch.from_numpy(ds.members("test")[np.arange(10)])
        expected = torch.nn.functional.cross_entropy(model(x, edge_index)[node], y[node])
    assert summary["metrics"]["test"]["loss"] == pytest.approx(expected.item(), rel=1e-4)
    out = infer(tmp_path / "run", store, tmp_path / "p.parquet", model_class="torch_geometric.nn:GCN")
    assert "full neighborhoods of 3 hops" in out.moved
    expected_class = model(x, edge_index).argmax(1)
    assert pq.read_table(tmp_path / "p.parquet")["class"].to_pylist() == expected_class.tolist()
    embedded = embed(tmp_path / "run", store, allow_code=True)
    np.testing.assert_allclose(embedded[:5], model(x, edge_index)[:5].detach(), atol=1e-4)
    for mode in ("history", "full"):
        with pytest.raises(ConfigError, match="its own forward"):
            first_loss(store, tmp_path / mode, "GCN", mode=mode, fanout=[], layers=2) if mode == "history" else train(
                FullConfig(store=store, out=tmp_path / mode, model="torch_geometric.nn:GCN")
            )
        assert not (tmp_path / mode).exists()


def test_a_pass_over_full_neighborhoods_goes_on_after_a_kill(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was noted is not computed again."""
    store = make_store(num_nodes=200, num_edges=2000)
    model = pyg.GraphSAGE(8, 8, 2, 3).eval()
    monkeypatch.setattr(full_neighbor_pass, "SEEDS", 64)
    monkeypatch.setattr(full_neighbor_pass, "NOTE_SECONDS", 0.0)
    whole_rows, done = np.asarray(infer(model, store)), list[int]()

    def stop(what: str, nodes: int, total: int) -> None:
        done.append(nodes)
        if nodes == 128 and len(done) == 2:
            raise Killed

    with pytest.raises(Killed):
        infer(model, store, tmp_path / "p.parquet", progress=stop)
    infer(model, store, tmp_path / "p.parquet", progress=stop)
    assert done == [64, 128, 128, 192, 200]
    table = pq.read_table(tmp_path / "p.parquet")
    np.testing.assert_allclose(table["probabilities"].to_pylist(), torch.from_numpy(whole_rows).softmax(1), atol=1e-5)
    assert [path.name for path in tmp_path.glob("p*")] == ["p.parquet"]
