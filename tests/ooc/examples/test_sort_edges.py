"""The scripts that sort edges on a cluster: what they write is packed, and is the graph of the edges as they were."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ooc.examples import source
from ooc.stores.dataset import Dataset
from ooc.stores.ingest import IngestSpec, ingest

NODES, EDGES = 500, 20_000
CLUSTERS = {"dask": ["--workers", "2"], "spark": []}


def tree(path: Path) -> dict[str, bytes]:
    return {str(each.relative_to(path)): each.read_bytes() for each in sorted(path.rglob("*")) if each.is_file()}


def run(folder: Path, cluster: str, words: list[str]) -> None:
    """Run a script with processes of this machine."""
    needed = {"dask": "distributed", "spark": "pyspark"}[cluster]
    if importlib.util.find_spec(needed) is None or (cluster == "spark" and shutil.which("java") is None):
        pytest.skip(f"no {needed}")
    script = folder / "sort_edges.py"
    script.write_text(source(f"sort_edges_{cluster}"))
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    if java := shutil.which("java"):
        environment["PATH"] += f":{Path(java).parent}"
    several = [
        "spark.sql.adaptive.coalescePartitions.enabled=false",
        "spark.sql.shuffle.partitions=3",
        "spark.ui.enabled=false",
    ]
    environment["PYSPARK_SUBMIT_ARGS"] = " ".join(
        ["--master local[2]", *(f"--conf {each}" for each in several), "pyspark-shell"]
    )
    done = subprocess.run(
        [sys.executable, str(script), f"{folder}/in/*.parquet", f"{folder}/out", *words],
        capture_output=True, text=True, cwd=folder, env=environment, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def neighbors(ds: Dataset, node: int) -> list[int]:
    """Sources of a node's in-edges, sorted."""
    first, last = ds.graph.indptr[node : node + 2]
    return sorted(np.asarray(ds.graph.indices[first:last]).tolist())


@pytest.mark.slow
@pytest.mark.parametrize("number", [False, True])
@pytest.mark.parametrize("cluster", list(CLUSTERS))
def test_sorted_edges_are_the_same_graph(tmp_path: Path, cluster: str, number: bool) -> None:
    rng = np.random.default_rng(0)
    src, dst = rng.integers(0, NODES, (2, EDGES))
    src[:NODES] = np.arange(NODES)  # every node has an edge
    ids = np.array([f"n{i:03d}" for i in range(NODES)]) if number else np.arange(NODES)
    (tmp_path / "in").mkdir()
    for i, part in enumerate(np.array_split(np.arange(EDGES), 4)):
        pq.write_table(
            pa.table({"src": ids[src[part]], "dst": ids[dst[part]], "w": rng.random(len(part))}),
            tmp_path / "in" / f"{i}.parquet",
        )
    run(tmp_path, cluster, [*CLUSTERS[cluster], *(["--number"] if number else [])])
    files = f"{tmp_path}/out/edges/*.parquet"
    assert len(list(Path(files).parent.glob("*.parquet"))) > 1
    common = {"edges": files, "num_nodes": NODES, "weight": "w"}
    ingest(IngestSpec(out=tmp_path / "sorted.ooc", sorted=True, **common))
    ingest(IngestSpec(out=tmp_path / "again.ooc", **common))
    assert tree(tmp_path / "sorted.ooc") == tree(tmp_path / "again.ooc")
    ingest(
        IngestSpec(
            out=tmp_path / "plain.ooc", edges=f"{tmp_path}/in/*.parquet", weight="w", **({} if number else {"num_nodes": NODES})
        )
    )
    with Dataset.open(tmp_path / "sorted.ooc") as ds, Dataset.open(tmp_path / "plain.ooc") as plain:
        assert all(neighbors(ds, node) == neighbors(plain, node) for node in range(NODES))
        np.testing.assert_allclose(ds.graph.weight_sum, plain.graph.weight_sum, rtol=1e-6)
        if number:
            rows = duckdb.sql(f"SELECT id, row FROM '{tmp_path}/out/ids/*.parquet' ORDER BY row").fetchall()
            assert rows == [(plain.external([row])[0], row) for row in range(NODES)]
