"""What a case of the campaign is, and the well-formed files that cases damage."""

import gzip
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

NODES, EDGES = 40, 200
Outcome = Literal["refused", "accepted", "either"]


@dataclass(frozen=True)
class Case:
    """One call of `ooc` in a folder of its own. command: with {work} for the folder of the shared stores and runs; write: makes
    the input files in the folder; outcome: `either` for damage that may be harmless."""

    name: str
    command: tuple[str, ...]
    write: Callable[[Path], object]
    outcome: Outcome = "refused"


def nothing(folder: Path) -> None:
    """Write no file."""


def ends() -> np.ndarray:
    """int64[2, EDGES], random, with every node."""
    found = np.random.default_rng(0).integers(0, NODES, (2, EDGES))
    found[0, :NODES] = np.arange(NODES)
    return found


def lines(header: str, rows: Iterable[Iterable[object]], delimiter: str = ",") -> bytes:
    """A text table."""
    return "\n".join([header, *(delimiter.join(map(str, row)) for row in rows), ""]).encode()


def edges_csv() -> bytes:
    """Edges with weights and times."""
    src, dst = ends()
    return lines("src,dst,w,t", zip(src, dst, (1 + src) / 8, range(EDGES), strict=True))


def nodes_csv() -> bytes:
    """Nodes with labels, splits, births and two features."""
    rows = ((i, i % 3, ("train", "val", "test")[i % 3], i, i / 4, -i) for i in range(NODES))
    return lines("id,y,split,born,f0,f1", rows)


def edge_table(**columns: object) -> pa.Table:
    """Edges as an Arrow table with further or other columns."""
    src, dst = ends()
    return pa.table({"src": src, "dst": dst, "w": np.ones(EDGES), "t": np.arange(EDGES), **columns})


def well_formed(folder: Path) -> None:
    """Write every kind of input file."""
    (folder / "edges.csv").write_bytes(edges_csv())
    (folder / "edges.tsv").write_bytes(edges_csv().replace(b",", b"\t"))
    (folder / "edges.csv.gz").write_bytes(gzip.compress(edges_csv(), mtime=0))
    (folder / "nodes.csv").write_bytes(nodes_csv())
    pq.write_table(edge_table(), folder / "edges.parquet")
    arrays = {
        "edges": ends(),
        "x": np.random.default_rng(1).standard_normal((NODES, 4), dtype=np.float32),
        "y": np.arange(NODES) % 3,
        "train": np.arange(NODES) < NODES // 2,
        "msg": np.random.default_rng(2).standard_normal((EDGES, 2)),
    }
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    x, y, train = arrays["x"], arrays["y"], arrays["train"]
    np.savez(folder / "graph.npz", x=x, y=y, edge_index=arrays["edges"], train_mask=train, test_mask=~train)
    raw, split = folder / "ogb" / "raw", folder / "ogb" / "split" / "time"
    raw.mkdir(parents=True)
    split.mkdir(parents=True)
    (raw / "edge.csv.gz").write_bytes(gzip.compress(b"\n".join(b"%d,%d" % tuple(pair) for pair in ends().T.tolist())))
    (raw / "num-node-list.csv.gz").write_bytes(gzip.compress(b"%d\n" % NODES))
    (raw / "node-label.csv.gz").write_bytes(gzip.compress(b"".join(b"%d\n" % (i % 3) for i in range(NODES))))
    (split / "train.csv.gz").write_bytes(gzip.compress(b"0\n1\n2\n"))


INGESTS = {
    "edges.csv": "--edges edges.csv",
    "edges.tsv": "--edges edges.tsv --weight w",
    "edges.csv.gz": "--edges edges.csv.gz --time t",
    "edges.parquet": "--edges edges.parquet --time t --edge-features msg=w",
    "edges.npy": "--edges edges.npy",
    "nodes.csv": "--edges edges.csv --nodes nodes.csv --label y --split split --x-cols f*",
    "x.npy": "--edges edges.csv --features x=x.npy",
    "y.npy": "--edges edges.csv --labels y.npy",
    "train.npy": f"--edges edges.csv --num-nodes {NODES} --train train.npy",
    "msg.npy": "--edges edges.csv --time t --edge-features msg=msg.npy",
    "graph.npz": "--npz graph.npz",
    "ogb/raw/edge.csv.gz": "--ogb ogb",
    "ogb/raw/num-node-list.csv.gz": "--ogb ogb",
    "ogb/raw/node-label.csv.gz": "--ogb ogb",
    "ogb/split/time/train.csv.gz": "--ogb ogb",
}
"""file -> flags of an ingest that reads it"""


def ingest(flags: str, out: str = "out.ooc") -> tuple[str, ...]:
    """The command of an ingest."""
    return "ingest", out, *flags.split()
