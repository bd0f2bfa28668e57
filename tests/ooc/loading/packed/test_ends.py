"""Packed batches: failures come in order, and an epoch left halfway leaves nothing behind, on the disk neither."""

import errno
import gc
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ooc.loading import choose_read_strategy
from ooc.loading.feature_cache import registry_of
from ooc.runtime.keyed_random import Cursor
from ooc.stores.build import write_store
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError, ConfigError, StoreError
from ooc.stores.graph import Graph
from tests.conftest import random_edges
from tests.ooc.batches import same
from tests.ooc.loading.packed.packing import packing
from tests.ooc.loading.shared_scan.scanning import budget, in_memory, loader_of, outcome, piece_threads
from tests.ooc.loading.strategies import over, with_stage
from tests.ooc.loading.test_superbatch import Behind, Broken
from tests.waiting import NoMoreThreads, eventually, no_threads


def open_scratch() -> list[str]:
    """Files without a name that this process has open."""
    found = []
    for each in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{each}"))
    return [name for name in found if "(deleted)" in name and "/memfd:" not in name]


@pytest.mark.cases(2)
@pytest.mark.parametrize(("bad", "fanout"), [(3, [4, 3]), (47, [2, -1]), (155, [4, 3]), (299, [1, -1])])
def test_a_row_that_cannot_be_read_fails_at_its_batch(path: Any, ds: Dataset, x: Any, bad: int, fanout: list[int]) -> None:
    want = in_memory(path, fanout=fanout)[0][:15]
    rows = in_memory(path, fanout=fanout, pre_aggregation=None)[0]
    first = next(step for step, batch in enumerate(rows) if bad in batch.n_id)
    loader = packing(ds, fanout=fanout)
    over(loader, Behind(Broken(x, bad)))
    got = []
    with pytest.raises(StoreError, match=f"row {bad} cannot") as caught:
        got.extend(loader)
    assert caught.value.__notes__ == [f"in stage 'pack' at step {first} of the pipeline"]
    assert same(got, want[:first])
    assert not registry_of(loader.strategy.disk_rows)._readers


@pytest.mark.parametrize("failing", [0, 1, 11])
def test_a_failing_sample_comes_after_the_batches_before_it(path: Any, ds: Dataset, failing: int) -> None:
    loader = packing(ds)
    sample = loader.strategy.stages.sample.sample

    def fail(cursor: Cursor) -> Any:
        if cursor.step == failing:
            raise BudgetError("mine")
        return sample(cursor)

    with_stage(loader, "sample", fail)
    got, message, notes = outcome(loader)
    assert (message, notes) == ("mine", [f"in stage 'sample' at step {failing} of the pipeline"])
    assert same(got, in_memory(path)[0][:failing])


@pytest.mark.cases(4)
@pytest.mark.parametrize("taken", [0, 1, 5, 14])
@pytest.mark.parametrize("how", ["closed", "dropped", "raised"])
def test_an_epoch_left_halfway_leaves_nothing(path: Any, ds: Dataset, taken: int, how: str) -> None:
    loader = packing(ds)
    before = open_scratch()

    def leave() -> None:
        epoch = iter(loader)
        for _ in range(taken):
            next(epoch)
        if how == "closed":
            epoch.close()
            epoch.close()
            assert list(epoch) == []
        if how == "raised":
            raise ZeroDivisionError

    for _ in range(2):
        with suppress(ZeroDivisionError):
            leave()
        gc.collect()
        assert eventually(lambda: no_threads() and not piece_threads())
        assert not registry_of(loader.strategy.disk_rows)._readers
        assert eventually(lambda: open_scratch() == before)
    loader.set_epoch(0)
    assert same(list(loader), in_memory(path)[0][:15])
    assert os.listdir(Path(path).parent) == ["t.ooc"]


@pytest.mark.cases(2)
@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("at", range(6))
def test_an_epoch_that_cannot_begin_leaves_nothing(path: Any, ds: Dataset, monkeypatch: Any, at: int, error: Any) -> None:
    loader, before = packing(ds), open_scratch()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda thread, start=NoMoreThreads(at, error): start(thread))
        with pytest.raises(type(error)):
            iter(loader)
    assert eventually(lambda: no_threads() and not piece_threads())
    assert not registry_of(loader.strategy.disk_rows)._readers
    assert eventually(lambda: open_scratch() == before)


@pytest.mark.parametrize("call", ["posix_fallocate", "pwritev"])
def test_a_disk_that_is_full_is_named_with_what_to_do(path: Any, ds: Dataset, monkeypatch: Any, call: str) -> None:
    """At the batch that did not fit; those before it come."""
    real, calls = getattr(os, call), 0

    def full(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 9:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*given)

    monkeypatch.setattr(os, call, full)
    loader, got = packing(ds), []
    with pytest.raises(StoreError, match=r"cannot write .*: No space left .*choose another disk, or give less to `pack`$"):
        got.extend(loader)
    assert len(got) < 15
    assert same(got, in_memory(path)[0][: len(got)])


