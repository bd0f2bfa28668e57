"""`--parts`: the store that one would get by numbering the nodes oneself."""

import signal
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from ooc.cli.main import main
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError
from ooc.stores.ingest import IngestSpec, ingest, partition, renumber
from ooc.stores.integrity import verify
from tests.forked import python
from tests.scale import few
from tests.stores.ingest.test_partition import communities
from tests.stores.ingest.test_resume import tree

N, PARTS = 600, 6


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A node table and an edge table with text ids, self-loops, duplicates, isolated nodes and weights."""
    folder, rng = tmp_path_factory.mktemp("inputs"), np.random.default_rng(3)
    src, dst = communities(N - 10, 59, 10, 0.9)
    src, dst = np.concatenate([src, src[:50], [5, 5, 9]]), np.concatenate([dst, dst[:50], [5, 5, 9]])
    ids = np.array([f"n{i}" for i in rng.permutation(N)])
    edges = {"src": ids[src], "dst": ids[dst], "w": rng.random(len(src)).astype(np.float32)}
    split = np.array(["train", "val", "test", ""])[rng.integers(0, 4, N)]
    nodes = {"id": ids, "y": rng.integers(-1, 4, N), "split": split, **{f"f{i}": rng.standard_normal(N) for i in range(5)}}
    pq.write_table(pa.table(edges), folder / "edges.parquet")
    return {"folder": folder, "nodes": nodes, "edges": str(folder / "edges.parquet"), "src": src, "dst": dst}


def table_of(inputs: dict[str, Any], name: str, order: np.ndarray) -> str:
    path = inputs["folder"] / f"{name}.parquet"
    pq.write_table(pa.table({key: column[order] for key, column in inputs["nodes"].items()}), path)
    return str(path)


def spec_of(inputs: dict[str, Any], out: Path, nodes: str, **more: Any) -> IngestSpec:
    settings = {"edges": inputs["edges"], "weight": "w", "nodes": nodes, "label": "y", "split": "split", "x_cols": "f*"}
    return IngestSpec(out=out, **{**settings, **more})


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "more",
    [{}, {"undirected": True, "drop_duplicates": True, "drop_self_loops": True}, {"dtype": "int8"}, {"normalize": "row"}],
    ids=str,
)
@pytest.mark.parametrize("method", ["metis", "stream"])
def test_it_is_the_store_of_nodes_listed_in_that_order(
    inputs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, more: dict[str, Any]
) -> None:
    monkeypatch.setattr(renumber, "ARRANGE_SHARE", 2 * 10**6)  # so that arrays take several files
    given = table_of(inputs, "given", np.arange(N))
    made = ingest(spec_of(inputs, tmp_path / "parts.ooc", given, parts=PARTS, partitioner=method, **more))
    assert made.partition is not None
    assert (made.partition.parts, made.partition.method) == (PARTS, method)
    assert made.partition.cut < 0.5
    assert verify(made.path) == []
    with Dataset.open(made.path) as ds:
        external = np.array(ds.external(np.arange(N)))
        assert ds.graph.parts is not None
        old = np.argsort(inputs["nodes"]["id"])[np.searchsorted(np.sort(inputs["nodes"]["id"]), external)]
        for first, last in zip(ds.graph.parts[:-1], ds.graph.parts[1:], strict=True):
            assert (np.diff(old[first:last]) > 0).all()  # in a part, nodes keep their order
        assert [ds.row(name) for name in external[:5]] == [0, 1, 2, 3, 4]
    byhand = ingest(spec_of(inputs, tmp_path / "hand.ooc", table_of(inputs, f"hand-{method}", old), **more))
    found, want = tree(made.path), tree(byhand.path)
    extra = {key for key in found if key.startswith(("graph/parts/", "checksums/graph/parts/"))}
    assert set(found) - set(want) == extra
    assert [key for key in want if found[key] != want[key]] == ["zarr.json"]  # the manifest tells of the parts


@pytest.mark.cases(1)
@pytest.mark.parametrize("more", [{}, {"undirected": True}, {"parts": PARTS, "partitioner": "stream"}], ids=str)
def test_hubs_first_is_the_store_of_nodes_listed_in_that_order(
    inputs: dict[str, Any], tmp_path: Path, more: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    given = table_of(inputs, "given", np.arange(N))
    made = ingest(spec_of(inputs, tmp_path / "order.ooc", given, order="degree", **more))
    assert verify(made.path) == []
    degree = np.bincount(inputs["src"], minlength=N)
    if "undirected" in more:
        degree += np.bincount(inputs["dst"], minlength=N)
    with Dataset.open(made.path) as ds:
        external = np.array(ds.external(np.arange(N)))
        old = np.argsort(inputs["nodes"]["id"])[np.searchsorted(np.sort(inputs["nodes"]["id"]), external)]
        bounds = [0, N] if ds.graph.parts is None else ds.graph.parts.tolist()
        assert len(bounds) == 1 + more.get("parts", 1)
        for first, last in pairwise(bounds):
            mine = old[first:last]
            assert mine.tolist() == sorted(mine.tolist(), key=lambda v: (-degree[v], v))
    plain = {key: value for key, value in more.items() if key == "undirected"}
    byhand = ingest(spec_of(inputs, tmp_path / "hand.ooc", table_of(inputs, f"hand-{len(more)}", old), **plain))
    found, want = tree(made.path), tree(byhand.path)
    assert all(key.startswith(("graph/parts/", "checksums/graph/parts/")) for key in set(found) - set(want))
    assert [key for key in want if found[key] != want[key]] == ["zarr.json"]
    assert main(["info", str(made.path)]) == 0
    assert "order        by degree" in capsys.readouterr().out


def test_rows_that_were_ids_become_external_ids(inputs: dict[str, Any], tmp_path: Path) -> None:
    src, dst = inputs["src"], inputs["dst"]
    rng = np.random.default_rng(0)
    x, mask = rng.random((N, 3), np.float32), rng.random(N) < 0.3
    y, other = rng.integers(0, 3, N), rng.random(N) < 0.3
    for name, array in {"edges": np.stack([src, dst]), "x": x, "y": y, "train": mask, "test": other}.items():
        np.save(tmp_path / f"{name}.npy", array)
    made = ingest(
        IngestSpec(
            out=tmp_path / "s.ooc",
            edges=str(tmp_path / "edges.npy"),
            features=[f"x={tmp_path}/x.npy"],
            labels=tmp_path / "y.npy",
            train=tmp_path / "train.npy",
            test=tmp_path / "test.npy",
            parts="auto",
            normalize="standard",
        )
    )
    with Dataset.open(made.path) as ds:
        old = np.asarray(ds.external(np.arange(N)))
        assert sorted(old.tolist()) == list(range(N))
        assert ds.row(17) == int(np.flatnonzero(old == 17)[0])
        out = np.empty((N, 3), np.float32)
        ds.rows("x").read(np.arange(N), out)
        assert np.allclose(out, ((x - x[mask].mean(0)) / x[mask].std(0))[old], atol=1e-5)
        assert ds.labels is not None
        assert np.array_equal(ds.labels, y[old])
        assert np.array_equal(old[ds.split("train")], np.flatnonzero(mask)[np.argsort(np.argsort(old)[mask])])
        assert sorted(old[ds.split("test")]) == np.flatnonzero(other).tolist()
        target = np.repeat(np.arange(N), np.diff(ds.graph.indptr))
        edge = ds.graph.columns["edge_id"]
        assert np.array_equal(old[ds.graph.indices], src[edge])
        assert np.array_equal(old[target], dst[edge])
        assert sorted(edge.tolist()) == list(range(len(src)))


def test_settings_that_do_not_fit(
    inputs: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = table_of(inputs, "given", np.arange(N))
    with pytest.raises(ConfigError, match="`partitioner='stream'` makes parts: say how many with `parts`"):
        spec_of(inputs, tmp_path / "s.ooc", given, partitioner="stream")
    with pytest.raises(ValidationError):
        spec_of(inputs, tmp_path / "s.ooc", given, parts=0)
    done: list[str] = []
    with pytest.raises(ConfigError, match="`parts=601`: 600 nodes"):
        ingest(spec_of(inputs, tmp_path / "s.ooc", given, parts=601), lambda step, *_: done.append(step))
    spec = spec_of(inputs, tmp_path / "s.ooc", given, parts=6, partitioner="metis")
    with monkeypatch.context() as patch:
        patch.setattr(partition, "find_spec", lambda name: None)
        with pytest.raises(ConfigError, match="needs the extra"):
            ingest(spec, lambda step, *_: done.append(step))
    assert done
    assert "sort neighbors" not in done
    assert not list(tmp_path.iterdir())
    flags = ["--edges", inputs["edges"], "--nodes", given, "--partitioner", "stream", "--parts"]
    assert main(["ingest", str(tmp_path / "s.ooc"), *flags, "x"]) == 2
    assert main(["ingest", str(tmp_path / "s.ooc"), *flags, "4"]) == 0
    assert main(["info", str(tmp_path / "s.ooc")]) == 0
    shown = capsys.readouterr().out
    assert shown.count(": 4 (stream), ") + shown.count("parts        4 (stream), ") == 2


KILLED = """
import os, signal, sys
from ooc.stores.ingest import IngestSpec, ingest, renumber

