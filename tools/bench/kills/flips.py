"""Flipped bits in stores: each must be found in use, or be harmless, or be found by --verify-reads or `ooc verify`.

    python -m tools.bench.kills.flips WORK --flips 500 [--stores plain encoded ...] [--seed 7]

Small stores are made of every kind. Then one bit of one file is flipped at a time: the store is used (a run of training, or the
batches of a loader), and the result is compared with that of the sound store. Where nothing was found, it is verified, and used
once more with `verify_reads`. A crash, a traceback, a use that hangs for --seconds, or a changed result that neither finds is a
finding. Results are kept in WORK: given again, the command goes on where it was stopped, and runs what it found again. Prints
JSON; exits with 1 and keeps WORK if there are findings.
"""

import argparse
import faulthandler
import hashlib
import json
import random
import shutil
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.lib.killed_process import ended, fork
from tools.bench.lib.results import Results, clear

NODES, EDGES, EVENTS = 3000, 20_000, 1500
FOUND, FAILED = 2, 3
"""exit codes of a process that ended with an error for users, and with any other exception"""


def _plain(path: Path, **options: Any) -> None:
    from ooc.stores.build import write_store
    from ooc.stores.graph import Graph

    rng = np.random.default_rng(1)
    src, dst = rng.integers(0, NODES, (2, EDGES))
    columns: dict[str, Any] = {"weight": rng.random(EDGES).astype(np.float32)} if options.get("weighted") else {}
    graph = Graph.from_edges(src, dst, NODES, parts=options.get("parts"), **columns)
    order = rng.permutation(NODES)
    splits = {"train": order[: NODES // 2], "val": order[NODES // 2 : NODES // 4 * 3], "test": order[NODES // 4 * 3 :]}
    x, y = rng.standard_normal((NODES, 64), dtype=np.float32), rng.integers(0, 5, NODES)
    external = [f"n{node:05d}" for node in range(NODES)]
    write_store(path, graph, x=x, y=y, task="multiclass", num_classes=5, splits=splits, external=external)


def _events(folder: Path, name: str, first: int, last: int) -> str:
    """Write a table of events first..last-1; returns its path."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng([2, first])
    src, dst = rng.integers(0, 300, (2, last - first))
    table = {"src": src, "dst": dst, "t": np.arange(first, last) * 10, "m": rng.random(last - first)}
    pq.write_table(pa.table(table), folder / name)
    return str(folder / name)


def _temporal(path: Path, appended: int = 0) -> None:
    from ooc.stores.growth.append import append
    from ooc.stores.growth.spec import AppendSpec
    from ooc.stores.ingest import IngestSpec, ingest

    folder = path.parent
    np.save(folder / "x.npy", np.random.default_rng(3).standard_normal((300, 16)).astype(np.float32))
    edges = _events(folder, f"{path.name}-0.parquet", 0, EVENTS - appended)
    common: dict[str, Any] = {"time": "t", "edge_features": ["msg=m"]}
    features: dict[str, Any] = {"features": [f"x={folder}/x.npy"]}
    ingest(IngestSpec(out=path, edges=edges, time_unit="s", undirected=True, **features, **common))
    if appended:
        edges = _events(folder, f"{path.name}-1.parquet", EVENTS - appended, EVENTS)
        append(AppendSpec(out=path, edges=edges, **common))


def _encoded(path: Path) -> None:
    """A store with features in int8 and their scales, names of classes, and ids that are words."""
    from ooc.stores.ingest import IngestSpec, ingest

    rng = np.random.default_rng(4)
    np.save(path.with_suffix(".npy"), rng.standard_normal((NODES, 64)).astype(np.float32))
    nodes = (f"n{node},{'abcde'[node % 5]},{('train', 'val', 'test')[node % 3]}" for node in range(NODES))
    edges = (f"n{a},n{b}" for a, b in rng.integers(0, NODES, (EDGES, 2)))
    for name, header, rows in (("nodes", "id,y,split", nodes), ("edges", "src,dst", edges)):
        path.with_name(f"{name}.csv").write_text("\n".join([header, *rows, ""]))
    tables: dict[str, Any] = {"edges": str(path.with_name("edges.csv")), "nodes": str(path.with_name("nodes.csv"))}
    columns: dict[str, Any] = {"label": "y", "split": "split", "features": [f"x={path.with_suffix('.npy')}"]}
    ingest(IngestSpec(out=path, **tables, **columns, dtype="int8"))


def _typed(path: Path) -> None:
    """Papers and authors with ids that are words, edges with times and labels, and the reverse of every edge type."""
    from ooc.stores.ingest import ingest, spec_of

    rng, folder = np.random.default_rng(5), path.parent
    papers = (f"p{i},{i % 5},{('train', 'val', 'test')[i % 3]},{','.join(map(str, rng.random(16)))}" for i in range(NODES))
    writes = (
        f"a{a},p{p},{at}"
        for at, (a, p) in enumerate(zip(rng.integers(0, 500, EDGES), rng.integers(0, NODES, EDGES), strict=True))
    )
    cites = (f"p{a},p{b},0" for a, b in rng.integers(0, NODES, (EDGES, 2)))
    header = f"id,y,split,{','.join(f'f{i}' for i in range(16))}"
    for name, first, rows in (("papers", header, papers), ("writes", "src,dst,t", writes), ("cites", "src,dst,t", cites)):
        (folder / f"{name}.csv").write_text("\n".join([first, *rows, ""]))
    given: dict[str, Any] = {
        "nodes": {"paper": f"{folder}/papers.csv", "author": None},
        "x_cols": {"paper": "f*"},
        "reverse": True,
    }
    given |= {"edges": {(a, n, "paper"): f"{folder}/{n}.csv" for a, n in (("author", "writes"), ("paper", "cites"))}}
    given |= {"label": {"paper": "y"}, "split": {"paper": "split"}, "time": {("author", "writes", "paper"): "t"}}
    ingest(spec_of({"out": path, **given}))


def _graphs(path: Path) -> None:
    """Many graphs with features of nodes and edges, labels, splits and ids that are words."""
    from ooc.stores.ingest import IngestSpec, ingest

    rng, folder, count = np.random.default_rng(6), path.parent, NODES // 10
    ends = rng.integers(0, 10, (EDGES, 2)) + 10 * rng.integers(0, count, (EDGES, 1))
    tables = {
        "atoms": ("id,mol,f0,f1", (f"{i},m{i // 10},{rng.random()},{i % 7}" for i in range(NODES))),
        "bonds": ("src,dst,w", (f"{a},{b},{(a + b) % 9}" for a, b in ends)),
        "mols": ("mol,y,split", (f"m{i},{i % 3},{('train', 'val', 'test')[i % 3]}" for i in range(count))),
    }
    for name, (header, rows) in tables.items():
        (folder / f"{name}.csv").write_text("\n".join([header, *rows, ""]))
    nodes: dict[str, Any] = {"nodes": str(folder / "atoms.csv"), "graph_id": "mol", "x_cols": "f*"}
    graphs: dict[str, Any] = {"graphs": str(folder / "mols.csv"), "graph_label": "y", "graph_split": "split"}
    ingest(IngestSpec(out=path, edges=str(folder / "bonds.csv"), edge_features=["edge_attr=w"], **nodes, **graphs))


_SETTINGS: dict[str, dict[str, Any]] = {
    "sampled": {"plan": False, "fanout": [5, 5], "batch_size": 500},
    "full": {"plan": False},
    "cluster": {"plan": False},
    "history": {"plan": False, "parts": 6},
    "events": {"batch_size": 250},
    "snapshots": {"by": "count", "window": 400},
}
"""mode -> settings of a short run"""


def _trained(store: Path, verify_reads: bool, model: str = "sage", mode: str = "sampled", **more: Any) -> Any:
    """The losses and scores of a short run."""
    from ooc.config import load_config
    from ooc.training.loop import train

    out = store.with_name("run")
    shutil.rmtree(out, ignore_errors=True)
    given: dict[str, Any] = {"store": store, "out": out, "mode": mode, "model": model, "hidden": 8, "epochs": 1, "seed": 1}
    given |= {"threads": 1, "device": "cpu", "verify_reads": verify_reads}
    train(load_config(None, given | _SETTINGS[mode] | more, {}))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.endswith(("_s", "seconds", "bytes"))} for line in lines]


def _inferred(store: Path, verify_reads: bool) -> Any:
    """A digest of what a model trained for one batch says of every node."""
    import ooc

    _trained(store, verify_reads, max_steps=1, evaluate="layerwise")
    found = store.with_name("predictions.csv")
    found.unlink(missing_ok=True)
    ooc.infer(store.with_name("run"), store, found, verify_reads=verify_reads)
    return hashlib.sha256(found.read_bytes()).hexdigest()


def _add(digest: Any, part: Any) -> None:
    """Add the tensors of a batch, or of one of its types, to a digest."""
    for name in sorted(part.keys()):
        if hasattr(part[name], "numpy"):
            digest.update(part[name].numpy().tobytes())


def _typed_batches(store: Path, verify_reads: bool) -> Any:
    """A digest of an epoch's batches of a heterogeneous store, and of ids."""
    import ooc

    digest = hashlib.sha256()
    with ooc.open(store, verify_reads=verify_reads) as ds:
        papers = ds.nodes("paper")
        digest.update(repr(papers.external(papers.split("test")[:50])).encode())
        for batch in ooc.NeighborLoader(ds, num_neighbors=[4, 4], input_nodes=("paper", "train"), batch_size=200, seed=1):
            for part in (*batch.node_stores, *batch.edge_stores):
                _add(digest, part)
    return digest.hexdigest()


def _graph_batches(store: Path, verify_reads: bool) -> Any:
    """A digest of an epoch's batches of whole graphs, and of the graphs' ids."""
    import ooc

    digest = hashlib.sha256()
    with ooc.open(store, verify_reads=verify_reads) as ds:
        digest.update(repr(ds.graphs.external(ds.graphs.split("val"))).encode())
        for batch in ooc.GraphLoader(ds, input_graphs="train", batch_size=20, shuffle=True, seed=1):
            _add(digest, batch)
    return digest.hexdigest()


def _looped(store: Path, verify_reads: bool) -> Any:
    """A digest of all windows of a temporal store."""
    import ooc

    digest = hashlib.sha256()
    with ooc.open(store, verify_reads=verify_reads) as ds:
        for batch in ooc.SnapshotLoader(ds, window=2000):
            for _, value in sorted(batch.to_dict().items()):
                digest.update(value.numpy().tobytes() if hasattr(value, "numpy") else repr(value).encode())
    return digest.hexdigest()


Use = Callable[[Path, bool], Any]
STORES: dict[str, tuple[Callable[[Path], None], tuple[Use, ...]]] = {
    "plain": (_plain, (_trained, partial(_trained, mode="full"))),
    "weighted": (partial(_plain, weighted=True), (partial(_trained, model="gcn"),)),
    "parted": (partial(_plain, parts=np.array([0, 1000, NODES])), (partial(_trained, mode="cluster"),)),
    "encoded": (_encoded, (_inferred, partial(_trained, mode="history"))),
    "temporal": (
        _temporal,
        (
            partial(_trained, mode="events", model="tgat"),
            partial(_trained, mode="events", model="tgn"),
            partial(_trained, mode="snapshots", model="evolvegcn"),
            _looped,
        ),
    ),
    "typed": (_typed, (_typed_batches, partial(_trained, model="rsage"))),
    "graphs": (_graphs, (_graph_batches,)),
    "grown": (partial(_temporal, appended=400), (_looped, partial(_trained, mode="events", model="tgn"))),
}
"""name -> (how to make it, ways to use it)"""


def _child(work: Callable[[], Any], out: Path) -> int:
    """Write the result of `work`, or the error; returns 0, FOUND or FAILED."""
    from ooc.stores.errors import OocError

    try:
        out.write_text(json.dumps(work()))
        return 0
    except OocError as error:
        out.write_text(str(error))
        return FOUND if "\n" not in str(error) else FAILED
    except BaseException:
        out.write_text(traceback.format_exc())
        return FAILED


def outcome(work: Callable[[], Any], out: Path, seconds: float) -> tuple[str, str]:
    """Run `work` in a process; returns ("ok", its result), ("found", the error) or what else happened, with details."""
    out.unlink(missing_ok=True)
    code, _ = ended(fork(partial(_child, work, out), out.with_suffix(".log")), seconds)
    if code is None:
        return "hang", f"longer than {seconds} s"
    text = out.read_text() if out.exists() else ""
    return {0: "ok", FOUND: "found", FAILED: "traceback"}.get(code, "crash"), text or f"exit code {code}"


def flip(store: Path, rng: random.Random) -> str:
    """Flip a bit of a file, any file or any byte of the store being as likely as any other; returns where."""
    files = sorted(path for path in store.rglob("*") if path.is_file() and path.stat().st_size and path.name != "lock.mdb")
    weights = [path.stat().st_size for path in files] if rng.random() < 0.5 else [1] * len(files)
    path = rng.choices(files, weights)[0]
    at, bit = rng.randrange(path.stat().st_size), rng.randrange(8)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))
    return f"{path.relative_to(store)} byte {at} bit {bit}"


