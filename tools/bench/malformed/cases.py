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
    for name, content in typed_tables().items():
        (folder / name).write_bytes(content)
    _ogb_types(folder / "mag")
    _ogb_graphs(folder / "mol")


def typed_tables() -> dict[str, bytes]:
    """Tables of papers, and of their authors' edges with times and ratings; of molecules, their atoms and bonds."""
    ratings = ((f"a{i % 7}", f"p{i % NODES}", i, (i % 5) / 2) for i in range(EDGES))
    return {
        "papers.csv": lines("id,y,f0", ((f"p{i}", i % 3, i / 4) for i in range(NODES))),
        "writes.csv": lines("src,dst,t,rating", ratings),
        "atoms.csv": lines("id,mol,f0", ((i, f"m{i // 4}", i / 4) for i in range(NODES))),
        "mols.csv": lines("mol,y,split", ((f"m{i}", i / 3, "train") for i in range(NODES // 4))),
        "bonds.csv": lines("src,dst,length", ((i, i - i % 4, 1.5) for i in range(NODES))),
    }


def _packed(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def _ogb_types(folder: Path) -> None:
    """OGB's raw layout of several types."""
    raw, edges = folder / "raw", "".join(f"{a % 7},{b}\n" for a, b in ends().T.tolist())
    _packed(raw / "num-node-dict.csv.gz", f"author,paper\n7,{NODES}\n")
    _packed(raw / "triplet-type-list.csv.gz", "author,writes,paper\n")
    _packed(raw / "relations" / "author___writes___paper" / "edge.csv.gz", edges)
    _packed(raw / "node-label" / "paper" / "node-label.csv.gz", "".join(f"{i % 3}\n" for i in range(NODES)))
    _packed(folder / "split" / "time" / "paper" / "train.csv.gz", "0\n1\n2\n")


def _ogb_graphs(folder: Path) -> None:
    """OGB's raw layout of many graphs, of four nodes and five edges each."""
    count = NODES // 4
    _packed(folder / "raw" / "num-node-list.csv.gz", "4\n" * count)
    _packed(folder / "raw" / "num-edge-list.csv.gz", "5\n" * count)
    _packed(folder / "raw" / "edge.csv.gz", "0,1\n1,2\n2,3\n3,0\n0,2\n" * count)
    _packed(folder / "raw" / "graph-label.csv.gz", "".join(f"{i % 2}\n" for i in range(count)))
    _packed(folder / "split" / "scaffold" / "valid.csv.gz", "0\n1\n")


_TYPES = "--nodes paper=papers.csv --nodes author --edges author:writes:paper=writes.csv --label paper=y --x-cols paper=f*"
_TYPES += " --time author:writes:paper=t --edge-label author:writes:paper=rating --reverse"
_GRAPHS = "--nodes atoms.csv --edges bonds.csv --graph-id mol --graphs mols.csv --graph-label y --graph-split split --x-cols f*"
_GRAPHS += " --edge-features edge_attr=length"
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
    "papers.csv": _TYPES,
    "writes.csv": _TYPES,
    "atoms.csv": _GRAPHS,
    "mols.csv": _GRAPHS,
    "bonds.csv": _GRAPHS,
    "mag/raw/num-node-dict.csv.gz": "--ogb mag",
    "mag/raw/triplet-type-list.csv.gz": "--ogb mag",
    "mag/raw/relations/author___writes___paper/edge.csv.gz": "--ogb mag",
    "mag/raw/node-label/paper/node-label.csv.gz": "--ogb mag",
    "mag/split/time/paper/train.csv.gz": "--ogb mag",
    "mol/raw/num-node-list.csv.gz": "--ogb mol",
    "mol/raw/num-edge-list.csv.gz": "--ogb mol",
    "mol/raw/edge.csv.gz": "--ogb mol",
    "mol/raw/graph-label.csv.gz": "--ogb mol",
    "mol/split/scaffold/valid.csv.gz": "--ogb mol",
}
"""file -> flags of an ingest that reads it"""


def ingest(flags: str, out: str = "out.ooc") -> tuple[str, ...]:
    """The command of an ingest."""
    return "ingest", out, *flags.split()
