"""Runs with task = link on an edge type of a heterogeneous store, whose users have embedding tables; and on a stored split."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData

import ooc
from ooc.cli.main import main
from ooc.graph.hetero import EdgeKey
from ooc.models.hetero import full_hetero_blocks
from ooc.models.user_models import forward_batch
from ooc.sampling.links import EdgeLookup
from ooc.stores.errors import ConfigError
from ooc.training.edge_mode import EdgeMode
from ooc.training.link_mode import LinkMode
from ooc.training.node_rows import WrittenRows
from tests.conftest import MakeStore
from tests.ooc.runs import curve
from tests.ooc.training.test_link_run import wanted_scores

USERS, ITEMS, GROUPS = 40, 30, 5
LIKES: EdgeKey = ("user", "likes", "item")
LIKED: EdgeKey = ("item", "rev_likes", "user")
NEAR: EdgeKey = ("item", "near", "item")
SMALL: dict[str, Any] = {"task": "link", "model": "rsage", "hidden": 8, "fanout": [4, 4], "batch_size": 64, "plan": False}
SMALL |= {"dropout": 0.0, "edge_type": "user:likes:item", "threads": 1}


def shop() -> HeteroData:
    """Users like items of their group, some of them twice; items have features that tell the group, users have none."""
    rng, data = np.random.default_rng(0), HeteroData()
    user, item = rng.integers(0, USERS // GROUPS, 260) * GROUPS, rng.integers(0, ITEMS // GROUPS, 260) * GROUPS
    group = rng.integers(0, GROUPS, 260)
    likes = torch.from_numpy(np.stack([user + group, item + group]))
    x = np.eye(GROUPS)[np.arange(ITEMS) % GROUPS] + 0.2 * rng.standard_normal((ITEMS, GROUPS))
    data["user"].num_nodes, data["item"].x = USERS, torch.from_numpy(x.astype(np.float32))
    data[LIKES].edge_index, data[LIKED].edge_index = likes, likes.flip(0)
    data[NEAR].edge_index = torch.from_numpy(rng.integers(0, ITEMS, (2, 70)))
    return data


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shop") / "shop.ooc"
    ooc.from_data(shop(), path).close()
    return path


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a split of the likes."""
    path, data = tmp_path_factory.mktemp("divided") / "shop.ooc", shop()
    part = np.random.default_rng(1).random(260)
    data[LIKES].edge_train_mask, data[LIKES].edge_val_mask = torch.from_numpy(part < 0.7), torch.from_numpy(part > 0.85)
    data[LIKES].edge_test_mask = torch.from_numpy((part >= 0.7) & (part <= 0.85))
    ooc.from_data(data, path).close()
    return path


@pytest.mark.parametrize(
    "how",
    [
        {},
        pytest.param({"model": "hgt", "heads": 2, "loss": "bpr", "decoder": "distmult"}, marks=pytest.mark.slow),
        pytest.param({"model": "rgcn", "loss": "softmax", "decoder": "mlp"}, marks=pytest.mark.slow),
        pytest.param({"model": "torch_geometric.nn:GraphSAGE"}, marks=pytest.mark.slow),
        pytest.param({"edge_type": "near", "decoder": "mlp"}, marks=pytest.mark.slow),
    ],
)
def test_links_of_an_edge_type_are_learned(store: Path, tmp_path: Path, how: dict[str, Any]) -> None:
    result = ooc.train(store=store, out=tmp_path / "run", epochs=15, lr=0.03, **{**SMALL, **how})
    assert set(result["metrics"]["test"]) == {"ap", "auroc", "mrr", "hits@1", "hits@3", "hits@10"}
    assert "edge_type" in how or result["metrics"]["test"]["auroc"] > 0.6


