"""The benchmark of edges on disk, on a small graph: what it makes, what it counts, that it leaves nothing behind."""

import json
from pathlib import Path

import numpy as np
import pytest
import zarr

from ooc.stores.arrays.rows import ArrayRows
from tools.bench.io import topology


def test_the_graph_is_a_csc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "_PIECE", 300)
    edges = topology.make_topology(tmp_path / "g", 1000, 5, seed=1)
    group = zarr.open_group(tmp_path / "g", mode="r")
    indptr, indices = np.asarray(group["graph/indptr"]), np.asarray(group["graph/indices"])
    assert (len(indptr), indptr[0], indptr[-1], len(indices)) == (1001, 0, edges, edges)
    assert 4000 < edges < 6000
    assert (np.diff(indptr) >= 0).all()
    assert 0 <= indices.min() < 50
    assert 950 < indices.max() < 1000


def test_pages_are_counted_once_a_read() -> None:
    rows = topology.CountedRows(ArrayRows(np.arange(5000, dtype=np.int32)))
    for ids, pages in (([], 0), ([0, 1023, 1024, 4999], 3), ([1023], 1)):
        before = rows.pages
        out = np.empty(len(ids), np.int32)
        rows.read(np.array(ids, np.int64), out)
        assert rows.pages - before == pages
        assert out.tolist() == ids


@pytest.mark.slow
def test_one_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(topology, "fio", lambda group, seconds, seed: 1000.0 * (1 + seed % 2))  # it may not be installed
    size = ["--nodes", "20000", "--degree", "6", "--batch-size", "50", "--batches", "4", "--fanout", "4,3", "--rounds", "1"]
    topology.main([str(tmp_path / "work"), *size, "--limit", "", "--plot", str(tmp_path / "plot.svg")])
    result = json.loads(capsys.readouterr().out)
    assert result["identical"] is True
    assert [r["fio_reads_per_s"] for r in result["rounds"]] == [1500.0]
    for run in result["rounds"]:
        assert run["share_of_fio"] == pytest.approx(run["pages"] / run["seconds"] / 1500)
        assert 0 < run["pages"] * 4096 <= run["bytes_read"]
    assert (tmp_path / "plot.svg").stat().st_size > 0
    assert list((tmp_path / "work").iterdir()) == []
