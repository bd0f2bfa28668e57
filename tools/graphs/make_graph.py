"""Generate a graph of any size in bounded memory, as Parquet edges and npy arrays.

    python -m tools.graphs.make_graph OUT --nodes 8000000 --edges 80000000 --features 128 --kind uniform --seed 0

OUT/edges/part-*.parquet (src, dst), OUT/x.npy float32[N, F], OUT/y.npy int64[N], OUT/{train,val,test}.npy int64 ids.
`--temporal W` adds to the edges an ascending time t (int64, milliseconds) and features m0, m1, ... m<W-1> (float32 of 256
different values, one byte each in Parquet): `ooc ingest ... --time t --edge-features 'msg=m*'`. Kinds: `uniform` (both ends
uniform), `rmat` (Chakrabarti et al., 2004; .57 .19 .19 .05), `skewed` (sources nodes * u**3, in no order of their degree),
`communities` (learnable labels: most edges stay within a class, and features are a class centroid with much noise, so that
neighbors help).
"""

import argparse
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

CHUNK_EDGES = 5_000_000
CHUNK_BYTES = 64 << 20
GAP_MS = 10
"""between two events, on average"""
_LEVELS = 256
_SCATTER = 0x9E3779B1
"""a prime: multiplied by it, modulo any smaller number of nodes, consecutive ids lie apart and stay different"""
Ints = NDArray[np.int64]


def uniform(rng: np.random.Generator, nodes: int, count: int, classes: int) -> tuple[Ints, Ints]:
    """`count` edges, both ends uniform over `nodes`."""
    return rng.integers(0, nodes, count), rng.integers(0, nodes, count)


def rmat(rng: np.random.Generator, nodes: int, count: int, classes: int) -> tuple[Ints, Ints]:
    """`count` edges of an R-MAT graph with quadrant weights .57 .19 .19 .05, ids scattered so that hubs lie apart."""
    scale = max(1, int(nodes - 1).bit_length())
    src, dst = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for _ in range(scale):
        draw = rng.random(count, np.float32)
        src = 2 * src + (draw >= 0.76)
        dst = 2 * dst + (((draw >= 0.57) & (draw < 0.76)) | (draw >= 0.95))
    mask = (1 << scale) - 1  # an odd multiplier is a bijection modulo a power of two
    return (src * _SCATTER & mask) % nodes, (dst * _SCATTER & mask) % nodes


def skewed(rng: np.random.Generator, nodes: int, count: int, classes: int) -> tuple[Ints, Ints]:
    """`count` edges from sources nodes * u**3, scattered so that popular ones lie apart, to uniform destinations."""
    rank = (nodes * rng.random(count) ** 3).astype(np.int64)
    return rank * _SCATTER % nodes, rng.integers(0, nodes, count)


def communities(rng: np.random.Generator, nodes: int, count: int, classes: int) -> tuple[Ints, Ints]:
    """`count` edges of which 7 in 10 join two nodes of one class (the class of v is v % classes)."""
    src, dst = uniform(rng, nodes, count, classes)
    same = src - src % classes + dst % classes
    keep = (rng.random(count, np.float32) < 0.7) & (same < nodes)
    return np.where(keep, same, src), dst


KINDS = {"uniform": uniform, "rmat": rmat, "skewed": skewed, "communities": communities}


def edge_chunks(kind: str, nodes: int, edges: int, classes: int, seed: int) -> Iterator[dict[str, Any]]:
    """The edges' columns in pieces of at most CHUNK_EDGES; piece i depends on (seed, i) alone."""
    for i, start in enumerate(range(0, edges, CHUNK_EDGES)):
        rng = np.random.default_rng([seed, 1, i])
        ends = KINDS[kind](rng, nodes, min(CHUNK_EDGES, edges - start), classes)
        yield dict(zip(("src", "dst"), ends, strict=True))


