"""Errors of too little memory: what they list adds up, and the memory they advise is enough, and hardly more than that."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ooc
from ooc.config.base import RunConfig
from ooc.config.events import EventsConfig
from ooc.config.nodes import TrainConfig
from ooc.config.snapshots import SnapshotsConfig
from ooc.runtime.memory_plan import RUNTIME_BYTES, MemoryPlan, divide
from ooc.sampling.negatives import RandomNegatives
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError
from ooc.stores.process import ProcessMemory
from ooc.stores.sizes import parse_bytes
from ooc.training.registry import mode_of
from ooc.training.snapshot_mode import SnapshotMode
from tests.conftest import MakeStore
from tests.ooc.runtime.test_memory_plan import advised_in, named_bytes
from tests.ooc.temporal_stores import Edges

BASELINE = 6 * 10**8
TIGHT = RUNTIME_BYTES + 6 * 2**20
"""leaves batches of 1.26 MB"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All sources have a long past."""
    return Edges(nodes=30, count=30_000, span=10**6).store(tmp_path_factory.mktemp("advised"), undirected=True)


def configs(store: Path, nodes: Path, out: Path) -> dict[str, RunConfig]:
    common: dict[str, Any] = {"out": out}
    events = {name: EventsConfig(store=store, model=name, **common) for name in ("tgn", "graphmixer")}
    saint = TrainConfig(store=nodes, mode="saint", saint="walk", roots=8, walk_length=2, layers=2, plan=False, **common)
    return {**events, "saint": saint, "snapshots": SnapshotsConfig(store=store, window="1000", by="count", **common)}


def fix_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    """As another process would have it too."""
    monkeypatch.setattr(
        ProcessMemory, "measure", classmethod(lambda cls, memory: cls(parse_bytes(memory), BASELINE, "(--memory)"))
    )


@pytest.mark.cases(2)
@pytest.mark.parametrize("mode", ["tgn", "graphmixer", "saint", "snapshots"])
def test_a_run_with_the_advised_memory_is_made_and_with_less_is_not(
    store: Path, make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    config = configs(store, make_store(num_nodes=200, num_edges=900), tmp_path / "run")[mode]
    fix_baseline(monkeypatch)

    def make(memory: int) -> None:
        with Dataset.open(config.store, memory=str(memory)) as ds:
            mode_of(config)(config, ds).close()

    with pytest.raises(BudgetError, match="leaves nothing for batches") as refused:
        make(10**8)
    least, advised = named_bytes(str(refused.value)), advised_in(str(refused.value))
    assert least < advised < 1.04 * least
    make(advised)
    with pytest.raises(BudgetError, match="leaves nothing for batches"):
        make(int(0.98 * least))


@pytest.mark.parametrize("model", ["gcn", "gat"])
def test_exact_training_of_few_wide_rows_fits_the_advised_memory(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    fix_baseline(monkeypatch)
    x = np.ones((60, 3000), np.float32)
    given: dict[str, Any] = {"store": make_store(num_nodes=60, num_edges=900, x=x), "out": tmp_path / "run", "mode": "full"}
    given |= {"model": model, "layers": 2, "epochs": 1}
    memory = BASELINE + RUNTIME_BYTES + 2**27
    with pytest.raises(BudgetError, match="exact training") as refused:
        ooc.train(memory=str(memory), **given)
    more = advised_in(str(refused.value).removesuffix(" more"))
    assert more < 2**28
    ooc.train(memory=str(memory + more), **given)


def least_memory(read: Callable[[MemoryPlan], Iterable[Any]]) -> tuple[str, int]:
    """(what is said of TIGHT memory, what it advises), which must be enough to read everything."""
    with pytest.raises(BudgetError) as refused:
        list(read(divide(TIGHT, baseline=0)))
    message = str(refused.value)
    found = re.search(r"([0-9.]+ \w+) of ([0-9.]+ \w+) \(.*; about ([0-9.]+ \w+) would do\)", message)
    assert found is not None, message
    need, room, advised = map(parse_bytes, found.groups())
    assert need > room
    list(read(divide(advised, baseline=0)))
    return message, advised


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("early", [False, True])
def test_batches_of_events_fit_the_advised_memory(store: Path, states: bool, early: bool) -> None:
    count = 3000 if early else 1000
    with ooc.open(store) as ds:

        def read(plan: MemoryPlan) -> Iterable[Any]:
            budget = plan.beside_history() if states else plan
            negatives = RandomNegatives(0, 30)
            return ooc.EventLoader(ds, count, events=(3000, 6000), num_neighbors=[10], negatives=negatives, budget=budget)

        message, advised = least_memory(read)
        assert ("beside the state of nodes" in message) == states
        if "events needs" in message:
            with pytest.raises(BudgetError):
                list(read(divide(int(0.95 * advised), baseline=0)))


def test_subgraphs_of_saint_fit_the_advised_memory(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ooc.sampling.saint.PIECE_SLOTS", 1000)
    with ooc.open(make_store(num_nodes=3000, num_edges=60_000)) as ds:

        def read(plan: MemoryPlan) -> Iterable[Any]:
            return ooc.SaintLoader(ds, "node", batch_size=20_000, num_steps=1, sample_coverage=1, seed=0, budget=plan)

        message, advised = least_memory(read)
        assert re.search(r"a subgraph of \d+ nodes and \d+ edges needs", message)
        with pytest.raises(BudgetError):
            list(read(divide(int(0.95 * advised), baseline=0)))


@pytest.mark.parametrize("window", [3000, 8000])
def test_windows_fit_the_advised_memory(store: Path, tmp_path: Path, window: int) -> None:
    config = SnapshotsConfig(store=store, out=tmp_path / "run", window=window, by="count", hidden=64)
    with ooc.open(store) as ds:
        mode = SnapshotMode(config, ds)

        def read(plan: MemoryPlan) -> Iterable[Any]:
            mode.budget = plan
            loader = mode._loader(mode._inputs(), learning=True)
            return loader.run(0, 2, negatives=mode.negatives["train"])

        least_memory(read)
        mode.close()


def test_a_snapshot_fits_the_advised_memory(store: Path) -> None:
    with ooc.open(store) as ds:
        least_memory(lambda plan: ooc.SnapshotLoader(ds, 30_000, by="count", columns=["msg"], budget=plan))
