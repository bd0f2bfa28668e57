"""Shards of an ingest, put together, are one ingest's store, byte for byte; what is no set of shards is refused."""

import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError, InputError, OocError, StoreError
from ooc.stores.ingest import IngestSpec, ingest, join, spec_of
from ooc.stores.ingest.shards import Shard
from ooc.stores.integrity import verify
from ooc.stores.io.atomic import partial_path
from tests.scale import some_calls
from tools.bench.lib.killed_syscall import run_until

FEW = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)


def tree(path: Path) -> dict[str, bytes]:
    return {str(each.relative_to(path)): each.read_bytes() for each in sorted(path.rglob("*")) if each.is_file()}


def table(path: Path, **columns: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=7)
    return str(path)


def build(folder: Path, count: int, fields: dict[str, Any]) -> list[Path]:
    """Build all shards, the last one first; where they are."""
    paths = [folder / f"shard-{index}" for index in range(1, count + 1)]
    for index, path in reversed(list(enumerate(paths, 1))):
        result = ingest(spec_of({"out": path, "shard": f"{index}/{count}", **fields}))
        assert result.shard == f"{index}/{count}"
    return paths


def same_as_one_ingest(folder: Path, count: int, **fields: Any) -> Path:
    """The store of one ingest, after a look whether `count` shards together are the same."""
    want, got = folder / "want.ooc", folder / "got.ooc"
    result = ingest(spec_of({"out": want, **fields}))
    joined = join(got, build(folder, count, fields))
    assert (joined.num_nodes, joined.num_edges) == (result.num_nodes, result.num_edges)
    assert tree(got) == tree(want)
    assert verify(got) == []
    return want


@given(total=st.integers(0, 200), count=st.integers(1, 50))
def test_ranges_are_disjoint_cover_all_and_are_equally_long(total: int, count: int) -> None:
    ranges = [Shard(index, count).range(total) for index in range(1, count + 1)]
    assert [i for part in ranges for i in part] == list(range(total))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


@FEW
@given(
    seed=st.integers(0, 2**31),
    count=st.integers(1, 6),
    edges=st.integers(1, 80),
    words=st.booleans(),
    undirected=st.booleans(),
    drop_duplicates=st.booleans(),
    drop_self_loops=st.booleans(),
    weight=st.booleans(),
    dtype=st.sampled_from(["auto", "float16", "int8"]),
)
def test_shards_are_one_ingest(tmp_path, seed, count, edges, words, weight, dtype, **options):  # type: ignore[no-untyped-def]
    folder, rng = tmp_path / f"{len(list(tmp_path.iterdir()))}", np.random.default_rng(seed)
    ids = np.array([f"n{i}" for i in rng.permutation(12)]) if words else np.arange(12)
    src, dst = ids[rng.integers(0, 12, (2, edges))]
    src[0], dst[0] = ids[:2]  # one edge at least is no loop
    for i, part in enumerate(np.array_split(np.arange(edges), 2)):
        columns = {"w": rng.random(len(part)), "f": rng.random(len(part)), "k": rng.integers(0, 3, len(part))}
        table(folder / f"e{i}.parquet", src=src[part], dst=dst[part], **columns)
    nodes = table(folder / "nodes.parquet", id=ids, y=rng.integers(0, 3, 12), f1=rng.random(12), f2=rng.random(12))
    given: dict[str, Any] = {"edges": f"{folder}/e*.parquet", "nodes": nodes, "label": "y", "x_cols": "f*"}
    given |= {"random_split": "0.5,0.3,0.2", "edge_features": ["m=f"], "edge_label": "k", "dtype": dtype}
    same_as_one_ingest(folder, count, **given, **({"weight": "w"} if weight else {}), **options)


