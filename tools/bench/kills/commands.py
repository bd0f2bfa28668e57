"""The commands that a campaign kills: every verb, every kind of source, and `train` in every mode; and what they need."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from tools.bench.kills.runs import event_flags, make_events, make_store, train_flags, window_flags
from tools.bench.lib.killed_process import Difference
from tools.bench.malformed.cases import NODES, ends, well_formed

STORE, EVENTS, TYPES, RUN, INPUTS = "graph.ooc", "events.ooc", "types.ooc", "model", "../inputs"
GROWN, APPENDED, GROWING_RUN, GRAPHS = "grown.ooc", "appended.ooc", "growing", "graphs.ooc"
LINK_RUN, TYPED_RUN, TYPED_LINK_RUN, GRAPH_RUN = "links", "typed", "typed-links", "pooled"
_TIMES = ["--time", "t", "--edge-features", "msg=m", "--src", "src", "--dst", "dst"]
_TABLE = ["--nodes", "nodes.csv", "--label", "y", "--split", "split", "--x-cols", "f*"]
_OLD, _NEW = ["--edges", "edges.csv", *_TIMES], ["--edges", "later.csv", *_TIMES]
_SMALL: dict[str, Any] = {"hidden": 8, "layers": 2, "epochs": 2, "checkpoint_every": 3}
_SAMPLED = {"fanout": "4,4", "batch_size": 60}
_SHORT = [*train_flags(1, **_SMALL, fanout="4,4"), "--batch-size", "8"]


@dataclass(frozen=True)
class Verb:
    """A command that is killed, in a folder with copies of `needs`."""

    name: str
    words: list[str]
    needs: tuple[str, ...] = ()
    out: str | None = None
    """what the command refuses to overwrite once it is complete"""
    done: Callable[[Path], bool] | None = None
    """of a command that is not to be given twice: whether it had its effect in a folder"""
    settle: tuple[str, ...] = ()
    """a command after which the folder has one form"""
    every: int = 1
    """it is killed in each round, or in each second one, ..."""
    on_disk: bool = False
    """whether rows of node memory or embedding tables are read and written as if they were too many for RAM"""


_INGESTS = {
    "ingest parquet": "--edges I/edges.parquet --undirected --drop-self-loops --drop-duplicates --parts 4 --partitioner stream "
    "--order degree --features x=I/x.npy --labels I/y.npy --random-split 0.6,0.2,0.2 --dtype int8",
    "ingest npy": f"--edges I/edges.npy --num-nodes {NODES} --features x=I/x.npy --labels I/y.npy --train I/train.npy "
    "--normalize standard --dtype bfloat16",
    "ingest gz": "--edges I/edges.csv.gz --time t --edge-features msg=I/msg.npy --nodes I/nodes.csv --birth born --x-cols f*",
    "ingest edgelist": "--edges I/edges.edgelist --id-type str",
    "ingest npz": "--npz I/graph.npz",
    "ingest scipy": f"--edges I/scipy.npz --num-nodes {NODES}",
    "ingest ogb": "--ogb I/ogb",
    "ingest types": "--nodes paper=I/papers.csv --nodes author --edges author:writes:paper=I/writes.csv --label paper=y "
    "--x-cols paper=f* --time author:writes:paper=t --edge-label author:writes:paper=rating --reverse",
    "ingest graphs": "--nodes I/atoms.csv --edges I/bonds.csv --graph-id mol --graphs I/mols.csv --graph-label y "
    "--edge-features edge_attr=length --random-split 0.6,0.2,0.2",
    "ingest ogb types": "--ogb I/mag --reverse",
    "ingest ogb graphs": "--ogb I/mol --undirected",
    "ingest graphbolt": "--graphbolt I/graphbolt",
    "ingest pyg": "--pyg torch_geometric.datasets:KarateClub",
}
"""kind of source -> flags; I is the folder of inputs"""
_BATCHES: dict[str, dict[str, Any]] = {
    "sampled": _SAMPLED,
    "cluster": {"parts": 6},
    "saint": {"roots": 40, "saint_coverage": 2},
    "history": {"parts": 6, "history_dtype": "float32", "refresh": 1},
    "history auto": {"parts": 6, "refresh": "auto", "history_lag": 2, "model": "gcnii"},
    "full": {},
}
_TYPED = {**_SAMPLED, "model": "rsage", "evaluate": "sampled", "eval_every": 1}
"""a run whose authors have an embedding table"""
_LINKS = {**_SAMPLED, "task": "link", "evaluate": "sampled", "eval_every": 1, "batch_size": 300}
_TYPED_LINKS = {**_LINKS, "model": "rsage", "edge_type": "author:writes:paper"}
_POOLED = ["--task", "graph", "--model", "gine", "--hidden", "8", "--layers", "2", "--epochs", "2", "--batch-size", "2"]
_POOLED += ["--checkpoint-every", "2", "--threads", "1", "--seed", "1"]
_ONE_EPOCH = {"hidden": 8, "layers": 2, "epochs": 1}
_RUNS = {
    RUN: (STORE, train_flags(1, hidden=8, layers=2, epochs=2, fanout="4,4")),
    LINK_RUN: (STORE, train_flags(1, **_ONE_EPOCH | _LINKS)),
    TYPED_RUN: (TYPES, train_flags(1, **_ONE_EPOCH | _TYPED)),
    TYPED_LINK_RUN: (TYPES, train_flags(1, **_ONE_EPOCH | _TYPED_LINKS)),
    GRAPH_RUN: (GRAPHS, _POOLED),
}
"""runs that other verbs read -> their store and flags"""
_EVENT_MODELS = {"events tgn": 0, "events graphmixer": 1, "events tgat": 2}
_WINDOW_MODELS = {"snapshots roland": 0, "snapshots recurrent": 1, "snapshots evolvegcn": 3}
_PASSES = {
    "infer": (RUN, "infer", "p.parquet", []),
    "infer csv": (RUN, "infer", "p.csv", []),
    "embed": (RUN, "embed", "e.zarr", []),
    "infer types": (TYPED_RUN, "infer", "p.parquet", []),
    "embed types": (TYPED_RUN, "embed", "e.zarr", ["--node-type", "author"]),
    "infer graphs": (GRAPH_RUN, "infer", "p.parquet", []),
    "rank": (LINK_RUN, "rank", "best.parquet", ["--k", "3"]),
    "rank types": (TYPED_LINK_RUN, "rank", "best.csv", ["--k", "3"]),
}
"""verbs that refuse an output that is there: (the run, the verb, the output, flags)"""


def verbs() -> list[Verb]:
    """Every verb that writes, or that reads what another one wrote, and `train` in every mode."""
    return [*_of_stores(), *_of_runs(), *_of_modes()]


def _of_stores() -> list[Verb]:
    tables = ("edges.csv", "nodes.csv")
    new = ["ingest", "new.ooc"]
    grows = Verb("append", ["append", GROWN, *_NEW, *_TABLE], (GROWN, "later.csv", "nodes.csv"), done=_is_appended)
    split = ["split", GROWN, "--random-split", "0.5,0.25,0.25", "--replace"]
    return [
        Verb("ingest csv", [*new, *_OLD, *_TABLE], tables, "new.ooc"),
        *(Verb(name, [*new, *flags.replace("I/", f"{INPUTS}/").split()], (), "new.ooc") for name, flags in _INGESTS.items()),
        Verb(grows.name, grows.words, grows.needs, done=grows.done, settle=("compact", GROWN)),
        Verb("compact", ["compact", APPENDED], (APPENDED,)),
        Verb("split", split, (GROWN,), done=_has_versions, settle=("compact", GROWN)),
        Verb("reduce", ["reduce", GROWN, "pca:1"], (GROWN,), done=_has_versions, settle=("compact", GROWN)),
        Verb("verify", ["verify", APPENDED], (APPENDED,), every=4),
        Verb("info", ["info", STORE], (STORE,), every=8),
        Verb("init", ["init", STORE], (STORE,), every=8),
        Verb("machine", ["machine", "."], (STORE,), every=16),
        Verb("example", ["example", "graph", "demo"], every=2),
    ]


def _of_runs() -> list[Verb]:
    sampled = train_flags(1, **_SMALL, **_SAMPLED)[1:]  # with a plan
    plan = ["plan", STORE, *train_flags(1, **_SMALL, parts=6)[1:], "--mode", "history"]
    found = [
        Verb("plan", plan, (STORE,), every=4),
        Verb("report", ["report", RUN], (RUN,), every=2),
        Verb("train with a plan", ["train", STORE, *sampled, "--out", "run"], (STORE,), every=4),
        Verb("train appended", ["train", APPENDED, *_SHORT, "--out", "run"], (APPENDED,)),
        Verb("train grown", ["train", APPENDED, *_SHORT, "--out", GROWING_RUN, "--resume", "--grown"], (APPENDED, GROWING_RUN)),
    ]
    for name, (run, verb, out, flags) in _PASSES.items():
        store = _RUNS[run][0]
        found.append(Verb(name, [verb, store, "--checkpoint", run, "--out", out, *flags], (store, run), out))
    return found


def _of_modes() -> list[Verb]:
    found = []
    for name, settings in _BATCHES.items():
        flags = train_flags(1, **_SMALL | settings, mode=name.split()[0])
        if name == "full":  # scores every epoch by itself
            at = flags.index("--evaluate")
            del flags[at : at + 4]
        found.append(Verb(name, ["train", STORE, *flags, "--out", "run"], (STORE,)))
    typed = ["train", TYPES, *train_flags(1, **_SMALL | _TYPED), "--out", "run"]
    found += [Verb("types", typed, (TYPES,)), Verb("types on disk", typed, (TYPES,), on_disk=True)]
    for name, store, settings in (("links", STORE, _LINKS), ("links types", TYPES, _TYPED_LINKS)):
        found.append(Verb(name, ["train", store, *train_flags(1, **_SMALL | settings), "--out", "run"], (store,)))
    found.append(Verb("graphs", ["train", GRAPHS, *_POOLED, "--out", "run"], (GRAPHS,)))
    often = {"checkpoint-every": 4}
    for name, seed in _EVENT_MODELS.items():
        flags = event_flags(seed, **often, model=name.split()[1])
        if "tgn" not in name:
            for own in ("--memory-dim", "--past"):
                at = flags.index(own)
                del flags[at : at + 2]
        found.append(Verb(name, ["train", EVENTS, *flags, "--out", "run"], (EVENTS,)))
    on_disk = ["train", EVENTS, *event_flags(1, **often), "--out", "run"]
    found.append(Verb("events on disk", on_disk, (EVENTS,), on_disk=True))
    for name, seed in _WINDOW_MODELS.items():
        found.append(Verb(name, ["train", EVENTS, *window_flags(seed, **often), "--out", "run"], (EVENTS,)))
    return found


def _is_appended(folder: Path) -> bool:
    from ooc.stores.info import describe

    return bool(describe(folder / GROWN)["appends"])


def _has_versions(folder: Path) -> bool:
    from ooc.stores.metadata import version_of

    return bool(version_of(folder / GROWN))


def succeed(words: list[str]) -> None:
    """A command that nobody kills."""
    from ooc.cli import main as cli

    if cli.main(words):
        raise Difference(f"ooc {' '.join(words)} fails before anything is killed")


def make_inputs(work: Path, nodes: int, needs: set[str]) -> None:
    """Make what commands need: input files, stores and runs."""
    rng = np.random.default_rng(0)
    pairs = rng.integers(0, 40, (120, 2)).tolist()
    head, lines = "src,dst,t,m", [f"n{a},n{b},{t},{t % 7}" for t, (a, b) in enumerate(pairs)]
    described = [f"n{v},{v % 3},{('train', 'val', 'test')[v % 3]},{v},{-v}" for v in range(40)]
    tables = {"edges": [head, *lines[:60]], "later": [head, *lines[60:]], "nodes": ["id,y,split,f1,f2", *described]}
    for name, rows in tables.items():
        (work / f"{name}.csv").write_text("\n".join(rows))
    _make_sources(work / "inputs")
    os.chdir(work)
    if STORE in needs:
        make_store(work / STORE, nodes)
    if EVENTS in needs:
        make_events(work / EVENTS)
    if GRAPHS in needs:
        succeed(["ingest", GRAPHS, *_INGESTS["ingest graphs"].replace("I/", "inputs/").split(), "--x-cols", "f*"])
    if TYPES in needs:
        make_types(work / TYPES, nodes)
    for name in sorted(needs & {GROWN, APPENDED}):
        succeed(["ingest", name, *_OLD, *_TABLE])
    if GROWING_RUN in needs:
        succeed(["train", APPENDED, *_SHORT, "--epochs", "1", "--out", GROWING_RUN])
    if APPENDED in needs:
        succeed(["append", APPENDED, *_NEW])
    for run in sorted(needs & _RUNS.keys()):
        store, flags = _RUNS[run]
        succeed(["train", store, *flags, "--out", run])


def make_types(path: Path, papers: int) -> Path:
    """Make a random graph of papers, with features and classes, and as many authors, without features."""
    from ooc.stores.build import write_hetero_store
    from ooc.stores.graph import Graph

    rng = np.random.default_rng(0)
    order = rng.permutation(papers)
    labels: dict[str, Any] = {"y": rng.integers(0, 3, papers), "task": "multiclass", "num_classes": 3}
    splits = {name: order[k::3] for k, name in enumerate(("train", "val", "test"))}
    nodes = {"paper": {"x": rng.standard_normal((papers, 8), dtype=np.float32), "splits": splits, **labels}, "author": {}}
    author, paper = rng.integers(0, papers, (2, 4 * papers))
    ends = {"num_nodes": papers, "num_sources": papers}
    edges = {
        ("author", "writes", "paper"): Graph.from_edges(author, paper, **ends),
        ("paper", "rev_writes", "author"): Graph.from_edges(paper, author, **ends),
    }
    back = {("paper", "rev_writes", "author"): ("author", "writes", "paper")}
    return write_hetero_store(path, nodes, edges, reverse_of=back)


def _make_sources(folder: Path) -> None:
    """An input of every kind."""
    folder.mkdir()
    well_formed(folder)
    src, dst = ends()
    sp.save_npz(folder / "scipy.npz", sp.coo_matrix((np.ones(len(src)), (src, dst)), shape=(NODES, NODES)))
    (folder / "edges.edgelist").write_text("".join(f"n{a} n{b}\n" for a, b in zip(src, dst, strict=True)))
    bolt = folder / "graphbolt"
    bolt.mkdir()
    arrays = {"edges": ends(), "feat": np.ones((NODES, 3)), "train": np.arange(8), "labels": np.arange(8) % 3}
    for name, array in arrays.items():
        np.save(bolt / f"{name}.npy", array)
    items = [{"name": name, "format": "numpy", "path": f"{file}.npy"} for name, file in (("seeds", "train"), ("labels",) * 2)]
    about = {
        "graph": {"nodes": [{"num": NODES}], "edges": [{"format": "numpy", "path": "edges.npy"}]},
        "feature_data": [{"name": "feat", "domain": "node", "format": "numpy", "path": "feat.npy"}],
        "tasks": [{"name": "node_classification", "num_classes": 3, "train_set": [{"data": items}]}],
    }
    (bolt / "metadata.yaml").write_text(json.dumps(about))
