"""What is particular to the pread engine: its fallback, its failures, its slices of work."""

import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.stores.errors import ConfigError, StoreError
from ooc.stores.io.engines import open_engine
from ooc.stores.io.engines.pread import PreadEngine
from ooc.stores.io.engines.tasks import READ_COST_BYTES, TASK_COST_BYTES, Gate, run_slices, slices
from ooc.stores.io.read_plan import plan_reads
from ooc.stores.io.segments import Segments, map_segments
from ooc.stores.io.threads import SharedPool


@pytest.fixture
def segments(tmp_path: Path) -> Segments:
    data = np.random.default_rng(0).integers(0, 256, 500_000).astype(np.uint8)
    (tmp_path / "0").write_bytes(data.tobytes())
    return Segments((tmp_path / "0",), np.array([len(data)]))


def bytes_at(engine: PreadEngine, positions: list[int]) -> list[int]:
    plan = plan_reads(np.array(positions), 1, count=500_000, gap_bytes=0)
    out = np.zeros(len(positions), np.uint8)
    engine.gather(plan, out)
    return out.tolist()


@pytest.mark.usefixtures("no_o_direct")
def test_where_o_direct_is_refused_reads_are_buffered_and_the_reason_is_told(segments: Segments) -> None:
    engine = PreadEngine(segments)
    assert "refuses O_DIRECT" in str(engine.reason)
    data = segments.paths[0].read_bytes()
    assert bytes_at(engine, [499_999, 0, 4096]) == [data[499_999], data[0], data[4096]]
    engine.close()


def test_a_file_that_shrinks_while_open_is_named_with_the_byte(segments: Segments) -> None:
    engine = PreadEngine(segments)
    os.truncate(segments.paths[0], 3 * 4096)
    assert len(bytes_at(engine, [9_999])) == 1
    with pytest.raises(StoreError, match=f"{segments.paths[0]} cannot be read at byte 12288: the file ends there"):
        bytes_at(engine, [12_300])
    engine.close()


def test_an_error_of_the_system_is_named(segments: Segments, tmp_path: Path) -> None:
    engine = PreadEngine(segments)
    writable = os.open(tmp_path / "w", os.O_WRONLY | os.O_CREAT)
    os.dup2(writable, int(engine._fds[0]))  # reading a write-only descriptor is EBADF
    os.close(writable)
    with pytest.raises(StoreError, match=f"{segments.paths[0]} cannot be read at byte 0: Bad file descriptor"):
        bytes_at(engine, [5])
    engine.close()