@pytest.mark.cases(1)
@pytest.mark.parametrize("count", [1, 3, 20])
def test_ids_that_only_the_edges_give_are_numbered_alike(tmp_path: Path, count: int) -> None:
    rng = np.random.default_rng(0)
    src, dst = rng.integers(0, 10**12, 11)[rng.integers(0, 11, (2, 60))]
    store = same_as_one_ingest(tmp_path, count, edges=table(tmp_path / "e.parquet", src=src, dst=dst))
    with Dataset.open(store) as ds:
        assert ds.row(int(src[0])) == np.unique([src, dst]).tolist().index(int(src[0]))


@pytest.mark.cases(1)
@pytest.mark.parametrize("words", [False, True])
def test_events_in_order_of_time_are_sharded(tmp_path: Path, words: bool) -> None:
    rng = np.random.default_rng(0)
    ids = np.array([f"n{i}" for i in range(12)]) if words else np.arange(12)
    src, dst = ids[rng.integers(0, 12, (2, 60))]
    nodes = table(tmp_path / "n.parquet", id=ids, born=np.arange(12))
    events = table(tmp_path / "e.parquet", src=src, dst=dst, t=np.sort(rng.integers(0, 20, 60)), m=rng.random(60))
    fields = {"edges": events, "nodes": nodes, "time": "t", "birth": "born", "edge_features": ["msg=m"]}
    same_as_one_ingest(tmp_path, 4, **fields, undirected=True)
    late = table(tmp_path / "late.parquet", src=src, dst=dst, t=np.arange(60)[::-1])
    with pytest.raises(InputError, match="times decrease, so events are numbered by the whole input"):
        ingest(spec_of({"out": tmp_path / "no", "edges": late, "nodes": nodes, "time": "t", "shard": "1/2"}))


@pytest.mark.cases(1)
@pytest.mark.parametrize("both_ways", ["reverse", "undirected"])
def test_stores_of_several_types_are_sharded(tmp_path: Path, both_ways: str) -> None:
    rng = np.random.default_rng(0)
    people = np.array([f"p{i}" for i in range(7)])
    writes = table(
        tmp_path / "w.parquet", src=people[rng.integers(0, 7, 40)], dst=rng.integers(0, 10, 40), t=rng.integers(0, 9, 40)
    )
    cites = table(
        tmp_path / "c.parquet", src=rng.integers(0, 10, 50), dst=rng.integers(0, 10, 50), w=rng.random(50), f=rng.random(50)
    )
    papers = table(tmp_path / "n.parquet", id=np.arange(10), f=rng.random(10), y=np.arange(10) % 3)
    fields: dict[str, Any] = {
        "edges": {"author:writes:paper": writes, "paper:cites:paper": cites},
        "nodes": {"paper": papers, "author": None},
        "time": {"author:writes:paper": "t"},
        "weight": {"paper:cites:paper": "w"},
        "edge_features": {"paper:cites:paper": ["edge_attr=f"]},
        "label": {"paper": "y"},
        "x_cols": {"paper": "f"},
        "random_split": {"paper": "0.5,0.2,0.3"},
        both_ways: True,
    }
    same_as_one_ingest(tmp_path, 3, **fields)