def _verified(store: Path) -> list[str]:
    from ooc.stores.integrity import verify

    return [str(damage) for damage in verify(store)]


def judge(store: Path, use: Use, sound: str, out: Path, seconds: float) -> tuple[str, str]:
    """What a flipped bit comes to: "found in use", "found by verify_reads", "found by verify", "harmless", or a finding."""
    kind, text = outcome(partial(use, store, False), out, seconds)
    if kind == "found":
        return "found in use", text
    if kind != "ok":
        return kind, text
    verified, damages = outcome(partial(_verified, store), out, seconds)
    if verified not in ("ok", "found"):
        return f"{verified} of verify", damages
    by_verify = verified == "found" or damages != "[]"
    checked, message = outcome(partial(use, store, True), out, seconds)
    if checked == "found":
        return ("found by verify_reads" if text != sound else "found by verify_reads, harmless"), message
    if checked != "ok":
        return f"{checked} with verify_reads", message
    if text == sound:
        return ("found by verify, harmless" if by_verify else "harmless"), damages
    return ("found by verify", damages) if by_verify else ("CHANGED", f"{text} is not {sound}")


FINE = ("found in use", "found by verify_reads", "found by verify", "harmless")


def _prepare(work: Path, kinds: list[str]) -> tuple[list[tuple[str, int, Use]], dict[tuple[str, int], str]]:
    """Make the stores, and use each in every way; returns the ways, and the results of sound stores.

    This process does it, so that those that are forked have imported and compiled everything.
    """
    import torch

    import ooc.stores.ingest
    import ooc.training.infer
    import ooc.training.open_run  # noqa: F401

    torch.set_num_threads(1)
    ways, sound = [], {}
    (work / "sound").mkdir()
    for kind in kinds:
        make, uses = STORES[kind]
        store = work / "sound" / f"{kind}.ooc"
        make(store)
        for number, use in enumerate(uses):
            sound[kind, number] = json.dumps(use(store, False))
            ways.append((kind, number, use))
    return ways, sound


