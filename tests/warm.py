"""A short run of some modes in the process that tests fork others from, which need not load the same modules and kernels again.

An `ooc train` of such a size then takes a second of a core, not two and a half.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ooc.config.modes import class_of
from ooc.runtime.restoring import settings_restored
from ooc.stores.build import write_store
from ooc.stores.graph import Graph
from ooc.training.loop import train

NODES = 40
RUNS: list[dict[str, Any]] = [{"fanout": [3, 3], "batch_size": 8}, {"mode": "full", "layers": 2}]


def _store(path: Path) -> Path:
    rng = np.random.default_rng(0)
    src, dst = rng.integers(0, NODES, (2, 4 * NODES))
    x, y, order = rng.standard_normal((NODES, 8), dtype=np.float32), rng.integers(0, 3, NODES), rng.permutation(NODES)
    splits = {name: order[k::3] for k, name in enumerate(("train", "val", "test"))}
    return write_store(path, Graph.from_edges(src, dst, NODES), x=x, y=y, task="multiclass", num_classes=3, splits=splits)


with tempfile.TemporaryDirectory(prefix="ooc-tests-") as _folder, settings_restored():
    torch.set_num_threads(1)  # threads of OpenMP do not live on in a fork
    _given: dict[str, Any] = {"store": _store(Path(_folder, "s.ooc")), "hidden": 8, "epochs": 1, "threads": 1, "plan": False}
    for _number, _run in enumerate(RUNS):
        train(class_of(_run)(**_given, **_run, out=Path(_folder, f"run{_number}")))