def with_events(chunks: Iterator[dict[str, Any]], nodes: int, width: int, seed: int) -> Iterator[dict[str, Any]]:
    """The same pieces with times and `width` features; ends as narrow as they go. Piece i depends on (seed, i) alone."""
    index = np.int32 if nodes <= 2**31 else np.int64
    begin = 0
    for i, ends in enumerate(chunks):
        count = len(ends["src"])
        columns: dict[str, Any] = {name: ids.astype(index) for name, ids in ends.items()}
        rng = np.random.default_rng([seed, 5, i])
        columns["t"] = begin + np.sort(rng.integers(0, GAP_MS * count, count))
        begin += GAP_MS * count
        for j in range(width):
            levels = np.random.default_rng([seed, 6, j]).standard_normal(_LEVELS, np.float32)
            columns[f"m{j}"] = pa.DictionaryArray.from_arrays(rng.integers(0, _LEVELS, count, np.uint8), levels)
        yield columns


def write_edges(out: Path, chunks: Iterator[dict[str, Any]], strings: bool) -> None:
    """Write one Parquet file per piece; with `strings` an id v becomes the text `n<v>`."""
    out.mkdir(parents=True)
    for i, columns in enumerate(chunks):
        if strings:
            texts = {name: pa.array(np.char.add("n", columns[name].astype("U"))) for name in ("src", "dst")}
            columns |= texts
        features = [name for name, column in columns.items() if isinstance(column, pa.DictionaryArray)]
        settings: dict[str, Any] = {"use_dictionary": features, "store_schema": False} if features else {}
        pq.write_table(pa.table(columns), out / f"part-{i:04d}.parquet", row_group_size=1_000_000, **settings)


def feature_blocks(labels: Ints, features: int, classes: int, seed: int) -> Iterator[NDArray[np.float32]]:
    """float32[N, features] in pieces of about CHUNK_BYTES: a class centroid of norm about 1.5 under unit noise."""
    scale = np.float32(1.5 / np.sqrt(features))
    centroids = np.random.default_rng([seed, 2]).standard_normal((classes, features), np.float32) * scale
    rows = max(1, CHUNK_BYTES // (4 * features))
    for i, start in enumerate(range(0, len(labels), rows)):
        part = labels[start : start + rows]
        noise = np.random.default_rng([seed, 3, i]).standard_normal((len(part), features), np.float32)
        noise += centroids[part]
        yield noise


def write_features(path: Path, labels: Ints, features: int, classes: int, seed: int) -> None:
    """`feature_blocks` as an npy file."""
    with path.open("wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (len(labels), features)}
        np.lib.format.write_array_header_2_0(file, header)
        for block in feature_blocks(labels, features, classes, seed):
            file.write(block.data)


def make_graph(
    out: Path,
    *,
    nodes: int,
    edges: int,
    features: int = 128,
    classes: int = 32,
    kind: str = "uniform",
    seed: int = 0,
    strings: bool = False,
    temporal: int | None = None,
    train_share: float = 0.5,
    eval_share: float | None = None,
) -> None:
    """Write the graph's files below `out` (see the module's text).

    temporal: features of an event (None: edges have no times).
    Split: train_share of the nodes, then eval_share each for val and test (None: the rest, halved).
    """
    out.mkdir(parents=True, exist_ok=True)
    chunks = edge_chunks(kind, nodes, edges, classes, seed)
    write_edges(out / "edges", chunks if temporal is None else with_events(chunks, nodes, temporal, seed), strings)
    labels = np.arange(nodes, dtype=np.int64) % classes
    np.save(out / "y.npy", labels)
    if features:
        write_features(out / "x.npy", labels, features, classes, seed)
    draw = np.random.default_rng([seed, 4]).random(nodes, np.float32)
    share = (1 - train_share) / 2 if eval_share is None else eval_share
    limits = np.cumsum([0.0, train_share, share, share])
    bounds = dict(zip(("train", "val", "test"), pairwise(limits), strict=True))
    for name, (low, high) in bounds.items():
        np.save(out / f"{name}.npy", np.flatnonzero((draw >= low) & (draw < high)))


def main() -> None:
    """Parse the command line and make the graph."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--edges", type=int, required=True)
    parser.add_argument("--features", type=int, default=128, help="columns of x.npy; 0 writes none")
    parser.add_argument("--classes", type=int, default=32)
    parser.add_argument("--kind", choices=sorted(KINDS), default="uniform")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strings", action="store_true", help="ids are texts")
    parser.add_argument("--temporal", type=int, metavar="W", help="times, and W features of the events")
    parser.add_argument("--train-share", type=float, default=0.5)
    parser.add_argument("--eval-share", type=float, help="share of val and of test; default: half of the rest each")
    make_graph(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
