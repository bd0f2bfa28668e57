"""A disk that is full in the middle of a push, a refresh, a sweep or an output: one line, exit code 2, nothing half; with
room again the same command goes on to the same result. The disk is real: the kernel allows this process no larger files."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ooc.cli.main import main
from ooc.layerwise.layerwise_pass import LayerwisePass
from ooc.stores.errors import StoreError
from ooc.stores.info import describe
from ooc.stores.integrity import verify
from ooc.training.predictions import write_tables
from tests.conftest import MakeStore
from tests.ooc.runs import curve

NODES = 9000
TRAIN = """--model sage --mode history --hidden 8 --layers 3 --parts-per-batch 2 --parts 6 --epochs 3 --threads 1 --no-plan
    --refresh 2 --history-dtype float32 --evaluate layerwise --checkpoint-every 2"""
SAMPLED = "--model sage --hidden 8 --fanout 3,3 --epochs 1 --max-steps 2 --threads 1 --no-plan"


@contextmanager
def allowing(nbytes: int | None) -> Iterator[None]:
    """No file of this process grows beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if nbytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def store(make_store: MakeStore) -> Path:
    return make_store(num_nodes=NODES, num_edges=30_000)


def run(arguments: list[Any], capsys: pytest.CaptureFixture[str], most: int | None = None) -> bool:
    """Whether the command came to its end; where it did not, that it said so as it should."""
    capsys.readouterr()
    with allowing(most):
        code = main([str(each) for each in arguments])
    said = capsys.readouterr().err
    if code:
        assert code == 2, said
        *before, last = said.splitlines()
        assert last.startswith("ooc: error: cannot write "), said
        assert "allows no larger file" in last or "free some space there" in last  # LMDB does not tell the two apart
        assert not [line for line in before if "rror" in line]
    return code == 0


@pytest.mark.slow
def test_training(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows [9000, 8] of a layer are 288,000 bytes: what grows are the log of a push or a refresh, and a sweep's files."""
    for module in ("training.history_mode", "layerwise.scores"):
        monkeypatch.setattr(f"ooc.{module}.LayerwisePass", partial(LayerwisePass, room=300_000))
    assert run(["train", store, "--out", tmp_path / "whole", *TRAIN.split()], capsys)
    failed = []
    for most in (100 * 4096, 130 * 4096, 160 * 4096, 200 * 4096):
        out = tmp_path / str(most)
        failed.append(not run(["train", store, "--out", out, *TRAIN.split()], capsys, most))
        if failed[-1]:
            assert not list(out.rglob("*.tmp")) + list(out.rglob("*.partial"))
            more = ["--resume"] if out.exists() else []  # one that failed before its first checkpoint left no directory
            assert run(["train", store, "--out", out, *TRAIN.split(), *more], capsys)
        assert curve(out) == curve(tmp_path / "whole")
    assert failed[0]
    assert not run(["train", store, "--out", tmp_path / "none", *TRAIN.split()], capsys, 10 * 4096)
    assert not (tmp_path / "none").exists(), "there was no room for the histories: no run has begun"


@pytest.mark.slow
def test_growth(quick_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An append, its first reader and a compaction, of 20,000 events between 5,000 new nodes with ids of text."""
    rng = np.random.default_rng(0)
    for name, first, count, nodes in (("base", 0, 2000, 500), ("more", 2000, 20_000, 5000)):
        ends = {end: [f"n{v:05d}" for v in rng.integers(0, nodes, count)] for end in ("src", "dst")}
        events = {"t": np.arange(first, first + count), **{f"m{j}": rng.standard_normal(count) for j in range(4)}}
        pq.write_table(pa.table({**ends, **events}), quick_path / f"{name}.parquet")
    given = ["--time", "t", "--edge-features", "msg=m*"]
    prints = {}
    for name in ("whole", "cut"):
        store = quick_path / f"{name}.ooc"
        assert run(["ingest", store, "--edges", quick_path / "base.parquet", *given], capsys)
        steps = {
            "append": [store, "--edges", quick_path / "more.parquet", *given],
            "info": [store, "--id", "n00001"],
            "compact": [store],
        }
        for verb, arguments in steps.items():
            sizes = [] if name == "whole" else [2, 20, 60, 200, 300]
            failed = 0
            for pages in sizes:
                before = describe(store)
                if run([verb, *arguments], capsys, pages * 4096):
                    break
                failed += 1
                assert describe(store) == before
                assert verify(store) == []
                assert not list(store.rglob("*.partial"))
            else:
                assert run([verb, *arguments], capsys)
            assert name == "whole" or failed > (verb != "compact")
        assert verify(store) == []
        prints[name] = describe(store)["fingerprint"]
    assert prints["whole"] == prints["cut"]


def test_a_table_of_text(tmp_path: Path) -> None:
    """pyarrow's own words for it are not the system's."""
    table, out = pa.table({"node": np.arange(100_000)}), tmp_path / "out.csv"
    with allowing(20_000), pytest.raises(StoreError, match=r"^cannot write .*out\.csv: File too large; that disk, or a limit"):
        write_tables(out, iter([table]))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("verb", [pytest.param("infer", marks=pytest.mark.slow), "embed"])
def test_outputs(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    assert run(["train", store, "--out", tmp_path / "run", *SAMPLED.split()], capsys)
    monkeypatch.setattr("ooc.layerwise.exact_pass.LayerwisePass", partial(LayerwisePass, room=300_000))
    name, again = ("out.parquet", "again.parquet") if verb == "infer" else ("out", "again")
    out = tmp_path / name
    call = [verb, store, "--checkpoint", tmp_path / "run", "--out", out]
    there = {"run", "test.ooc"}
    failed = 0
    for pages in (1, 10, 30, 60, 75, 90):
        if run(call, capsys, pages * 4096):
            break
        failed += 1
        assert {path.name for path in tmp_path.iterdir()} - {f"{name}.sweep"} == there
    assert failed >= 3
    if not out.exists():
        assert run(call, capsys)
    assert {path.name for path in tmp_path.iterdir()} == there | {name}
    if verb == "infer":
        assert pq.read_table(out).num_rows == NODES
    assert run([*call[:-1], tmp_path / again], capsys)
    files = [path.relative_to(out) for path in out.rglob("*") if path.is_file()] or [Path()]
    for file in files:
        assert (out / file).read_bytes() == (tmp_path / again / file).read_bytes()
