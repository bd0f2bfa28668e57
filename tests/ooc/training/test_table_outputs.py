"""Lists of answers, embeddings and neighbors of trained tables against sorting all scores."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zarr

import ooc
from ooc.cli.main import main
from ooc.layerwise.filtered_ranks import TableInOrder
from ooc.loading.relation_links import RelationLinks
from ooc.models.link_scores import make_scorer
from ooc.stores.arrays.rows import ArrayRows
from ooc.stores.errors import BudgetError, ConfigError, StoreError
from ooc.training.table_lists import AnswerLists
from ooc.training.table_outputs import TrainedTable, answer_tables

WORDS, RELATIONS, WIDTH = 25, ["eats", "sees", "is"], 8
SMALL: dict[str, Any] = {"mode": "lightgcn", "hidden": WIDTH, "epochs": 2, "batch_size": 64, "threads": 1, "eval_k": [5]}


def triples() -> np.ndarray:
    draw = np.random.default_rng(0)
    return np.unique(
        np.stack([draw.integers(0, WORDS - 1, 120), draw.integers(0, 3, 120), draw.integers(0, WORDS, 120)], 1), axis=0
    )


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A knowledge graph of words, whose edges are labelled with relations."""
    folder = tmp_path_factory.mktemp("words")
    columns = {"src": [f"w{h:02}" for h, _, _ in triples()], "dst": [f"w{t:02}" for _, _, t in triples()]}
    columns["relation"] = [RELATIONS[r] for _, r, _ in triples()]
    pq.write_table(pa.table(columns), folder / "edges.parquet")
    ooc.ingest(folder / "words.ooc", edges=folder / "edges.parquet", edge_label="relation")
    return folder / "words.ooc"


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A store of users, who are words, and items, which are numbers; and a run of LightGCN on it."""
    folder, draw = tmp_path_factory.mktemp("shop"), np.random.default_rng(1)
    pair = np.unique(
        np.concatenate([draw.integers(0, (20, 15), (90, 2)), np.stack([np.arange(20), np.arange(20) % 15], 1)]), axis=0
    )
    table = pa.table({"src": [f"user-{u:02}" for u in pair[:, 0]], "dst": 1000 + pair[:, 1]})
    pq.write_table(table, folder / "edges.parquet")
    edges = {("user", "likes", "item"): folder / "edges.parquet"}
    ooc.ingest(folder / "shop.ooc", nodes={"user": None, "item": None}, edges=edges)
    ooc.train(store=folder / "shop.ooc", out=folder / "run", val=0.1, test=0.1, **SMALL)
    return folder / "shop.ooc", folder / "run"


@pytest.mark.parametrize("room", [2**22, 9000])
def test_answers_of_heads_and_relations_are_those_of_a_sort_of_all_scores(words: Path, room: int) -> None:
    torch.manual_seed(0)
    scorer = make_scorer("complex", WIDTH, 3, reciprocal=True)
    torch.nn.init.normal_(scorer.relation)
    rows = torch.randn(WORDS, WIDTH)
    with ooc.open(words) as ds:
        links = RelationLinks(ds, None, relations=True)
        trained = TrainedTable(ds, links, scorer, TableInOrder(ArrayRows(rows.numpy())))
        lists = AnswerLists(trained, 4, room)
        assert (len(list(lists._ranges())) > 1) == (room < 2**20)
        found = pa.concat_tables(answer_tables(trained, lists)).to_pylist()
        name = ds.external(np.arange(ds.num_nodes))
        known = {(int(h), int(r), int(t)) for part in links.pieces() for h, r, t in zip(*part, strict=True)}
        kinds = ds.edges().class_names
    wanted = []
    for head, relation in sorted({(h, r) for h, r, _ in known}):
        query = scorer.queries(rows[[head]], torch.tensor([relation]))
        score = scorer.score(query, rows).tolist()
        left = [t for t in range(len(name)) if t != head and (head, relation, t) not in known]
        best = sorted(left, key=lambda t: (-score[t], t))[:4]
        wanted += [(name[head], kinds[relation], name[t], place + 1) for place, t in enumerate(best)]
    assert [(row["source"], row["relation"], row["target"], row["rank"]) for row in found] == wanted


def test_ids_of_several_types_are_words(tmp_path: Path) -> None:
    """Whose relations are edge types."""
    pq.write_table(pa.table({"src": ["ann", "bob"], "dst": [7, 5]}), tmp_path / "likes.parquet")
    pq.write_table(pa.table({"src": [5, 9], "dst": [7, 5]}), tmp_path / "near.parquet")
    edges = {("user", "likes", "item"): tmp_path / "likes.parquet", ("item", "near", "item"): tmp_path / "near.parquet"}
    ooc.ingest(tmp_path / "shop.ooc", nodes={"user": None, "item": None}, edges=edges)
    with ooc.open(tmp_path / "shop.ooc") as ds:
        links = RelationLinks(ds, None, relations=True)
        trained = TrainedTable(ds, links, make_scorer("complex", 2, 2), TableInOrder(ArrayRows(np.ones((5, 2), np.float32))))
        every = np.concatenate([np.arange(5), [0]])
        users, items = ds.nodes("user").external(np.arange(2)), ds.nodes("item").external(np.arange(3))
        names = [*map(str, users), *map(str, items)] if links.first["user"] == 0 else [*map(str, items), *map(str, users)]
        assert trained.external(every, tails=True).to_pylist() == [*names, names[0]]
        assert sorted(trained.relation_names) == ["item:near:item", "user:likes:item"]


def test_a_hub_whose_links_do_not_fit_is_one_line(words: Path) -> None:
    with ooc.open(words) as ds:
        links = RelationLinks(ds, None, relations=True)
        table = TableInOrder(ArrayRows(np.zeros((WORDS, WIDTH), np.float32)))
        trained = TrainedTable(ds, links, make_scorer("complex", WIDTH, 3), table)
        with pytest.raises(BudgetError, match=r"the \d+ links and the lists of node 0 take .* more than 100 B"):
            list(AnswerLists(trained, 4, 100))


def test_infer_and_embed_write_the_users_own_ids(shop: tuple[Path, Path], tmp_path: Path) -> None:
    store, run = shop
    about = ooc.infer(run, store, tmp_path / "best.parquet", top=3)
    assert (about.rows, about.columns, about.of) == (20, 3, "queries")
    user, item = ooc.embed(run, store, node_type="user")[:], ooc.embed(run, store, node_type="item")[:]
    with ooc.open(store) as ds:
        edges = ds.edges(("user", "likes", "item"))
        target = np.repeat(np.arange(edges.graph.num_nodes), np.diff(edges.graph.indptr))
        score, there = user @ item.T, np.zeros((20, 15), bool)
        there[edges.graph.indices[:], target] = True
        users, items = ds.nodes("user").external(np.arange(20)), np.asarray(ds.nodes("item").external(np.arange(15)))
    score[there] = -np.inf
    best = np.argsort(-score, axis=1, kind="stable")[:, :3]
    found = pq.read_table(tmp_path / "best.parquet")
    assert found.column_names == ["source", "target", "rank", "score"]
    assert found["source"].to_pylist() == np.repeat(users, 3).tolist()
    assert found["target"].to_pylist() == items[best].flatten().tolist()
    np.testing.assert_allclose(found["score"], np.take_along_axis(score, best, 1).flatten(), rtol=1e-5)
    assert main(["embed", str(store), "--checkpoint", str(run), "--out", str(tmp_path / "e.zarr"), "--node-type", "item"]) == 0
    np.testing.assert_array_equal(zarr.open_group(tmp_path / "e.zarr", mode="r")["x"][:], item)
    assert main(["infer", str(store), "--checkpoint", str(run), "--out", str(tmp_path / "b.csv"), "--top", "2"]) == 0
    assert (tmp_path / "b.csv").read_text().count("\n") == 41


@pytest.mark.cases(1)
@pytest.mark.parametrize("buckets", [1, 4])
def test_answers_of_a_run_in_buckets_are_those_of_its_rows(words: Path, tmp_path: Path, buckets: int) -> None:
    settings: dict[str, Any] = {
        "mode": "table",
        "model": "rotate",
        "hidden": WIDTH,
        "epochs": 2,
        "threads": 1,
        "buckets": buckets,
    }
    ooc.train(store=words, out=tmp_path / "run", val=0.1, test=0.1, **settings)
    rows = torch.from_numpy(ooc.embed(tmp_path / "run", words)[:])
    ooc.embed(tmp_path / "run", words, tmp_path / "e.zarr")
    group = zarr.open_group(tmp_path / "e.zarr", mode="r")
    np.testing.assert_array_equal(group["x"][:], rows.numpy())
    kept = torch.load(tmp_path / "run" / "model.pt", weights_only=True)["model"]["relation"]
    np.testing.assert_array_equal(group["relation"][:], kept.numpy())
    with ooc.open(words) as ds:
        names = ds.edges().class_names
    assert group["relation"].attrs.asdict() == {"reciprocal": False, "names": names}
    assert [path.name for path in tmp_path.glob("e.zarr*")] == ["e.zarr"]
    ooc.infer(tmp_path / "run", words, tmp_path / "best.parquet", top=2)
    scorer = make_scorer("rotate", WIDTH, 3)
    scorer.load_state_dict(torch.load(tmp_path / "run" / "model.pt")["model"])
    with ooc.open(words) as ds:
        name, kinds = ds.external(np.arange(ds.num_nodes)), ds.edges().class_names
        known = {
            (h, r, t) for h, r, t in zip(*(each.tolist() for each in next(RelationLinks(ds, None, True).pieces())), strict=True)
        }
    found = pq.read_table(tmp_path / "best.parquet").to_pylist()
    assert len(found) == 2 * len({(h, r) for h, r, _ in known})
    for row in found[::7]:
        head, relation = name.index(row["source"]), kinds.index(row["relation"])
        score = scorer.score_all(scorer.queries(rows[[head]], torch.tensor([relation])), rows)[0].tolist()
        left = [t for t in range(len(name)) if t != head and (head, relation, t) not in known]
        assert row["target"] == name[sorted(left, key=lambda t: (-score[t], t))[row["rank"] - 1]]
        assert row["score"] == pytest.approx(max(sorted((score[t] for t in left), reverse=True)[row["rank"] - 1 :]), abs=1e-5)
    nearest = ooc.neighbors(tmp_path / "run", words, [name[0]], 3, by="dot")
    score = rows @ rows[0]
    score[0] = -torch.inf
    assert nearest.item[0].tolist() == score.topk(3).indices.tolist()


def test_neighbors_are_of_the_same_type(shop: tuple[Path, Path]) -> None:
    store, run = shop
    rows = ooc.embed(run, store, node_type="user")[:]
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    score = unit @ unit.T
    np.fill_diagonal(score, -np.inf)
    found = ooc.neighbors(run, store, ["user-03", "user-00"], 4, node_type="user")
    assert found.source.tolist() == [3, 0]
    np.testing.assert_array_equal(found.item, np.argsort(-score[[3, 0]], axis=1)[:, :4])


def test_what_does_not_apply_is_one_line(
    shop: tuple[Path, Path], words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, run = shop
    with pytest.raises(ConfigError, match=r"give `out`, the file to write and `top`, the number of answers of each$"):
        ooc.infer(run, store)
    with pytest.raises(ConfigError, match=r"answers queries: give `top`, the number of answers of each$"):
        ooc.infer(run, store, tmp_path / "best.parquet")
    with pytest.raises(ConfigError, match=r"has rows and no layers: leave `layer` out$"):
        ooc.embed(run, store, layer=1)
    with pytest.raises(ConfigError, match=r"has rows and no layers: leave `layer` and `num_layers` out$"):
        ooc.embed(run, store, layer=1, num_layers=2)
    with pytest.raises(ConfigError, match=r"^the run has rows of .*: choose one, as in `node_type='user'`"):
        ooc.embed(run, store)
    with pytest.raises(ConfigError, match=r"^node_type = 'shop' is invalid: the run has rows of .*: choose one"):
        ooc.embed(run, store, node_type="shop")
    with pytest.raises(ConfigError, match="node_type applies to outputs of nodes"):
        ooc.infer(run, store, tmp_path / "best.parquet", top=3, node_type="user")
    with pytest.raises(ConfigError, match=r"was trained on another store, or on .*words\.ooc before it grew: give that store"):
        ooc.infer(run, words, tmp_path / "best.parquet", top=3)
    with pytest.raises(ConfigError, match="top must be a whole number of 1 or more, not 0"):
        ooc.infer(run, store, tmp_path / "best.parquet", top=0)
    with pytest.raises(BudgetError, match="10 MB of memory leaves nothing"):
        ooc.neighbors(run, store, [0], node_type="user", memory="10MB")
    with pytest.raises(BudgetError, match="2 nodes and 1000000000 neighbors of each take 48 GB"):
        ooc.neighbors(run, store, [0, 1], 10**9, node_type="user", memory="2GB")
    with pytest.raises(ConfigError, match="is no run that has a table: modes lightgcn and table"):
        ooc.neighbors(tmp_path, store, [0])
    with pytest.raises(ConfigError, match=r"there is no run in .*none: check the path"):
        ooc.infer(tmp_path / "none", store, tmp_path / "best.parquet", top=3)
    with pytest.raises(ConfigError, match="has a table, and `ooc infer` lists its best answers: give it `top`"):
        ooc.rank(run, store, tmp_path / "best.parquet", k=3)
    capsys.readouterr()
    for verb, out, given, said in (
        ("infer", "b.csv", [], "answers queries: give --top, the number of answers of each\n"),
        ("embed", "e.zarr", ["--layer", "2"], "has rows and no layers: leave --layer out\n"),
    ):
        assert main([verb, str(store), "--checkpoint", str(run), "--out", str(tmp_path / out), *given]) == 2
        assert capsys.readouterr().err.endswith(said)
    (tmp_path / "best.parquet").touch()
    with pytest.raises(StoreError, match="exists"):
        ooc.infer(run, store, tmp_path / "best.parquet", top=3)