def test_a_failed_opening_leaves_no_descriptor(segments: Segments, tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    broken = Segments((*segments.paths, tmp_path / "absent"), np.array([4096, 4096]))
    for name in ("pread", "mmap"):
        with pytest.raises(StoreError, match="absent is missing"):
            open_engine(name, broken)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(StoreError, match=f"{loop} cannot be opened: Too many levels of symbolic links"):
        PreadEngine(Segments((*segments.paths, loop), np.array([4096, 4096])))
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_unknown_engine_is_a_config_error(segments: Segments) -> None:
    with pytest.raises(ConfigError, match="no engine is called 'spdk'; there are auto, gds, mmap, pread, uring"):
        open_engine("spdk", segments)


def test_the_last_user_of_a_shared_pool_ends_its_threads() -> None:
    pool = SharedPool("test-shared", 4)

    def alive() -> int:
        return sum(thread.name.startswith("test-shared") for thread in threading.enumerate())

    first, second = pool.acquire(), pool.acquire()
    assert first is second
    assert list(first.map(abs, [-1, -2])) == [1, 2]
    pool.release()
    assert alive() > 0
    pool.release()
    assert alive() == 0
    assert pool.acquire().submit(abs, -3).result() == 3
    pool.release()


@given(st.lists(st.integers(1, 300).map(lambda pages: pages * 4096), max_size=300), st.integers(1, 130))
@settings(deadline=None)
def test_slices_cover_every_extent_once_and_share_the_cost(lengths: list[int], tasks: int) -> None:
    length = np.array(lengths, np.int64)
    bounds = slices(length, tasks)
    assert bounds[0] == 0
    assert bounds[-1] == len(length)
    assert len(bounds) <= tasks + 1
    assert (np.diff(bounds) > 0).all()
    cost = length + READ_COST_BYTES
    shares = [int(cost[a:b].sum()) for a, b in pairwise(bounds.tolist())]
    assert max(shares, default=0) <= max(cost.sum() / tasks, TASK_COST_BYTES) + 2 * max(cost, default=0)


def test_a_map_lives_as_long_as_an_array_over_it(segments: Segments) -> None:
    view = map_segments(segments)[1000:2000].view(np.uint16)
    data = np.frombuffer(segments.paths[0].read_bytes(), np.uint8)
    name = str(segments.paths[0])
    np.testing.assert_array_equal(view, data[1000:2000].view(np.uint16))
    assert not view.flags.writeable
    assert name in Path("/proc/self/maps").read_text()
    del view
    assert name not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("name", ["pread", "mmap"])
def test_closing_waits_for_the_reads_under_way_and_refuses_later_ones(segments: Segments, name: str) -> None:
    engine: Any = open_engine(name, segments)
    closer = threading.Thread(target=engine.close)
    with engine._gate.reading():
        closer.start()
        closer.join(0.1)
        assert closer.is_alive()
        assert name == "mmap" or os.fstat(int(engine._fds[0])).st_size == 500_000
    closer.join()
    engine.close()
    with pytest.raises(StoreError, match="is closed"):
        bytes_at(engine, [5])


def test_a_map_keeps_few_pages_in_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ooc.stores.io.engines.mmap.MAPPED_BYTES", 8 * 2**20)
    size, stride = 64 * 2**20, 8192
    data = np.zeros(size, np.uint8)
    data[::stride] = np.arange(size // stride) % 251
    (tmp_path / "0").write_bytes(data.tobytes())  # in the page cache: every fault maps pages around it
    engine = open_engine("mmap", Segments((tmp_path / "0",), np.array([size])))
    plan = plan_reads(np.arange(0, size, stride), 1, count=size, alignment=4096, gap_bytes=0)
    out = np.zeros(size // stride, np.uint8)
    engine.gather(plan, out)
    np.testing.assert_array_equal(out, data[::stride])
    maps = Path("/proc/self/smaps").read_text().split(str(tmp_path / "0"))[1]
    assert int(re.search(r"Rss: +(\d+) kB", maps)[1]) * 1024 <= 16 * 2**20
    engine.close()


def test_a_gate_closes_once() -> None:
    gate = Gate("x")
    assert [gate.close(), gate.close()] == [True, False]


@pytest.mark.parametrize("unnamed", [False, True])
def test_an_interrupt_waits_for_the_slices_under_way(unnamed: bool) -> None:
    """unnamed: it comes when a slice is under way, and nobody has its future yet."""
    plan = plan_reads(np.arange(0, 500_000, 20_000), 1, count=500_000, alignment=4096, gap_bytes=0)
    begun, going = threading.Barrier(3), threading.Event()
    finished: list[int] = []
    submitted: list[int] = []

    class Pool(ThreadPoolExecutor):
        def submit(self, *arguments: Any, **options: Any) -> Any:
            future = super().submit(*arguments, **options)
            submitted.append(1)
            if unnamed and len(submitted) == 2:
                raise KeyboardInterrupt
            return future

    def work(first: int, last: int) -> int:
        begun.wait(5)
        going.wait(5)
        finished.append(first)
        return last - first

    def interrupt() -> None:
        begun.wait(5)
        for _ in range(1 if unnamed else 2):  # the second by somebody impatient
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
        going.set()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with Pool(2) as pool:
        with pytest.raises(KeyboardInterrupt):
            run_slices(pool, 8, plan, work)
        assert len(finished) == 2  # those that had begun; the others never do
    assert len(finished) == 2
    thread.join()
