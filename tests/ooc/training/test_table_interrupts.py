"""Ctrl-C while tables are scored: it ends the ranking, and a resumed run makes it."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import HeteroData

import ooc
from ooc.config.base import RunConfig
from ooc.config.lightgcn import LightGCNConfig
from ooc.history.bucket_table import BucketTable
from ooc.layerwise.filtered_ranks import TableInOrder
from ooc.training import checkpoint
from ooc.training.loop import train
from ooc.training.table_memory import TableMemory
from tests.ooc.runs import KillAt, curve
from tests.ooc.tables import make_shop, table_config

MODES = ["mf", "complex", "lightgcn"]


def config(store: Path, out: Path, model: str, **settings: Any) -> RunConfig:
    if model != "lightgcn":
        return table_config(store, out, **{"model": model, "buckets": 5, "resident": 2, **settings})
    small: dict[str, Any] = {"batch_size": 32, "hidden": 8, "epochs": 3, "threads": 1, "eval_every": 1}
    return LightGCNConfig(store=store, out=out, **{**small, **settings})


@pytest.mark.cases(1)
@pytest.mark.parametrize("model", MODES)
def test_a_resumed_run_makes_the_ranking_that_ctrl_c_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """Buckets are on disk, and some are changed and not written yet."""
    make_shop(tmp_path / "shop.ooc")
    monkeypatch.setattr(TableMemory, "room", property(lambda self: 3))
    train(config(tmp_path / "shop.ooc", tmp_path / "whole", model, checkpoint_every=1000))
    ranked, passes = TableInOrder if model == "lightgcn" else BucketTable, []
    blocks = ranked.blocks

    def interrupted(table: Any, *kept: Any) -> Iterator[Any]:
        passes.append(None)
        for block in blocks(table, *kept):
            if len(passes) == 2:
                os.kill(os.getpid(), signal.SIGINT)
            yield block
            assert len(passes) != 2, "the ranking went on"

    monkeypatch.setattr(ranked, "blocks", interrupted)
    cut = config(tmp_path / "shop.ooc", tmp_path / "cut", model, checkpoint_every=1000)
    with pytest.raises(KeyboardInterrupt):
        train(cut)
    saved = checkpoint.load(cut.out)
    assert saved is not None
    assert saved["state"]["step"] > 0, "behind the last step of an epoch, and before its scores"
    assert not list(cut.out.glob("embeddings*"))
    train(cut, resume=True)
    assert curve(cut.out) == curve(tmp_path / "whole")


class InterruptWhileScored(KillAt):
    """Ctrl-C a second after a step."""

    sent = 0.0

    def step(self, epoch: int, step: int, total_steps: int, loss: float) -> None:
        def send() -> None:
            self.sent = time.monotonic()
            os.kill(os.getpid(), signal.SIGINT)

        if total_steps == self.total_steps:
            threading.Timer(1.0, send).start()


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("model", MODES)
def test_ctrl_c_ends_a_long_ranking_at_once(tmp_path: Path, model: str) -> None:
    """Of 20,000 users among 60,000 items, a few seconds."""
    rng, data = np.random.default_rng(0), HeteroData()
    data["user"].num_nodes, data["item"].num_nodes = 20_000, 60_000
    ends = np.stack([rng.permutation(20_000), rng.integers(0, 60_000, 20_000)])
    data["user", "likes", "item"].edge_index = torch.from_numpy(np.concatenate([ends, ends[::-1] % [[20_000], [60_000]]], 1))
    ooc.from_data(data, tmp_path / "shop.ooc").close()
    settings: dict[str, Any] = {"val": 0.5, "test": 0.1, "batch_size": 100_000, "hidden": 128, "epochs": 1}
    settings |= {} if model == "lightgcn" else {"buckets": 1, "resident": 1}
    long = config(tmp_path / "shop.ooc", tmp_path / "run", model, **settings)
    watcher = InterruptWhileScored(0)
    with pytest.raises(KeyboardInterrupt):
        train(long, watcher=watcher)
    assert watcher.sent, "the ranking took a second at least"
    assert time.monotonic() - watcher.sent < 2
    saved = checkpoint.load(long.out)
    assert saved is not None
    assert (saved["state"]["epoch"], saved["state"]["step"]) == (0, 1)