@pytest.mark.parametrize("refused", [errno.EOPNOTSUPP, errno.EINVAL])
def test_a_disk_that_allocates_nothing_beforehand_will_do(path: Any, ds: Dataset, monkeypatch: Any, refused: int) -> None:
    def no(*given: Any) -> None:
        raise OSError(refused, os.strerror(refused))

    monkeypatch.setattr(os, "posix_fallocate", no)
    assert same(list(packing(ds)), in_memory(path)[0][:15])


def test_what_pack_cannot_be_is_refused(ds: Dataset, tmp_path: Path) -> None:
    for pack, words in (
        ("much", "'much' is not a size"),
        (1.5, "pack is a size, such as '12GB', or a pair of it and a folder, not 1.5"),
        (("1GB", tmp_path / "none"), "none is no folder"),
    ):
        with pytest.raises(ConfigError, match=words):
            packing(ds, pack=pack)
    with pytest.raises(ConfigError, match="pack is for models whose first layer adds up"):
        packing(ds, pre_aggregation=None)
    with pytest.raises(BudgetError, match=r"a packed batch takes .* of disk and `pack` leaves 4.1 kB, half of it: give"):
        list(packing(ds, pack="10kB"))
    with pytest.raises(BudgetError, match="a batch of 20 seeds needs"):
        list(packing(ds, budget=budget(100_000)))
    list(packing(ds, pack=("400kB", tmp_path)))
    assert not os.listdir(tmp_path)


def test_rows_that_fit_in_memory_are_not_packed(path: Any, ds: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose_read_strategy, "scan_pays", lambda rows, pool: False)
    with pytest.warns(UserWarning, match="pack changes nothing: all feature rows stay in memory"):
        loader = loader_of(ds, pack="1MB")
    assert same(list(loader), in_memory(path)[0][:15])
    assert loader.bytes_written == 0


def test_two_loaders_at_once_share_memory_and_disk(path: Any, ds: Dataset) -> None:
    one, other = packing(ds, pack="2MB"), packing(ds, seed=4, fanout=[2, 2], pack="2MB")
    got = list(zip(one, other, strict=True))
    assert same([a for a, _ in got], in_memory(path)[0][:15])
    assert same([b for _, b in got], in_memory(path, seed=4, fanout=[2, 2])[0][:15])
    assert one.times()["pack"]["items"] < other.times()["pack"]["items"]


_KILLED = """
import os, signal, sys
import numpy as np
from ooc.loading import choose_read_strategy
from ooc.stores.dataset import Dataset
from tests.ooc.loading.packed.packing import packing

choose_read_strategy.scan_pays = lambda rows, pool: True
with Dataset.open(sys.argv[1]) as ds:
    epoch = iter(packing(ds))
    for _ in range(5):
        next(epoch)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.alone
def test_a_process_that_is_killed_leaves_no_file(path: Any) -> None:
    done = subprocess.run([sys.executable, "-c", _KILLED, str(path)], check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL
    assert os.listdir(Path(path).parent) == ["t.ooc"]


_PEAK = """
import sys
import numpy as np
from ooc.graph.aggregation import PreAggregation
from ooc.loading import choose_read_strategy
from ooc.loading.neighbor_loader import NeighborLoader
from ooc.runtime.memory import MemoryMeter
from ooc.stores.dataset import Dataset
from ooc.stores.process import resident_bytes
from tests.ooc.loading.shared_scan.scanning import budget

choose_read_strategy.scan_pays = lambda rows, pool: True
with Dataset.open(sys.argv[1]) as ds:
    settings = {"batch_size": 256, "pre_aggregation": PreAggregation("mean", 8), "budget": budget(int(sys.argv[2]))}
    loader = NeighborLoader(ds, [10, 10], np.arange(0, ds.num_nodes, 4), pack="60MB", shuffle=True, seed=0, **settings)
    for _, batch in zip(range(3), loader):  # loads the kernels
        pass
    del batch
    before = resident_bytes()[0]
    with MemoryMeter("test", period_s=0.001) as meter:
        for batch in loader:
            pass
    print(meter.peak - before, loader.times()["pack"]["items"])
"""


@pytest.mark.alone
def test_an_epoch_stays_within_the_memory(tmp_path: Path) -> None:
    """A process of its own, as freed memory is used again."""
    nodes, room = 30_000, 100 * 10**6
    x = np.random.default_rng(0).standard_normal((nodes, 256), dtype=np.float32)
    store = write_store(tmp_path / "wide.ooc", Graph.from_edges(*random_edges(nodes, 10 * nodes), nodes), x=x)
    command = [sys.executable, "-c", _PEAK, str(store), str(room)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    grown, groups = map(int, done.stdout.split())
    assert groups > 5
    assert 0 < grown < room
