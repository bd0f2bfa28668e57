"""A run drawn again: its batches, windows and rows are those that were read; the matrix and what it concludes."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ooc
from ooc.budget import divide
from tools.bench import compare, policies, soak, steps
from tools.bench.cost import beside_bound, short_of
from tools.bench.bound import Disk
from tools.bench.rates import Rates
from tools.bench.stores import make_store
from tools.bench.trace import Trace, settings
from tools.make_graph import make_graph

NODES, WIDTH, BATCHES, SEEDS = 4000, 64, 12, 40


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "graph.ooc"
    make_store(path, nodes=NODES, edges=20 * NODES, width=WIDTH, kind="rmat", seed=2)
    return path


@pytest.fixture(scope="module")
def run(store: Path) -> dict[str, Any]:
    """What `tools.bench.steps` prints, of a run with little memory for windows."""
    budget = divide(400_000_000, baseline=240_000_000)
    nodes = []
    with ooc.open(store) as ds:
        seeds = steps.seeds_of_run(NODES, SEEDS, BATCHES, 0)
        loader = ooc.NeighborLoader(ds, [5, 4], input_nodes=seeds, batch_size=SEEDS, edge_ids=False, budget=budget)
        nodes = [batch.n_id.numpy() for batch in loader]
        windows = loader.times()["read"]["items"]
    return {
        "nodes": nodes,
        "budget": asdict(budget),
        "fanout": [5, 4],
        "batches": BATCHES,
        "batch_size": SEEDS,
        "seed": 0,
        "windows": windows,
        "rows_read": loader.rows_read,
        "bytes_read": loader.bytes_read,
        "seconds_per_batch": 0.5,
    }
