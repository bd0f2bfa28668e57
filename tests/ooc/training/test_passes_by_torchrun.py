"""`ooc infer`, `embed` and `rank` by several processes: the files of one process, one line where something is wrong."""

import signal
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import zarr

import ooc
from ooc.models.builders import build_model
from ooc.runtime.ranks import joined_ranks
from tests.conftest import MakeStore
from tests.forked import python
from tests.ooc.graphs import hub_graph
from tests.ooc.process_groups import in_processes
from tests.ooc.ranks import run_ranks, start_ranks

N = 20_000
SMALL = ["--hidden", "8", "--epochs", "1", "--threads", "1", "--no-plan", "--seed", "5", "--max-steps", "4"]


@pytest.fixture
def store(make_store: MakeStore) -> Path:
    src, dst = hub_graph(N).numpy()
    return make_store(num_nodes=N, src=src, dst=dst)


@pytest.fixture
def run(store: Path, tmp_path: Path) -> Path:
    done = python("-m", "ooc", "train", store, "--out", tmp_path / "run", "--fanout", "4,4", "--eval-splits", "", *SMALL)
    assert done.returncode == 0, done.stderr
    return tmp_path / "run"


@pytest.mark.slow
def test_processes_write_the_files_of_one(store: Path, run: Path, tmp_path: Path) -> None:
    for verb, name in (("infer", "p.parquet"), ("embed", "e.zarr")):
        for count in (1, 2):
            (tmp_path / str(count)).mkdir(exist_ok=True)
            out = tmp_path / str(count) / name
            done = run_ranks(count, "-m", "ooc", verb, store, "--checkpoint", run, "--out", out)
            assert [each.returncode for each in done] == [0] * count, [each.stderr[-2000:] for each in done]
            assert f"{N:,} nodes" in done[0].stdout
            assert all(each.stdout == "" == each.stderr for each in done[1:]), "rank 0 speaks"
            assert [path.name for path in out.parent.iterdir() if path.name.startswith(name)] == [name]
    tables = [pq.read_table(tmp_path / count / "p.parquet") for count in "12"]
    assert tables[0].equals(tables[1])
    files = [sorted(path for path in (tmp_path / count / "e.zarr").rglob("*") if path.is_file()) for count in "12"]
    assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]


@pytest.mark.slow
def test_what_is_wrong_is_one_line_of_one_process(store: Path, run: Path, tmp_path: Path) -> None:
    (tmp_path / "there.parquet").write_text("")
    wrong = [
        (["infer", store, "--checkpoint", run, "--out", tmp_path / "there.parquet"], "exists"),
        (["infer", store, "--checkpoint", tmp_path / "none", "--out", tmp_path / "p.parquet"], "there is no run in"),
        (["infer", store, "--checkpoint", run, "--out", tmp_path / "p.parquet", "--memory", "1MB"], "memory"),
        (["embed", store, "--checkpoint", run, "--out", tmp_path / "e.zarr", "--layer", "7"], "layers 1 to 2"),
        (["rank", store, "--checkpoint", run, "--out", tmp_path / "r.parquet"], "only runs of links"),
    ]
    for words, message in wrong:
        done = run_ranks(2, "-m", "ooc", *words)
        lines = [line for each in done for line in each.stderr.splitlines()]
        assert [each.returncode for each in done] == [2, 2], lines
        assert len(lines) == 1, lines
        assert message in lines[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "test.ooc", "there.parquet"]


@pytest.mark.slow
def test_a_killed_process_ends_all_and_the_command_again_goes_on(store: Path, run: Path, tmp_path: Path) -> None:
    words = ["-m", "ooc", "embed", store, "--checkpoint", run, "--out", tmp_path / "e.zarr"]
    ranks = start_ranks(2, *words)
    while ranks[1].poll() is None and not list(tmp_path.glob("e.zarr.sweep/progress-*.json")):
        time.sleep(0.001)
    ranks[1].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    done = [each.wait(60) for each in ranks]
    assert time.monotonic() - killed < 20
    assert [each.returncode for each in done] == [2, -signal.SIGKILL]
    assert done[0].stderr == ""
    assert [each.returncode for each in run_ranks(2, *words)] == [0, 0]
    with ooc.open(store) as ds:
        expected = ooc.embed(run, ds)[:]
    np.testing.assert_array_equal(np.asarray(zarr.open(tmp_path / "e.zarr/x", mode="r")), expected)


@pytest.mark.slow
def test_processes_rank_as_one(make_store: MakeStore, tmp_path: Path) -> None:
    store, run = make_store(num_nodes=9000, num_edges=30_000), tmp_path / "links"
    done = python("-m", "ooc", "train", store, "--task", "link", "--out", run, "--fanout", "4,4", *SMALL)
    assert done.returncode == 0, done.stderr
    for count in (1, 2):
        words = ["-m", "ooc", "rank", store, "--checkpoint", run, "--out", tmp_path / f"{count}.parquet", "--sources", "val"]
        done = run_ranks(count, *words, "--k", "3")
        assert [each.returncode for each in done] == [0] * count, [each.stderr[-2000:] for each in done]
    assert pq.read_table(tmp_path / "1.parquet").equals(pq.read_table(tmp_path / "2.parquet"))


def outputs(store: Path, folder: Path) -> np.ndarray:
    """Rows of a module, in a script's own process group."""
    torch.manual_seed(3)
    model = build_model("sage", 8, 16, 3, 2)
    with joined_ranks(), ooc.infer(model, store, folder=folder, all_ranks=True) as rows:
        return rows[:]


@pytest.mark.slow
def test_a_script_has_the_rows_on_all_ranks(store: Path, tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    one, *_ = in_processes(1, outputs, store, tmp_path / "rows")
    for found in in_processes(2, outputs, store, tmp_path / "rows"):
        np.testing.assert_array_equal(found, one)
    assert not list((tmp_path / "rows").iterdir())