def test_sorted_edges_are_sharded(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    edges = table(tmp_path / "e.parquet", src=rng.integers(0, 30, 200), dst=np.sort(rng.integers(0, 30, 200)))
    want = same_as_one_ingest(tmp_path, 3, edges=edges, num_nodes=30, sorted=True)
    ingest(IngestSpec(out=tmp_path / "plain.ooc", edges=edges, num_nodes=30))
    assert tree(tmp_path / "plain.ooc") == tree(want)


def test_folders_of_the_input_do_not_count(tmp_path: Path) -> None:
    paths = [tmp_path / name / "e.npy" for name in ("one", "other")]
    for path in paths:
        path.parent.mkdir()
        np.save(path, np.random.default_rng(0).integers(0, 9, (2, 30)))
    shards = [tmp_path / f"shard-{index}" for index in (1, 2)]
    for index, (path, out) in enumerate(zip(paths, shards, strict=True), 1):
        ingest(IngestSpec(out=out, edges=str(path), num_nodes=9, shard=f"{index}/2", memory=f"{index}GB"))
    assert join(tmp_path / "s.ooc", shards).num_edges == 30


@pytest.fixture
def edges(tmp_path: Path) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    np.save(tmp_path / "x.npy", rng.random((9, 3)))
    path = table(tmp_path / "e.parquet", src=rng.integers(0, 9, 30), dst=rng.integers(0, 9, 30))
    return {"edges": path, "num_nodes": 9, "features": [f"x={tmp_path}/x.npy"]}


def refused(out: Path, shards: list[Path], kind: type[OocError], words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        join(out, shards)
    assert "\n" not in str(caught.value)
    assert not out.exists()
    assert not partial_path(out).exists()


def test_what_is_no_set_of_shards_is_refused(tmp_path: Path, edges: dict[str, Any]) -> None:
    out, (one, two, three) = tmp_path / "s.ooc", build(tmp_path, 3, edges)
    refused(out, [one, three], InputError, "shard 2/3 is missing: give all 3, or build it by `shard='2/3'`")
    refused(out, [two], InputError, "shard 1/3 and 1 more are missing")
    refused(out, [one, two, three, two], InputError, "shard-2 and .*shard-2 are both shard 2: give each once")
    refused(out, [], InputError, "there is no shard to join")
    refused(
        out, [one, tmp_path / "gone"], InputError, "gone is no shard .No such file or directory.: `ooc ingest` with `shard`"
    )
    ingest(IngestSpec(out=tmp_path / "store.ooc", **edges))
    refused(out, [one, tmp_path / "store.ooc"], InputError, "store.ooc is no shard .its zarr.json does not say so")
    ingest(IngestSpec(out=tmp_path / "half", shard="2/2", **edges))
    refused(out, [one, tmp_path / "half"], InputError, "half is one of 2 shards, .*shard-1 one of 3")
    ingest(IngestSpec(out=tmp_path / "other", shard="2/3", **edges, undirected=True))
    refused(out, [one, tmp_path / "other", three], InputError, "other is not of the same store as .*shard-1: .* settings or")
    (tmp_path / "s.ooc").mkdir()
    with pytest.raises(StoreError, match="exists already"):
        join(out, [one, two, three])


def test_a_shard_is_no_store(tmp_path: Path, edges: dict[str, Any]) -> None:
    (shard,) = build(tmp_path, 1, edges)
    with pytest.raises(StoreError, match="shard-1 is a shard of a store: put all of them together with `ooc join"):
        Dataset.open(shard)


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(bytes(content))


def test_a_damaged_shard_is_named(tmp_path: Path, edges: dict[str, Any]) -> None:
    shards, out = build(tmp_path, 2, edges), tmp_path / "s.ooc"
    damage(shards[1] / "node/node/x/c/0/0")
    refused(out, shards, StoreError, "shard-2/node/node/x")
    shutil.rmtree(shards[1] / "node")
    refused(out, shards, StoreError, "shard-2 has other arrays than .*shard-1: build it again")


def test_damaged_or_missing_ids_are_named(tmp_path: Path) -> None:
    shards = build(tmp_path, 2, {"edges": table(tmp_path / "e.parquet", src=["a", "b"], dst=["b", "c"])})
    ids = shards[0] / "ids.lmdb/data.mdb"
    assert not (shards[1] / "ids.lmdb").exists()
    damage(ids)
    refused(tmp_path / "s.ooc", shards, StoreError, "data.mdb is damaged: .*build shard 1 again")
    ids.unlink()
    refused(tmp_path / "s.ooc", shards, StoreError, "data.mdb is missing: build shard 1 again")


@pytest.mark.parametrize("shard", ["0/4", "5/4", "1", "a/b", "1/0", "-1/4", "1/4/2", ""])
def test_what_is_no_shard_is_refused(tmp_path: Path, shard: str) -> None:
    with pytest.raises(ConfigError, match=r"write it i/n, i from 1 to n, as in 2/8 for the second of eight"):
        IngestSpec(out=tmp_path / "s", edges="e.npy", shard=shard)


@pytest.mark.parametrize(
    "more",
    [
        {"parts": 4},
        {"order": "degree"},
        {"normalize": "standard"},
        {"nodes": "n.parquet", "graph_id": "g"},
    ],
)
def test_what_needs_the_whole_graph_does_not_go_with_shards(tmp_path: Path, more: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="`shard`"):
        IngestSpec(out=tmp_path / "s", edges="e.npy", shard="1/2", **more)


def killed(run: Callable[[], Any], log: Path, nth: int | None = None) -> tuple[int, list[str]]:
    return run_until(lambda: run() and 0, log, nth)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["shard", "join"])
def test_killed_at_any_call_it_leaves_nothing_and_the_same_call_completes_it(quick_path: Path, what: str) -> None:
    rng = np.random.default_rng(4)
    names = np.array([f"n{i}" for i in range(8)])
    nodes = table(quick_path / "n.parquet", id=names, f=rng.random(8), y=np.arange(8) % 2)
    events = table(
        quick_path / "e.parquet", **{name: names[rng.integers(0, 8, 20)] for name in ("src", "dst")}, t=np.arange(20)
    )
    fields = {"edges": events, "nodes": nodes, "time": "t", "x_cols": "f", "label": "y"}
    shards = build(quick_path, 2, fields)
    out = quick_path / "s.ooc" if what == "join" else shards[0]
    spec = spec_of({"out": out, "shard": "1/2", **fields})
    run: Callable[[], Any] = (lambda: join(out, shards)) if what == "join" else lambda: ingest(spec)
    shutil.rmtree(out, ignore_errors=True)
    code, calls = killed(run, quick_path / "log")
    assert code == 0
    want = tree(out)
    for k in some_calls(len(calls)):
        shutil.rmtree(out)
        assert (
            killed(run, quick_path / "log", k)[0] < 0 or k > len(calls) // 2
        )  # DuckDB's threads make a few calls more or less
        if out.exists():
            with pytest.raises(StoreError, match="exists already"):
                run()
        else:
            run()
        assert tree(out) == want, f"after a kill at call {k} of {len(calls)}"
        assert not partial_path(out).exists()


def test_an_interrupted_join_goes_on(tmp_path: Path, edges: dict[str, Any]) -> None:
    shards, out = build(tmp_path, 2, edges), tmp_path / "s.ooc"

    def press(step: str, *_: object) -> None:
        if step == "join graph/indptr":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        join(out, shards, press)
    assert not out.exists()
    assert join(out, shards).resumed == ("graph/edge_id", "graph/indices")


def test_a_join_interrupted_behind_its_last_step_says_that_the_store_is_there(
    tmp_path: Path, edges: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ooc.cli.main import main

    module = import_module("ooc.stores.ingest.join")
    shards, out, whole = build(tmp_path, 2, edges), tmp_path / "s.ooc", module.finish_store

    def finish(*given: Any) -> None:
        whole(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "finish_store", finish)
    assert main(["join", str(out), *map(str, shards)]) == 130
    assert f"interrupted: {out} was built by then" in capsys.readouterr().err
    assert not partial_path(out).exists()


def test_on_the_command_line(tmp_path: Path, edges: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    from ooc.cli.main import main

    words = ["--edges", edges["edges"], "--num-nodes", "9"]
    shards = [str(tmp_path / f"shard-{index}") for index in (1, 2)]
    for index, shard in enumerate(shards, 1):
        assert main(["ingest", shard, *words, "--shard", f"{index}/2"]) == 0
    assert "shard-2: shard 2/2 of 9 nodes, " in capsys.readouterr().out
    assert main(["join", str(tmp_path / "s.ooc"), *shards]) == 0
    assert "s.ooc: 9 nodes, 30 edges in " in capsys.readouterr().out
    assert main(["join", str(tmp_path / "t.ooc"), shards[0]]) == 2
    assert "shard 2/2 is missing: give all 2, or build it by --shard 2/2" in capsys.readouterr().err