renumber.ARRANGE_SHARE = 2 * 10**6
out, edges, nodes, at = sys.argv[1:5]
seen = 0
def die(*_):
    global seen
    seen += 1
    if seen == int(at):
        os.kill(os.getpid(), signal.SIGKILL)
result = ingest(IngestSpec(out=out, edges=edges, nodes=nodes, label="y", x_cols="f*", parts=6, partitioner="stream"), die)
print(len(result.resumed), seen)
"""


@pytest.mark.slow
def test_a_killed_ingest_resumes_to_the_same_bytes(inputs: dict[str, Any], tmp_path: Path) -> None:
    nodes = table_of(inputs, "given", np.arange(N))

    def run(out: str, at: int) -> subprocess.CompletedProcess[str]:
        return python("-c", KILLED, tmp_path / out, inputs["edges"], nodes, str(at))

    done, calls = map(int, run("want.ooc", 0).stdout.split())
    assert done == 0
    want, resumed = tree(tmp_path / "want.ooc"), []
    for share in few((1,), (0.6, 0.85, 1)):
        out = f"got-{share}.ooc"
        killed = run(out, int(share * calls))
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        again = run(out, 0)
        assert again.returncode == 0, again.stderr
        resumed.append(int(again.stdout.split()[0]))
        assert tree(tmp_path / out) == want
        assert not (tmp_path / f"{out}.partial").exists()
    assert resumed == sorted(resumed)
    assert resumed[-1] >= 8
