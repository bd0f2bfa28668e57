"""`ooc rank`: the lists against a sort of all scores, in the user's own ids."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch

import ooc
from ooc.cli.main import main
from ooc.graph.hetero import EdgeKey
from ooc.layerwise import full_neighbor_pass, top_k
from ooc.models.edge_decoders import make_decoder
from ooc.stores.build import write_hetero_store
from ooc.stores.errors import ConfigError, InputError, StoreError
from ooc.stores.graph import Graph
from ooc.training import rank as module
from ooc.training.watchers import StepBars
from tests.conftest import MakeStore

USERS, ITEMS, K = 23, 17, 4
LIKES: EdgeKey = ("user", "likes", "item")
LIKED: EdgeKey = ("item", "liked_by", "user")
NAMES, NUMBERS = [f"u{i}" for i in range(USERS)][::-1], np.arange(ITEMS) * 10 + 7
SMALL: dict[str, Any] = {"task": "link", "hidden": 8, "fanout": [4], "batch_size": 16, "plan": False, "epochs": 1, "threads": 1}


def likes() -> np.ndarray:
    """User 0 likes all items but one, user 1 none."""
    rng = np.random.default_rng(0)
    some = np.stack([rng.integers(2, USERS, 60), rng.integers(0, ITEMS, 60)])
    return np.concatenate([some, [np.zeros(ITEMS - 1, np.int64), np.arange(1, ITEMS)]], axis=1)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A store, and a run of links between users, which have an embedding table, and items."""
    folder = tmp_path_factory.mktemp("rank")
    ends, x = likes(), np.random.default_rng(1).standard_normal((ITEMS, 3)).astype(np.float32)
    graphs = {
        LIKES: Graph.from_edges(*ends, num_nodes=ITEMS, num_sources=USERS),
        LIKED: Graph.from_edges(*ends[::-1], num_nodes=USERS, num_sources=ITEMS),
    }
    nodes: dict[str, Any] = {"user": {"external": NAMES}, "item": {"x": x, "external": NUMBERS}}
    store = write_hetero_store(folder / "shop.ooc", nodes, graphs, reverse_of={LIKED: LIKES})
    ooc.train(store=store, out=folder / "run", model="rsage", **SMALL)
    return store, folder / "run"


@pytest.fixture
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_k, "SOURCES", 4)
    monkeypatch.setattr(top_k, "ITEMS", 5)
    monkeypatch.setattr(top_k, "_EDGES_AT_ONCE", 9)
    monkeypatch.setattr(top_k, "_LINK_BYTES", 0)
    monkeypatch.setattr(top_k, "_room", lambda *_: 8 * (12 * K + 8 * SMALL["hidden"]))
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 7)


def expected(scores: np.ndarray, known: set[tuple[int, int]], k: int) -> list[tuple[int, int, int]]:
    """(source, item, rank), by descending score."""
    found = []
    for u, row in enumerate(scores):
        allowed = [v for v in np.argsort(-row, kind="stable").tolist() if (u, v) not in known]
        found += [(u, v, place + 1) for place, v in enumerate(allowed[:k])]
    return found


@pytest.mark.cases(1)
@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize("ending", ["parquet", "csv"])
def test_lists_between_two_types_are_those_of_a_sort(shop: tuple[Path, Path], tmp_path: Path, ending: str) -> None:
    store, run = shop
    out = tmp_path / f"best.{ending}"
    written = ooc.rank(run, store, out, k=K)
    assert (written.rows, written.columns, written.of) == (USERS, K, "sources")
    table = pq.read_table(out) if ending == "parquet" else pyarrow.csv.read_csv(out)
    user, item = (np.asarray(ooc.infer(run, store, node_type=name)) for name in ("user", "item"))
    assert (user.shape, item.shape) == ((USERS, 8), (ITEMS, 8))
    wanted = expected(user @ item.T, set(zip(*likes().tolist(), strict=True)), K)
    assert len(wanted) == (USERS - 1) * K + 1
    columns = [table[name].to_pylist() for name in ("source", "target", "rank")]
    assert list(zip(*columns, strict=True)) == [(NAMES[u], int(NUMBERS[v]), place) for u, v, place in wanted]
    scores = [float(user[u] @ item[v]) for u, v, _ in wanted]
    np.testing.assert_allclose(table["score"].to_numpy(), scores, rtol=1e-5, atol=1e-6)
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


