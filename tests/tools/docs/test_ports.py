"""The scripts of docs/ports run on small graphs, learn, and differ from their PyG versions in few lines."""

import difflib
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch_geometric.data import Data

import ooc
from tests.forked import python
from tools.docs.snippets import ROOT

PORTS = ROOT / "docs" / "ports"
NAMES = ("reddit", "ogbn_train", "cluster_gcn_reddit", "tgn", "rev_gnn")
MOST_LINES = 10


def nodes(folder: Path) -> None:
    """A graph with eight planted classes under the names that the scripts open, one of them in parts."""
    rng = np.random.default_rng(0)
    y = np.sort(rng.integers(0, 8, 3000))[rng.permutation(3000)]
    src, dst = rng.integers(0, 3000, (2, 30_000))
    alike = (y[src] == y[dst]) | (rng.random(30_000) < 0.1)
    edge_index = torch.from_numpy(np.stack([src[alike], dst[alike]]))
    x = 2 * np.eye(8, dtype=np.float32)[y] + rng.standard_normal((3000, 8), dtype=np.float32)
    data = Data(x=torch.from_numpy(x), y=torch.from_numpy(y), edge_index=edge_index)
    for name, parts in {"reddit.ooc": 100, "products.ooc": None}.items():
        ooc.from_data(data, folder / name, undirected=True, random_split=(0.5, 0.2, 0.3), parts=parts).close()


def events(folder: Path) -> None:
    """A stream in which every source returns to three destinations."""
    rng = np.random.default_rng(0)
    src, t = rng.integers(0, 300, 3000), np.sort(rng.integers(0, 30 * 86400, 3000))
    dst = 300 + (7 * src + rng.integers(0, 3, 3000)) % 60
    pq.write_table(pa.table({"src": src, "dst": dst, "t": t, "amount": rng.random(3000)}), folder / "events.parquet")
    words = ["--edges", "events.parquet", "--time", "t", "--edge-features", "msg=amount", "--undirected", "--num-nodes", "360"]
    assert python("-m", "ooc.cli", "ingest", "wikipedia.ooc", *words).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_port_runs_and_learns(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (events if name == "tgn" else nodes)(tmp_path)
    done = python("-c", (PORTS / f"{name}.py").read_text())
    assert done.returncode == 0, done.stderr
    score = float(re.findall(r"(?:AP|test) ([\d.]+)$", done.stdout, re.MULTILINE)[-1])
    assert score > (0.7 if name == "tgn" else 0.4), done.stdout  # by chance: 0.5, 0.125


@pytest.mark.parametrize("name", NAMES)
def test_a_port_changes_few_lines(name: str) -> None:
    before, after = ((PORTS / f"{name}{which}.py").read_text().splitlines() for which in ("_pyg", ""))
    added = [line for line in difflib.ndiff(before, after) if line.startswith("+ ") and line.strip("+ ")]
    assert 0 < len(added) < MOST_LINES, added


def test_the_table_of_pygs_scripts_counts_the_lines_that_their_diffs_write() -> None:
    page = (ROOT / "docs" / "from-pyg.md").read_text().split("## PyG's examples, ported")[1]
    counted = {name: int(written) for name, written in re.findall(r"^\| `(\w+)\.py` \| (\d+) \|", page, re.MULTILINE)}
    assert {*counted} == {*NAMES}
    for name, written in counted.items():
        diff = re.search(rf"\(`{name}\.py`\)\n.*?```diff\n(.*?)```", page, re.DOTALL)
        assert diff is not None, name
        assert written == len(re.findall(r"^\+", diff[1], re.MULTILINE)) < MOST_LINES, name