@pytest.mark.slow
def test_a_resumed_run_is_the_whole_run(divided: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    ooc.train(store=divided, out=whole, epochs=3, checkpoint_every=1, **SMALL)
    ooc.train(store=divided, out=parts, epochs=3, max_steps=4, checkpoint_every=1, **SMALL)
    ooc.train(out=parts, resume=True, max_steps=10**6)
    assert curve(parts) == curve(whole)


def test_all_destinations_are_ranked(divided: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Items for every user, by the rows that the run embeds; a like that is in training too is not to be found."""
    rows, embedded = {"user": np.zeros((USERS, 8), np.float32), "item": np.zeros((ITEMS, 8), np.float32)}, LinkMode._embedded

    def recorded(mode: LinkMode, node_type: str, ids: Any) -> Any:
        for node, found in embedded(mode, node_type, ids):
            rows[node_type][node] = found
            yield node, found

    monkeypatch.setattr(LinkMode, "_embedded", recorded)
    result = ooc.train(store=divided, out=tmp_path / "run", epochs=2, eval_k="3,50", **SMALL)
    with ooc.open(divided) as ds:
        edges = ds.edges(LIKES)
        src, dst = EdgeLookup(edges.graph).ends(np.arange(edges.num_edges))
        slots = {part: np.asarray(edges.members(part)) for part in ("train", "val", "test")}
    pairs = {part: set(zip(src[own].tolist(), dst[own].tolist(), strict=True)) for part, own in slots.items()}
    assert pairs["train"] & pairs["test"]
    for k in (3, 50):
        scores = wanted_scores(rows["user"] @ rows["item"].T, pairs, k, same=False)
        for part in ("val", "test"):
            found = result["metrics"][part]
            assert {name: found[name] for name in scores[part]} == pytest.approx(scores[part], abs=1e-6), part


def others(edges: dict[EdgeKey, torch.Tensor], links: set[tuple[int, int]]) -> dict[EdgeKey, torch.Tensor]:
    """The edges but for likes between the ends of `links`, in both directions."""
    found = dict(edges)
    for key in (LIKES, LIKED):
        pairs = edges[key].tolist() if key == LIKES else edges[key].flip(0).tolist()
        kept = [i for i, pair in enumerate(zip(*pairs, strict=True)) if pair not in links]
        found[key] = edges[key][:, kept]
    return found


@pytest.mark.cases(1)
@pytest.mark.parametrize("model", ["rsage", "rgcn", "hgt"])
@pytest.mark.parametrize("is_divided", [False, True])
def test_full_fan_outs_embed_as_in_ram(store: Path, divided: Path, tmp_path: Path, model: str, is_divided: bool) -> None:
    """On the whole graph without the links of the batch, without those of validation and test, and without their reverses."""
    path, data = divided if is_divided else store, shop()
    how: dict[str, Any] = {**SMALL, "model": model, "fanout": [-1, -1], "batch_size": 20}
    config = ooc.LinkConfig(store=path, out=tmp_path / "run", **how, **({"heads": 2} if model == "hgt" else {}))
    pairs = list(zip(*data[LIKES].edge_index.tolist(), strict=True))
    with ooc.open(path) as ds:
        mode = LinkMode(config, ds)
        held = [batch[LIKES].input_id for part in ("val", "test") for batch in mode.evaluators[part]]
        held_out = {pairs[i] for i in torch.cat(held).tolist()}
        assert len(held_out) > 15
        rows = {"user": torch.randn(mode.table_shapes["user"]), "item": data["item"].x}
        count = {"user": USERS, "item": ITEMS}
        mode.model.eval()
        for loader in (mode.loader, mode.evaluators["test"]):
            seen = 0
            for batch in loader:
                batch["user"].x = rows["user"][batch["user"].n_id]
                with torch.no_grad():
                    out = forward_batch(mode.model, batch)
                links = {pairs[i] for i in batch[LIKES].input_id.tolist()}
                blocks = full_hetero_blocks(others(data.edge_index_dict, links | held_out), count, 2)
                with torch.no_grad():
                    whole = mode.model(rows, blocks)
                for name, found in out.items():
                    np.testing.assert_allclose(found, whole[name][batch[name].n_id[: len(found)]], atol=1e-5, rtol=1e-5)
                seen += len(links)
            assert seen
        mode.close()


@pytest.fixture(scope="module")
def rated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Likes have two features, and numbers that follow from these and from the item."""
    path, data, rng = tmp_path_factory.mktemp("rated") / "shop.ooc", shop(), np.random.default_rng(2)
    attr, part = torch.from_numpy(rng.standard_normal((260, 2)).astype(np.float32)), rng.random(260)
    data[LIKES].edge_attr, data[LIKES].edge_y = attr, data["item"].x[data[LIKES].edge_index[1], 0] + attr[:, 1]
    data[LIKES].edge_train_mask, data[LIKES].edge_val_mask = torch.from_numpy(part < 0.7), torch.from_numpy(part > 0.85)
    data[LIKES].edge_test_mask = torch.from_numpy((part >= 0.7) & (part <= 0.85))
    ooc.from_data(data, path).close()
    return path


@pytest.mark.slow
def test_labels_of_an_edge_type_are_learned(rated: Path, tmp_path: Path) -> None:
    """A step is the formula on the whole graph without the edges of the batch."""
    data = shop()
    settings = {**SMALL, "task": "edge", "fanout": [-1, -1], "lr": 0.02, "epochs": 25, "edge_type": None}
    summary = ooc.train(store=rated, out=tmp_path / "run", **settings)
    assert summary["metrics"]["test"]["r2"] > 0.5
    config = ooc.load_config(None, {**settings, "store": rated, "out": tmp_path / "other"})
    with ooc.open(rated) as ds:
        mode = EdgeMode(config, ds)
        batch = next(iter(mode.loader))
        rows = {"user": torch.randn(mode.table_shapes["user"]), "item": data["item"].x}
        batch["user"].x = rows["user"][batch["user"].n_id]
        ends, mine = data[LIKES].edge_index[:, batch[LIKES].input_id], batch[LIKES].input_id
        links = set(zip(*ends.tolist(), strict=True))
        blocks = full_hetero_blocks(others(data.edge_index_dict, links), {"user": USERS, "item": ITEMS}, 2)
        attr = torch.empty(len(mine), 2)
        ds.edges(LIKES).features("edge_attr").read(mine.numpy(), attr.numpy())
        mode.model.eval()
        with torch.no_grad():
            whole, out = mode.model.encoder(rows, blocks), mode.outputs(mode.model, batch)
            expected = mode.model.decoder(whole["user"][ends[0]], whole["item"][ends[1]], edge_attr=attr)
        np.testing.assert_allclose(out, expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(mode.labels_in(batch), torch.from_numpy(np.array(ds.edges(LIKES).labels)[mine]))
        mode.close()


def test_a_split_of_the_store_is_used(divided: Path, tmp_path: Path) -> None:
    for given, expected in (({}, 260 * 0.7), ({"val": 0.3, "test": 0.3}, 260 * 0.4)):
        config = ooc.LinkConfig(store=divided, out=tmp_path / "run", **SMALL, **given)
        with ooc.open(divided) as ds:
            mode = LinkMode(config, ds)
            assert mode.loader.num_seeds == pytest.approx(expected, rel=0.2)
            assert given or mode.loader.num_seeds == len(ds.edges(LIKES).members("train"))
            assert set(mode.evaluators) == {"val", "test"}
            mode.close()


def test_nothing_is_said_of_features_where_there_are_none(tmp_path: Path) -> None:
    data = HeteroData(user={"num_nodes": 30}, item={"num_nodes": 20})
    data["user", "likes", "item"].edge_index = torch.stack([torch.arange(60) % 30, torch.arange(60) % 20])
    with ooc.from_data(data, tmp_path / "s.ooc", reverse=True) as ds:
        mode = LinkMode(ooc.LinkConfig(store=ds.path, out=tmp_path / "run", **{**SMALL, "edge_type": "user:likes:item"}), ds)
        assert not any("features" in line for line in mode.notes())
        mode.close()
    assert WrittenRows(tmp_path, 2, 1, 0, 0, "").moved == "0 B read, 0 B written"


@pytest.mark.parametrize("undirected", [False, True])
def test_a_stored_split_of_one_edge_type(tmp_path: Path, undirected: bool) -> None:
    """No message goes along an edge of validation or test, nor between its ends in the other direction."""
    rng = np.random.default_rng(3)
    src, dst = rng.integers(0, 30, (2, 200))
    part = rng.random(200)
    data = Data(x=torch.ones(30, 3), edge_index=torch.from_numpy(np.stack([src, dst])))
    data.edge_train_mask, data.edge_val_mask = torch.from_numpy(part < 0.6), torch.from_numpy(part >= 0.8)
    ooc.from_data(data, tmp_path / "s.ooc", undirected=undirected).close()
    out = {frozenset(pair) for pair in zip(src[part >= 0.8].tolist(), dst[part >= 0.8].tolist(), strict=True)}
    with ooc.open(tmp_path / "s.ooc") as ds:
        split, seen, messages = ooc.StoredEdgeSplit(ds), 0, set()
        for batch in ooc.LinkNeighborLoader(ds, [-1], "train", edge_split=split, batch_size=16, keep_supervision_edges=True):
            ends = batch.n_id[batch.edge_index]
            messages |= {frozenset(pair) for pair in ends.t().tolist()}
            seen += len(batch.input_id)
        assert seen == len(ds.edges().members("train"))
        assert not messages & out
        middle = {frozenset(pair) for pair in zip(src[part < 0.8].tolist(), dst[part < 0.8].tolist(), strict=True)}
        assert len(messages) > 0.8 * len(middle - out)
        for batch in ooc.LinkNeighborLoader(ds, [3], "val", edge_split=split, disjoint=True, batch_size=16):
            assert not {frozenset(pair) for pair in batch.n_id[batch.edge_index].t().tolist()} & out


def test_the_command_says_in_one_line_what_is_wrong(
    store: Path, make_store: MakeStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    src, dst = np.nonzero(~np.eye(6, dtype=bool))
    whole = make_store(num_nodes=6, src=src, dst=dst)
    out = tmp_path / "run"
    for words, message in (
        ([whole], f"{whole} has all possible edges, so no pairs of nodes that are none to compare them with"),
        ([whole, "--edge-type", "node:edge:node"], "edge_type applies to heterogeneous stores"),
        ([store, "--model", "rsage"], "choose the links' one, as in --edge-type user:likes:item"),
        ([store, "--model", "rsage", "--edge-type", "user:buys:item"], "has no such edge type: it has user:likes:item, "),
    ):
        assert main(["train", *map(str, words), "--task", "link", "--out", str(out)]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
        assert not out.exists()


def test_what_does_not_fit_is_refused(store: Path, divided: Path, rated: Path, tmp_path: Path) -> None:
    there = "user:likes:item, item:rev_likes:user, item:near:item"
    for path, settings, words in (
        (store, {"edge_type": None}, "has the edge types .*: choose the links' one, as in `edge_type="),
        (store, {"edge_type": "user:buys:item"}, "edge_type = 'user:buys:item': .* has no such edge type"),
        (store, {"model": "sage"}, "model 'sage' is not for heterogeneous graphs"),
        (store, {"train_split": "mine"}, "train_split = 'mine', and the store has no split of these edges"),
        (divided, {"train_split": "mine"}, r"has no split 'mine' of edges \(it has: train, val, test\)"),
        (divided, {"val": 0.1, "val_split": "test"}, "val_split = 'test', and val and test divide the edges at random"),
        (divided, {"eval_splits": ["dev"]}, "'dev' is no part of the edges: give train, val, test"),
    ):
        with pytest.raises(ConfigError, match=words) as raised:
            ooc.train(store=path, out=tmp_path / "run", **{**SMALL, **settings})
        assert "\n" not in str(raised.value)
    with pytest.raises(ConfigError, match=r"has no labels of these edges \(it has labels of user:likes:item\)"):
        ooc.train(store=rated, out=tmp_path / "run", **{**SMALL, "task": "edge", "edge_type": "near"})
    with pytest.raises(ConfigError, match="holds no labels of edges to train on"):
        ooc.train(store=store, out=tmp_path / "run", **{**SMALL, "task": "edge", "edge_type": None})
    with ooc.open(rated) as ds, pytest.raises(ConfigError, match="edge_label_attr is of edges of the graph alone"):
        ooc.LinkNeighborLoader(ds, [2], LIKES, neg_sampling="binary", edge_label_attr=True)
    with ooc.open(store) as ds, pytest.raises(ConfigError, match=r"has no split 'train' of edges \(it has: none\)"):
        ooc.StoredEdgeSplit(ds, LIKES)
    with ooc.open(divided) as ds, pytest.raises(ConfigError, match=f"give one of the edge types of .*, {there}"):
        ooc.StoredEdgeSplit(ds, "buys")
    assert not (tmp_path / "run").exists()
