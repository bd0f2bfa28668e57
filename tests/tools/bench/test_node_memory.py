"""The node memory's benchmark: what it writes beforehand, and what a run counts."""

from argparse import Namespace
from pathlib import Path

import numpy as np

import ooc
from ooc.temporal.node_memory import NodeMemory, unpack_time
from tests.ooc.temporal_stores import Edges
from tools.bench.full.node_memory import fill, train


def test_every_row_is_written_beforehand(tmp_path: Path) -> None:
    store = Edges(nodes=700).store(tmp_path, undirected=True)
    with ooc.open(store) as ds:
        memory = NodeMemory.create(tmp_path / "m", ds, 5, max_bytes=2**10)
        log = memory.history.log.total
        assert fill(memory.history, 5) >= 700 * (5 * 4 + 8 + 4)
        assert memory.history.log.total == log
        found = memory.history.fetch(0, np.arange(700))
        rows, times = unpack_time(found.rows[0], ds.events.dtype)
        assert (rows != 0).all()
        assert (times == 0).all()
        assert (found.steps == 0).all()
        memory.history.close()


def test_a_run_counts_its_events(tmp_path: Path) -> None:
    store = Edges(count=600).store(tmp_path, undirected=True)
    found = train(Namespace(work=tmp_path, child=store, limit="", memory="", batch_size=20, memory_dim=8, steps=5))
    assert found["steps"] == 5
    assert found["events"] >= 5 * 20
    assert found["events_per_s"] == found["events"] / found["seconds"]
    assert all(np.isfinite(found["losses"]))
    assert found["bytes_per_event"]["history_bytes_written"] > 0
    assert not (tmp_path / "nodememory").exists()