@pytest.mark.usefixtures("_small_blocks")
def test_sources_are_chosen_as_input_nodes_are(shop: tuple[Path, Path], tmp_path: Path) -> None:
    store, run = shop
    ooc.rank(run, store, tmp_path / "all.parquet", k=K)
    every = pq.read_table(tmp_path / "all.parquet").to_pylist()
    some = [5, 1, 0, 20]
    for number, given in enumerate((some, np.isin(np.arange(USERS), some), [NAMES[u] for u in some])):
        written = ooc.rank(run, store, tmp_path / f"{number}.parquet", k=K, sources=given)
        order = sorted(some) if number == 1 else some
        wanted = [row for u in order for row in every if row["source"] == NAMES[u]]
        assert written.rows == len(some)
        assert pq.read_table(tmp_path / f"{number}.parquet").to_pylist() == wanted
    assert ooc.rank(run, store, tmp_path / "none.csv", sources=[]).rows == 0
    assert (tmp_path / "none.csv").read_text().strip() == '"source","target","rank","score"'
    for wrong, error, words in (
        ("train", InputError, "no split 'train'"),
        ([USERS], InputError, f"{USERS}.* is (not a node|out of range)"),
    ):
        with pytest.raises(error, match=words):
            ooc.rank(run, store, tmp_path / "wrong.csv", sources=wrong)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "0.parquet",
        "1.parquet",
        "2.parquet",
        "all.parquet",
        "none.csv",
    ]


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize("decoder", ["dot", pytest.param("mlp", marks=pytest.mark.slow)])
def test_lists_in_one_type(make_store: MakeStore, tmp_path: Path, decoder: str) -> None:
    rng = np.random.default_rng(2)
    src, dst = rng.integers(0, 30, (2, 90))
    x = rng.standard_normal((30, 3)).astype(np.float32)
    store, run = make_store(num_nodes=30, src=src, dst=dst, x=x, y=None, task=None, num_classes=None), tmp_path / "run"
    ooc.train(store=store, out=run, decoder=decoder, **SMALL)
    with ooc.open(store) as ds:
        ooc.rank(run, ds, tmp_path / "best.parquet", k=K)
        rows = torch.from_numpy(np.asarray(ooc.infer(run, ds)))
    table = pq.read_table(tmp_path / "best.parquet")
    known = set(zip(src.tolist(), dst.tolist(), strict=True)) | {(u, u) for u in range(30)}
    score, saved = make_decoder(decoder, 8), torch.load(run / "model.pt", weights_only=True)["model"]
    score.load_state_dict({name[13:]: each for name, each in saved.items() if name.startswith("link_decoder.")})
    with torch.no_grad():
        wanted = expected(score(rows[:, None], rows[None]).numpy(), known, K)
    found = zip(*(table[name].to_pylist() for name in ("source", "target", "rank")), strict=True)
    assert list(found) == wanted


@pytest.mark.slow
def test_an_interrupted_ranking_goes_on(shop: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, run = shop
    monkeypatch.setattr(full_neighbor_pass, "SEEDS", 1)
    ooc.rank(run, store, tmp_path / "whole.parquet", k=K)

    def full(*_: Any) -> None:
        raise StoreError("the disk is full")

    with monkeypatch.context() as broken:
        broken.setattr(module, "write_tables", full)
        with pytest.raises(StoreError, match="the disk is full"):
            ooc.rank(run, store, tmp_path / "cut.parquet", k=K)
    done = []
    ooc.rank(run, store, tmp_path / "cut.parquet", k=K, progress=lambda what, at, total: done.append(what))
    assert set(done) == {"ranking"}
    assert pq.read_table(tmp_path / "cut.parquet").equals(pq.read_table(tmp_path / "whole.parquet"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut.parquet", "whole.parquet"]
    ooc.rank(run, store, tmp_path / "all.csv", k=10**12)
    known = len(set(zip(*likes().tolist(), strict=True)))
    assert len((tmp_path / "all.csv").read_text().splitlines()) == 1 + USERS * ITEMS - known
    with pytest.raises(StoreError, match="exists already"):
        ooc.rank(run, store, tmp_path / "cut.parquet", k=K)


def test_the_command_ranks(
    shop: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    units: dict[str, str] = {}
    monkeypatch.setattr(StepBars, "__call__", lambda bars, what, done, total, unit="rows": units.update({what: unit}))
    store, run = map(str, shop)
    out = f"{tmp_path}/best.csv"
    assert main(["rank", store, "--checkpoint", run, "--out", out, "--k", "3"]) == 0
    assert f"{out}: the best 3 of {USERS} sources; " in capsys.readouterr().out
    assert units == {"full neighborhoods": "nodes", "ranking": "sources"}
    assert len(Path(out).read_text().splitlines()) == 1 + 3 * (USERS - 1) + 1
    for words, message in (
        ([store, "--checkpoint", run, "--out", f"{tmp_path}/best.txt"], "a table is written as Parquet or CSV"),
        ([store, "--checkpoint", run, "--out", f"{tmp_path}/b.csv", "--k", "0"], "k must be a whole number of 1 or more"),
        ([store, "--checkpoint", run, "--out", f"{tmp_path}/b.csv", "--sources", "dev"], "no split 'dev'"),
        ([store, "--checkpoint", f"{tmp_path}/none", "--out", f"{tmp_path}/b.csv"], "there is no run in "),
    ):
        assert main(["rank", *words]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert main(["infer", store, "--checkpoint", run, "--out", f"{tmp_path}/e.parquet"]) == 2
    assert "has embeddings of user and item: choose one, as in --node-type user" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["best.csv"]


def test_other_runs_are_refused(make_store: MakeStore, tmp_path: Path) -> None:
    store = make_store(num_nodes=30, num_edges=60)
    ooc.train(store=store, out=tmp_path / "run", **{**SMALL, "task": "node"})
    with pytest.raises(ConfigError, match=r"was trained with task = 'node': only runs of links"):
        ooc.rank(tmp_path / "run", store, tmp_path / "best.parquet")
    with pytest.raises(ConfigError, match="node_type applies to heterogeneous stores"):
        ooc.infer(tmp_path / "run", store, node_type="item")
    assert not (tmp_path / "best.parquet").exists()
