"""Embedding tables on WN18RR, CoDEx-M and Gowalla: filtered MRR over all entities, Recall@20 over all items, and seconds.

    python -m tools.scores.tables DATA OUT --only wn18rr-complex

DATA has `wn18rr` and `codex-m`, each with {train,valid,test}.txt.gz of tab-separated triples of words, and
`gowalla/gowalla.npz` (train_user, train_item, test_user, test_item). Stores are built in OUT, and a run that is there goes on.
Prints JSON.
"""

import argparse
import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import ooc

_PRODUCTS: dict[str, Any] = {"mode": "table", "model": "complex", "hidden": 256, "reciprocal": True, "loss": "softmax"}
_PRODUCTS |= {"correct_negatives": True, "batch_size": 512, "lr": 0.3, "init": 0.001, "eval_every": 10}
_DISTANCES: dict[str, Any] = {"mode": "table", "model": "rotate", "hidden": 512, "reciprocal": True, "loss": "adversarial"}
_DISTANCES |= {"margin": 6.0, "batch_size": 256, "lr": 0.15, "init": 0.05, "eval_every": 9}
_PROPAGATED: dict[str, Any] = {"mode": "lightgcn", "loss": "softmax", "similarity": "cosine", "temperature": 0.1, "l2": 4.0}
_PROPAGATED |= {"ratio": 1024, "batch_size": 8192, "lr": 0.01, "init": 0.05, "eval_splits": ["test"], "eval_every": 1000}
_PROPAGATED |= {"lr_schedule": "cosine", "epochs": 12, "norm_power": 0.5}
_HELD_OUT = "gowalla-held-out"
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "wn18rr-complex": ("wn18rr", {**_PRODUCTS, "ratio": 1024, "regularizer_weight": 0.1, "epochs": 30}),
    "wn18rr-rotate": ("wn18rr", {**_DISTANCES, "ratio": 512, "epochs": 58}),
    "codex-m-complex": (
        "codex-m",
        {**_PRODUCTS, "hidden": 384, "ratio": 512, "regularizer_weight": 0.03, "lr_schedule": "cosine", "epochs": 30},
    ),
    "gowalla-lightgcn": ("gowalla", _PROPAGATED),
    "gowalla-lightgcn-held-out": (_HELD_OUT, {**_PROPAGATED, "eval_splits": ["val"]}),
}
"""name -> (data, settings); those of links held out from training are to choose settings by, and are run where asked for"""
_SPLITS = {"train": "train", "valid": "val", "test": "test"}


def knowledge_graph(folder: Path, store: Path) -> None:
    """Build a store from files of triples: entities are words, relations labels of edges.

    >>> knowledge_graph(Path("data/wn18rr"), Path("wn18rr.ooc"))
    """
    columns: dict[str, list[str]] = {name: [] for name in ("head", "relation", "tail", "split")}
    for file, split in _SPLITS.items():
        with gzip.open(folder / f"{file}.txt.gz", "rt") as lines:
            for line in lines:
                for name, word in zip(columns, (*line.rstrip("\n").split("\t"), split), strict=True):
                    columns[name].append(word)
    edges = store.with_suffix(".parquet")
    pq.write_table(pa.table(columns), edges)
    ooc.ingest(store, edges=edges, src="head", dst="tail", edge_label="relation", edge_split="split")


def users_and_items(file: Path, store: Path, held_out: bool = False) -> None:
    """Build a store of two node types from pairs of training and test.

    held_out: without those of test; a tenth of training's, at random, are of validation instead, to choose settings by.

    >>> users_and_items(Path("data/gowalla/gowalla.npz"), Path("gowalla.ooc"))
    """
    found, visits, parts = np.load(file), ("user", "visits", "item"), ("train",) if held_out else ("train", "test")
    columns = {name: np.concatenate([found[f"{part}_{name}"] for part in parts]) for name in ("user", "item")}
    split = np.repeat(parts, [len(found[f"{part}_user"]) for part in parts])
    if held_out:
        split = np.where(np.random.default_rng(0).random(len(split)) < 0.1, "val", split)
    edges = store.with_suffix(".parquet")
    pq.write_table(pa.table({name: column.astype(np.int64) for name, column in columns.items()} | {"split": split}), edges)
    given: dict[str, Any] = {"nodes": {"user": None, "item": None}, "edges": {visits: edges}, "src": "user", "dst": "item"}
    ooc.ingest(store, edge_split={visits: "split"}, **given)


def score(data: Path, out: Path, name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Train a recipe in OUT, or go on with it; its scores and seconds."""
    graph, own = RECIPES[name]
    store, run = out / f"{graph}.ooc", out / name
    if not store.exists():
        if graph in ("gowalla", _HELD_OUT):
            users_and_items(data / "gowalla/gowalla.npz", store, graph == _HELD_OUT)
        else:
            knowledge_graph(data / graph, store)
    result = ooc.train(store=store, out=run, resume=run.exists(), **{**own, **settings})
    about = {each: result[each] for each in ("train_seconds", "evaluate_seconds", "epochs", "best_epoch", "peak_rss_bytes")}
    return {**result["metrics"], **about}


def main() -> None:
    """Parse the command line, train, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--only", nargs="+", choices=RECIPES, default=[name for name in RECIPES if _HELD_OUT not in RECIPES[name]]
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--settings", type=json.loads, default={}, help="others than the recipes', as JSON, of a run of its own OUT"
    )
    parser.add_argument("--epochs", type=int, help="other than the recipe's: more of them go on with a run that is there")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    settings = given.settings | {"seed": given.seed} | ({} if given.epochs is None else {"epochs": given.epochs})
    print(json.dumps({name: score(given.data, given.out, name, settings) for name in given.only}))


if __name__ == "__main__":
    main()
