"""The memory meter against allocations of a known size."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ooc.runtime import memory
from ooc.runtime.memory import MemoryMeter, Tidy, block_policy_restored, keep_large_blocks, return_freed
from ooc.stores.process import resident_bytes

pytestmark = pytest.mark.alone

SIZE = 200_000_000
SLACK = 40_000_000
MIB = 2**20


@pytest.fixture(autouse=True)
def _freed_blocks_are_returned() -> Iterator[None]:
    """Whatever a test before has the C library do with them: a block that it kept would be used again, and show nowhere."""
    with block_policy_restored():
        keep_large_blocks(False)
        return_freed()
        yield


def test_a_block_that_allocates_and_frees_shows_in_the_peak_alone() -> None:
    with MemoryMeter("block", period_s=0.001) as meter:
        block = np.ones(SIZE // 8)
        del block
    reading = meter.reading
    assert reading.peak - reading.before == pytest.approx(SIZE, abs=SLACK)
    assert reading.after - reading.before < SLACK
    assert reading.cuda_peak == 0


def test_a_peak_below_an_earlier_one_is_sampled_not_inherited() -> None:
    highest = np.ones(3 * SIZE // 8)
    del highest
    with MemoryMeter("small", period_s=0.001) as meter:
        block = np.ones(SIZE // 8)
        meter.peak  # noqa: B018 - reading it takes a sample
        del block
    assert meter.reading.peak - meter.reading.before == pytest.approx(SIZE, abs=SLACK)


def test_what_is_kept_shows_after() -> None:
    with MemoryMeter("kept") as meter:
        block = np.ones(SIZE // 8)
    assert meter.reading.after - meter.reading.before == pytest.approx(SIZE, abs=SLACK)
    assert block[0] == 1


def test_as_a_decorator_every_call_is_a_reading_and_calls_nest() -> None:
    meter = MemoryMeter("calls")

    @meter
    def depth(n: int) -> int:
        return 0 if n == 0 else 1 + depth(n - 1)

    assert depth(3) == 3
    assert [reading.name for reading in meter.readings] == ["calls"] * 4


def test_an_exception_leaves_a_reading_and_no_thread() -> None:
    before = threading.active_count()
    meter = MemoryMeter("fails")
    with pytest.raises(ZeroDivisionError), meter:
        1 / 0  # noqa: B018
    assert len(meter.readings) == 1
    assert threading.active_count() == before


def test_resident_bytes_agree_with_statm() -> None:
    now, high = resident_bytes()
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[1])
    assert now == pytest.approx(pages * 4096, abs=SLACK)
    assert high >= now


_FREED_BLOCKS = """
import ctypes
from ooc.runtime.memory import keep_large_blocks
from ooc.stores.process import resident_bytes

MIB = 2**20
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
HOLES
assert keep_large_blocks(False)
for _ in range(3):  # glibc alone would serve the second from what the first left
    before, _ = resident_bytes()
    block = libc.malloc(24 * MIB)
    ctypes.memset(block, 1, 24 * MIB)
    held, _ = resident_bytes()
    libc.free(block)
    after, _ = resident_bytes()
    assert held - before > 20 * MIB
    assert held - after > 20 * MIB
"""


_HOLES = """
assert keep_large_blocks(True)
holes = []
for _ in range(8):
    holes.append(libc.malloc(24 * MIB))
    between = libc.malloc(600_000)  # stays, so that the heap does not shrink
for hole in holes:
    ctypes.memset(hole, 1, 24 * MIB)
    libc.free(hole)
assert resident_bytes()[0] > 8 * 24 * MIB
"""


_KEPT_BLOCKS = """
import ctypes, resource
from ooc.runtime.memory import keep_large_blocks

MIB = 2**20
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
faults = []
for keep in (True, False):  # who begins last decides
    assert keep_large_blocks(keep)
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        block = libc.malloc(24 * MIB)
        ctypes.memset(block, 1, 24 * MIB)
        libc.free(block)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
assert faults[0] > 100 and max(faults[1:4]) < 10 and min(faults[5:]) > 100, faults
"""


def test_a_large_block_is_kept_for_its_next_use() -> None:
    subprocess.run([sys.executable, "-c", _KEPT_BLOCKS], check=True)


def test_blocks_above_32_mib_are_kept_where_all_are() -> None:
    script = _KEPT_BLOCKS.replace("24 *", "96 *").replace("import keep", "import Blocks, keep")
    subprocess.run([sys.executable, "-c", script.replace("(True, False)", "(Blocks.KEEP_ALL, Blocks.KEEP)")], check=True)


@pytest.mark.parametrize("holes", ["", _HOLES], ids=["fresh", "with-holes"])
def test_a_large_block_goes_back_to_the_system_when_freed(holes: str) -> None:
    """Also where the heap has holes of that size, of blocks that were kept."""
    subprocess.run([sys.executable, "-c", _FREED_BLOCKS.replace("HOLES", holes)], check=True)


def test_holes_are_used_again_where_blocks_are_kept_again() -> None:
    script = (
        _FREED_BLOCKS.replace("HOLES", _HOLES)
        + """
assert keep_large_blocks(True)
begin, end = min(holes), max(holes) + 24 * MIB
blocks = [libc.malloc(20 * MIB) for _ in range(8)]  # smaller: Python itself may have taken a few kB of a hole
assert all(begin <= block < end for block in blocks), (holes, blocks)
"""
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_freed_memory_is_returned_where_the_process_has_too_much_and_not_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    readings, returned = iter([1000] * 50 + [1001] + [2000] * 300), []
    now = [0]

    def reading() -> tuple[int, int]:
        now[0] = next(readings)
        return now[0], now[0]

    monkeypatch.setattr(memory, "resident_bytes", reading)
    monkeypatch.setattr(memory, "return_freed", lambda: returned.append(now[0]))
    tidy = Tidy(1000)
    for _ in range(55):
        tidy()
    assert returned == [1001], "once, and not again at once"
    for _ in range(200):
        tidy()
    assert 20 < len(returned) < 60


def test_freed_memory_is_returned_before_more_is_allocated_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    returned = []
    monkeypatch.setattr(memory, "resident_bytes", lambda: (900, 900))
    monkeypatch.setattr(memory, "return_freed", lambda: returned.append(1))
    tidy = Tidy(1000)
    assert not tidy(100)
    assert not returned
    assert tidy(101), "as much as before"
    tidy(101)
    assert len(returned) == 2, "at once, however short ago it was done"
    tidy()
    assert len(returned) == 2


def test_cuda_is_asked_seldom_and_once_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator keeps the mark itself."""
    asked = []

    def counts() -> dict[str, dict[str, dict[str, int]]]:
        asked.append(threading.current_thread())
        return {"allocated_bytes": {"all": {"current": 5, "peak": 7 + len(asked)}}}

    class Periods(threading.Event):
        """So many periods pass at once; then the block ends."""

        left = 2 * memory.SLOW_SAMPLES + 1

        def wait(self, timeout: float | None = None) -> bool:
            self.left -= 1
            return self.left < 0

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", counts)
    monkeypatch.setattr(memory, "threading", SimpleNamespace(Event=Periods, Thread=threading.Thread, Lock=threading.Lock))
    with MemoryMeter("block") as meter:
        meter._open[0]._thread.join()
    sampled = [thread for thread in asked if thread is not threading.current_thread()]
    assert (len(sampled), len(asked)) == (3, 5)
    assert meter.reading.cuda_peak == 7 + len(asked)
    assert (meter.reading.cuda_before, meter.reading.cuda_after) == (5, 5)