def campaign(work: Path, flips: int, kinds: list[str], seed: int, seconds: float) -> dict[str, Any]:
    """Returns how often each outcome came, and the findings; goes on with what `work` holds."""
    faulthandler.enable()
    results = Results(work)
    clear(work)
    ways, sound = _prepare(work, kinds)
    damaged = work / "damaged.ooc"
    for k in range(flips):
        kind, number, use = ways[k % len(ways)]
        case = f"{kind}/{number} seed {seed} flip {k}"
        if case in results:
            continue
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(work / "sound" / f"{kind}.ooc", damaged)
        where = flip(damaged, random.Random(f"{seed} {k}"))
        what, text = judge(damaged, use, sound[kind, number], work / "out", seconds)
        findings = [] if what.startswith(FINE) else [f"{where}: {what}: {text[-2000:]}"]
        results.add(case, what, findings, store=kind, where=where)
    told = {"flips": len(results), "outcomes": results.counts(), "stores": results.counts("store")}
    return {**told, "findings": results.findings}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="a directory to make, or to go on in; removed if there are no findings")
    parser.add_argument("--flips", type=int, default=500)
    parser.add_argument("--stores", nargs="+", choices=list(STORES), default=list(STORES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60, help="that a use may take")
    a = parser.parse_args()
    result = campaign(a.work.absolute(), a.flips, a.stores, a.seed, a.seconds)
    print(json.dumps(result))
    if result["findings"]:
        sys.exit(1)
    shutil.rmtree(a.work)


if __name__ == "__main__":
    main()
