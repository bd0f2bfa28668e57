"""Packed batches: a disk that fails, what is refused, and what is left of memory and disk."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ooc.loading import choose_read_strategy
from ooc.stores.build import write_store
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError, ConfigError, StoreError
from ooc.stores.graph import Graph
from tests.conftest import random_edges
from tests.ooc.batches import same
from tests.ooc.loading.shared_pass.scanning import budget, in_memory, loader_of, packing


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


@pytest.mark.parametrize("fault", [errno.EIO, errno.EROFS])
def test_a_disk_that_fails_otherwise_is_not_asked_for_less(ds: Dataset, monkeypatch: Any, fault: int) -> None:
    def fail(*given: Any) -> None:
        raise OSError(fault, os.strerror(fault))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(StoreError, match=f"cannot write .*: {os.strerror(fault)}; ") as caught:
        next(iter(packing(ds)))
    assert "pack" not in str(caught.value)


@pytest.mark.parametrize("refused", [errno.EOPNOTSUPP, errno.EINVAL])
def test_a_disk_that_allocates_nothing_beforehand_will_do(path: Any, ds: Dataset, monkeypatch: Any, refused: int) -> None:
    def no(*given: Any) -> None:
        raise OSError(refused, os.strerror(refused))

    monkeypatch.setattr(os, "posix_fallocate", no)
    assert same(list(packing(ds)), in_memory(path)[0][:15])


def test_what_pack_cannot_be_is_refused(ds: Dataset, tmp_path: Path) -> None:
    for pack, words in (
        ("much", "`pack`: 'much' is not a size"),
        (1.5, "pack is a size, such as '12GB', or a pair of it and a folder, not 1.5"),
        (("1GB", tmp_path / "none"), "none is no folder"),
        (("1GB", 5), r"or a pair of it and a folder, not \('1GB', 5\)"),
    ):
        with pytest.raises(ConfigError, match=words):
            packing(ds, pack=pack)
    with pytest.raises(ConfigError, match="pack needs a first layer that begins with the sum"):
        packing(ds, pre_aggregation=None)
    with pytest.raises(BudgetError, match=r"a packed batch takes .* of disk and `pack` leaves 4.1 kB, half of it: give"):
        list(packing(ds, pack="10kB"))
    with pytest.raises(BudgetError, match="a batch of 20 seeds needs"):
        list(packing(ds, budget=budget(100_000)))
    list(packing(ds, pack=("400kB", tmp_path)))
    assert not os.listdir(tmp_path)


def test_a_folder_that_one_may_not_write_to_is_refused_before_any_work(ds: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(
        ConfigError, match=r"pack: this process may not write to .*: name another folder, as pack = \('400kB', folder\)"
    ):
        packing(ds)


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
from tests.ooc.loading.shared_pass.scanning import packing

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
from tests.ooc.loading.shared_pass.scanning import budget

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
