"""Runs with task = link: they learn, resume to the bit, are planned, and give embeddings."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ooc
from ooc.config.modes import choice_of
from ooc.metrics.links import LinkScores
from ooc.models.builders import full_blocks
from ooc.models.layers import run_model
from ooc.models.user_models import forward_batch
from ooc.stores.arrays.whole import whole
from ooc.stores.errors import ConfigError
from ooc.training.link_mode import LinkMode
from tests.conftest import MakeStore
from tests.ooc.runs import curve

N, GROUPS = 80, 5
SMALL: dict[str, Any] = {"task": "link", "hidden": 8, "fanout": [4, 4], "batch_size": 64, "plan": False, "dropout": 0.0}


@pytest.fixture
def store(make_store: MakeStore) -> Path:
    """Groups with edges inside alone, in both directions, and features that tell them apart; no labels."""
    rng = np.random.default_rng(0)
    src, dst = rng.integers(0, N // GROUPS, (2, 250)) * GROUPS + rng.integers(0, GROUPS, 250)
    x = (np.eye(GROUPS)[np.arange(N) % GROUPS] + 0.2 * rng.standard_normal((N, GROUPS))).astype(np.float32)
    both = np.concatenate([src, dst]), np.concatenate([dst, src])
    return make_store(num_nodes=N, src=both[0], dst=both[1], x=x, y=None, task=None, num_classes=None, undirected=True)


@pytest.mark.parametrize(
    "how",
    [
        {},
        pytest.param({"loss": "bpr", "decoder": "distmult"}, marks=pytest.mark.slow),
        pytest.param({"loss": "softmax", "decoder": "mlp"}, marks=pytest.mark.slow),
    ],
)
def test_links_are_learned(store: Path, tmp_path: Path, how: dict[str, Any]) -> None:
    run = tmp_path / "run"
    result = ooc.train(store=store, out=run, epochs=12, lr=0.03, val=0.1, test=0.2, eval_ratio=3, **SMALL, **how)
    assert set(result["metrics"]["test"]) == {"ap", "auroc", "mrr", "hits@1", "hits@3", "hits@10"}
    assert result["metrics"]["test"]["auroc"] > 0.7
    rows = ooc.infer(run, store)
    assert rows.shape == (N, 8)
    if "decoder" not in how:
        best = ooc.top_k(rows, 5, known=ooc.open(store))
        assert (best.item % GROUPS == np.arange(N)[:, None] % GROUPS).mean() > 0.7


def test_a_resumed_run_is_the_whole_run(store: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    ooc.train(store=store, out=whole, epochs=3, checkpoint_every=1, threads=1, **SMALL)
    ooc.train(store=store, out=parts, epochs=3, max_steps=7, checkpoint_every=1, threads=1, **SMALL)
    ooc.train(out=parts, resume=True, max_steps=10**6)
    assert curve(parts) == curve(whole)


def test_scores_are_those_of_links_that_carry_no_messages(store: Path, tmp_path: Path) -> None:
    config = ooc.LinkConfig(store=store, out=tmp_path / "run", val=0.2, test=0.2, eval_ratio=2, **SMALL)
    with ooc.open(store) as ds:
        mode = LinkMode(config, ds)
        counts = {part: loader.num_seeds for part, loader in mode.evaluators.items()}
        assert {"val", "test"} == set(counts)
        assert sum(counts.values()) + mode.loader.num_seeds == ds.num_edges
        scores, edges = LinkScores(), set(zip(*map(np.ndarray.tolist, ends(ds)), strict=True))
        for batch in mode.evaluators["val"]:
            rows = forward_batch(mode.model, batch)
            negative = rows[batch.dst_neg_index]
            src = rows[batch.src_index]
            scores.update((src * rows[batch.dst_pos_index]).sum(-1), (src[:, None] * negative).sum(-1))
            drawn = zip(batch.n_id[batch.src_index].tolist(), batch.n_id[batch.dst_neg_index].tolist(), strict=True)
            assert not {(u, v) for u, row in drawn for v in row} & edges
        found = mode.score("val", 7)
        assert found is not None
        assert {name: found[name] for name in ("mrr", "hits@1")} == pytest.approx(
            {name: each for name, each in scores.compute().items() if name in ("mrr", "hits@1")}
        )
        assert found == mode.score("val", 8)
        mode.close()


def wanted_scores(
    scores: np.ndarray, parts: dict[str, set[tuple[int, int]]], k: int, same: bool = True
) -> dict[str, dict[str, float]]:
    """Recall@k and NDCG@k of every part by loops: all other destinations, without the links known before the part."""
    found = {}
    for part, known in (("val", parts["train"]), ("test", parts["train"] | parts["val"]), ("train", set())):
        recall, ndcg = [], []
        links = {(u, v) for u, v in parts[part] - known if not (same and u == v)}
        for u in sorted({u for u, _ in links}):
            to_find = {v for source, v in links if source == u}
            ranked = np.argsort(-scores[u], kind="stable").tolist()
            order = [v for v in ranked if (u, v) not in known and not (same and v == u)][:k]
            recall.append(len(to_find.intersection(order)) / len(to_find))
            gain = sum(1 / np.log2(place + 2) for place, v in enumerate(order) if v in to_find)
            ndcg.append(gain / sum(1 / np.log2(place + 2) for place in range(min(k, len(to_find)))))
        found[part] = {f"recall@{k}": float(np.mean(recall)), f"ndcg@{k}": float(np.mean(ndcg))}
    return found


@pytest.mark.cases(1)
@pytest.mark.parametrize("undirected", [True, False])
def test_all_destinations_are_ranked(store: Path, make_store: MakeStore, tmp_path: Path, undirected: bool) -> None:
    """Against a forward over the graph without edges of validation and test, and a sort."""
    if not undirected:
        with ooc.open(store) as ds:
            src, dst, x = *(end[::2] for end in ends(ds)), whole(ds.rows("x"))
        store = make_store("directed.ooc", num_nodes=N, src=src, dst=dst, x=x, y=None, task=None, num_classes=None)
    ks, how = [2, 9], {**SMALL, "fanout": [-1, -1], "batch_size": 30}
    result = ooc.train(store=store, out=tmp_path / "run", epochs=2, threads=1, eval_k=ks, eval_splits=["train", "test"], **how)
    assert {"recall@2", "ndcg@2", "recall@9", "ndcg@9", "auroc", "hits@10"} <= set(result["metrics"]["test"])
    assert not (tmp_path / "run" / "ranking").exists()
    config = ooc.LinkConfig(store=store, out=tmp_path / "other", eval_k=ks, **how)
    with ooc.open(store) as ds:
        mode = LinkMode(config, ds)
        mode.model.load_state_dict(torch.load(tmp_path / "run" / "model.pt", weights_only=True)["model"])
        src, dst = ends(ds)
        part = mode.split.parts(src, dst)
        carries = torch.from_numpy(np.stack([src, dst])[:, part == 0])
        mode.model.eval()
        with torch.no_grad():
            rows = run_model(mode.model, torch.from_numpy(whole(ds.rows("x")).copy()), full_blocks(carries, N, 2))
        found = mode._ranked(["val", "test", "train"], mode.model.link_decoder)
        mode.close()
    pairs = {
        name: set(zip(src[part == number].tolist(), dst[part == number].tolist(), strict=True))
        for number, name in enumerate(("train", "val", "test"))
    }
    for k in ks:
        for name, scores in wanted_scores((rows @ rows.T).numpy(), pairs, k).items():
            assert {key: found[name][key] for key in scores} == pytest.approx(scores, abs=1e-6), name
    for name in ("train", "test"):
        assert {key: result["metrics"][name][key] for key in found[name]} == found[name]


def ends(ds: Any) -> tuple[np.ndarray, np.ndarray]:
    return np.asarray(ds.graph.indices, np.int64), np.repeat(np.arange(ds.num_nodes), np.diff(ds.graph.indptr))


def test_it_is_planned(store: Path, tmp_path: Path) -> None:
    made = ooc.plan(store=store, out=tmp_path / "run", memory="4GB", epochs=2, **{**SMALL, "plan": True})
    assert made.prediction.seconds_per_epoch > 0
    assert not (tmp_path / "run").exists()


def test_the_task_is_trained_by_sampling_where_no_mode_is_given() -> None:
    assert choice_of({"task": "link"}) == ("link", "sampled")
    assert choice_of({"mode": "sampled"}) == ("node", "sampled")
    assert choice_of({"mode": "events"}) == ("link", "events")


def test_what_does_not_fit_is_refused(store: Path, make_store: MakeStore, tmp_path: Path) -> None:
    for settings, words in (
        ({"label_smoothing": 0.1}, "label_smoothing does not apply to task = link"),
        ({"evaluate": "layerwise"}, "evaluate = layerwise computes all edges"),
        ({"val": 0.5, "test": 0.5}, "leave no edges to train on"),
        ({"eval_splits": ["dev"]}, "'dev' is no part of the edges"),
        ({"decoder": "cosine"}, "decoder"),
        ({"monitor": "accuracy"}, "monitor"),
        ({"mode": "cluster"}, "not trained by mode cluster"),
        ({"val": 0, "patience": 3}, "patience needs validation edges"),
        ({"val": 1e-9, "patience": 3}, "patience needs edges to validate on, and the split 'val' of .* has no edges"),
        ({"eval_k": [0]}, "eval_k"),
        ({"sampler": "learned", "fanout": [64, 64], "eval_fanout": [9, 9]}, "sampler = learned learns from labels of nodes"),
        ({"sampler": "ladies", "fanout": [64, 64]}, "sampler = ladies does not: give eval_fanout = 10,10$"),
    ):
        with pytest.raises(ConfigError, match=words):
            ooc.train(store=store, out=tmp_path / "run", **{**SMALL, **settings})
    none = np.empty(0, np.int64)
    bare = make_store("bare.ooc", num_nodes=9, src=none, dst=none)
    with pytest.raises(ConfigError, match="holds no edges to predict"):
        ooc.train(store=bare, out=tmp_path / "run", **SMALL)
    assert not (tmp_path / "run").exists()
    assert torch.is_grad_enabled()
