"""What is particular to the uring engine: short reads, refusals, failures and interrupts with reads in flight, the fallback.

Faults come from the system itself: a pipe, a write-only descriptor or an unreadable address in the place of a file.
"""

import errno
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.stores.errors import StoreError
from ooc.stores.io.engines import describe, open_engine, ring, uring
from ooc.stores.io.engines.deliver import Ranges
from ooc.stores.io.engines.pread import PreadEngine
from ooc.stores.io.engines.uring import Job, UringEngine, reap
from ooc.stores.io.read_plan import plan_reads
from ooc.stores.io.segments import Segments
from ooc.stores.io.threads import SharedPool
from tests.forked import in_child

PAGE = 4096
PAGES = 300
DATA = np.random.default_rng(0).integers(0, 256, 2 * PAGES * PAGE + 1000).astype(np.uint8)


@pytest.fixture
def segments(tmp_path: Path) -> Segments:
    """DATA in two files."""
    parts = DATA[: PAGES * PAGE], DATA[PAGES * PAGE :]
    paths = tmp_path / "0", tmp_path / "1"
    for path, part in zip(paths, parts, strict=True):
        path.write_bytes(part.tobytes())
    return Segments(paths, np.array([len(part) for part in parts]))


@pytest.fixture(autouse=True)
def _own_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings that nobody else in the process holds: rows that another test left open keep theirs."""
    monkeypatch.setattr(UringEngine, "threads", SharedPool("ooc-test-ring", 4))


@pytest.fixture
def engine(segments: Segments) -> Iterator[UringEngine]:
    engine = UringEngine(segments)
    gather(engine, np.array([0]), 1)  # whatever is compiled or set up is by now
    yield engine
    engine.close()


def gather(engine: Any, ids: Any, row_bytes: int, gap_bytes: int = 0, **more: int) -> np.ndarray:
    plan = plan_reads(np.asarray(ids), row_bytes, count=len(DATA) // row_bytes, gap_bytes=gap_bytes, **more)
    out = np.zeros((len(plan.order), row_bytes), np.uint8)
    engine.gather(plan, out.reshape(-1))
    return out


def rows(ids: Any, row_bytes: int) -> np.ndarray:
    return DATA[: len(DATA) // row_bytes * row_bytes].reshape(-1, row_bytes)[ids]


def put_in_place(engine: UringEngine, file: int, fd: int) -> None:
    """Let the engine's descriptor of a file be another one."""
    os.dup2(fd, int(engine._fds[file]))
    os.close(fd)


def pipe_in_place(engine: UringEngine, file: int) -> int:
    """A pipe instead of a file: its reads wait until bytes are written to the descriptor returned, and return what there is."""
    readable, writable = os.pipe2(os.O_CLOEXEC)
    put_in_place(engine, file, readable)
    return writable


def started(engine: UringEngine) -> None:
    """Wait until a request is under way."""
    while engine._gate._running == 0:
        time.sleep(0.001)
    time.sleep(0.2)


def held() -> tuple[int, int, int]:
    """Descriptors, mapped rings and ring threads of this process."""
    gc.collect()  # what other tests left behind has descriptors too
    maps = Path("/proc/self/maps").read_text().count("io_uring")
    threads = sum(thread.name.startswith(UringEngine.threads.name) for thread in threading.enumerate())
    return len(os.listdir("/proc/self/fd")), maps, threads


def test_rows_are_the_bytes(engine: UringEngine) -> None:
    @given(
        st.integers(1, 9000),
        st.lists(st.integers(0, 10**9), min_size=1, max_size=400),
        st.sampled_from([0, PAGE, 2**20]),
        st.sampled_from([PAGE, 2**16, 2**20]),
    )
    @settings(max_examples=40, deadline=None)
    def law(row_bytes: int, numbers: list[int], gap_bytes: int, max_extent_bytes: int) -> None:
        ids = np.array(numbers) % (len(DATA) // row_bytes)
        found = gather(engine, ids, row_bytes, gap_bytes, max_extent_bytes=max_extent_bytes)
        np.testing.assert_array_equal(found, rows(ids, row_bytes))

    law()


def test_the_rest_of_a_short_read_is_read(engine: UringEngine) -> None:
    writable = pipe_in_place(engine, 0)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(gather, engine, [0], 5 * PAGE)
        for begin, end in ((0, 1), (1, 3), (3, 5)):  # pages, each part when the one before has been read
            started(engine)
            os.write(writable, DATA[begin * PAGE : end * PAGE].tobytes())
        np.testing.assert_array_equal(future.result(), rows([0], 5 * PAGE))
    os.close(writable)


def test_a_short_read_at_the_end_of_a_file_is_an_error(engine: UringEngine, segments: Segments) -> None:
    writable = pipe_in_place(engine, 1)
    os.write(writable, DATA[: 2 * PAGE + 10].tobytes())
    os.close(writable)
    with pytest.raises(StoreError, match=f"{segments.paths[1]} cannot be read at byte 8192: the file ends there"):
        gather(engine, [PAGES // 5], 5 * PAGE)


def test_completions_lead_to_the_reads_of_what_lacks() -> None:
    """A ring of plain memory, its completions written by hand: the system hardly ever answers a file with EAGAIN."""
    parts, out = plain_ring(), np.zeros(3 * PAGE, np.uint8)
    zero, length = np.array([0]), np.array([3 * PAGE])
    ranges = Ranges(zero, zero, zero, np.array([0, 1]), zero, length, out.ctypes.data)
    job = Job(zero, length, np.array([77], np.int32), np.array([0, 9 * PAGE]), ranges, False, 128, np.zeros(1, np.uint32))
    parts.slots[5] = (2 * ring.SMALL_BYTES, 0, 0, 0, 0, 0, 3 * PAGE, 0, 0)
    parts.scratch[2 * ring.SMALL_BYTES :][: 3 * PAGE] = DATA[: 3 * PAGE]
    free, left = np.arange(len(parts.slots)), np.array([ring.DEPTH - 1, ring.LARGE_DEPTH])
    lacking = []
    for number, result in enumerate([-errno.EAGAIN, PAGE + 1, -errno.EINTR, 2 * PAGE]):
        parts.cqes[number] = (5, result, 0)
        parts.cq_tail[0] += 1
        ended, repeated, nbytes, _, error = reap(parts, job, free, left, True)
        assert (repeated, nbytes, error) == (1 - ended, ended * 3 * PAGE, -1)
        lacking += [parts.sqes[number]] * repeated
    assert parts.cq_head[0] == 4
    assert parts.slots[5]["tries"] == 2
    assert [int(sqe["offset"]) for sqe in lacking] == [0, PAGE, PAGE]
    assert [int(sqe["length"]) for sqe in lacking] == [3 * PAGE, 2 * PAGE, 2 * PAGE]
    assert [int(sqe["address"]) - parts.address - 2 * ring.SMALL_BYTES for sqe in lacking] == [0, PAGE, PAGE]
    assert {(int(sqe["fd"]), int(sqe["user_data"]), int(sqe["opcode"])) for sqe in lacking} == {(77, 5, 22)}
    np.testing.assert_array_equal(out, DATA[: 3 * PAGE])
    assert (left.tolist(), free[ring.DEPTH - 1]) == ([ring.DEPTH, ring.LARGE_DEPTH], 5)


def plain_ring() -> ring.RingParts:
    heads_and_tails = [np.zeros(1, np.uint32) for _ in range(3)]
    sqes, cqes = np.zeros(256, ring.SQE), np.zeros(512, ring.CQE)
    slots, scratch = np.zeros(ring.DEPTH + ring.LARGE_DEPTH, ring.SLOT), np.zeros(ring.SCRATCH_BYTES, np.uint8)
    sq_tail, cq_head, cq_tail = heads_and_tails
    return ring.RingParts(-1, sq_tail, sqes, cq_head, cq_tail, cqes, slots, scratch, scratch.ctypes.data)


def test_a_failure_is_raised_only_when_no_read_is_in_flight(engine: UringEngine, segments: Segments, tmp_path: Path) -> None:
    put_in_place(engine, 0, os.open(tmp_path / "w", os.O_WRONLY | os.O_CREAT))
    writable = pipe_in_place(engine, 1)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(gather, engine, [3, PAGES], PAGE)
        started(engine)
        assert not future.done()
        os.write(writable, DATA[:PAGE].tobytes())
        with pytest.raises(StoreError, match=f"{segments.paths[0]} cannot be read at byte 12288: Bad file descriptor"):
            future.result()
    os.close(writable)


@pytest.mark.parametrize("in_flight", [1, 20, 128])
def test_an_interrupt_waits_for_the_reads_in_flight_and_begins_no_other(engine: UringEngine, in_flight: int) -> None:
    engine.depth = in_flight
    writable = pipe_in_place(engine, 0)
    ids = np.arange(0, PAGES, 2)
    assert len(ids) > in_flight
    fed = []

    def interrupt() -> None:
        started(engine)
        for _ in range(2):  # the second by somebody impatient
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
        fed.append(True)
        for _ in range(in_flight):
            os.write(writable, bytes(PAGE))

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        gather(engine, ids, PAGE)
    assert fed
    thread.join()
    os.close(writable)
    np.testing.assert_array_equal(gather(engine, [PAGES + 1], PAGE), rows([PAGES + 1], PAGE))


def test_a_ring_that_takes_no_reads_is_replaced(segments: Segments, tmp_path: Path) -> None:
    before = held()
    engine = UringEngine(segments)
    ring_fd = engine._pool.submit(_ring_fd).result()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, ring_fd)
    os.close(null)
    with pytest.raises(StoreError, match=r"io_uring fails with .*; choose pread"):
        gather(engine, [1, 9], PAGE)
    np.testing.assert_array_equal(gather(engine, [1, 9], PAGE), rows([1, 9], PAGE))
    engine.close()
    assert held() == before


def _ring_fd() -> int:
    from ooc.stores.io.engines import uring

    uring._local.ring = ring.Ring()
    fd: int = uring._local.ring.parts.fd
    return fd


def test_no_ring_to_be_had_is_an_error(segments: Segments, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = UringEngine(segments)
    with monkeypatch.context() as patch:
        patch.setattr(ring, "_ENTRIES", 0)  # refused by the system
        with pytest.raises(StoreError, match="no io_uring can be set up: Invalid argument; choose the engine pread"):
            gather(engine, [1], PAGE)
    np.testing.assert_array_equal(gather(engine, [1], PAGE), rows([1], PAGE))
    engine.close()


def test_a_failed_mapping_gives_the_ring_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = held()
    monkeypatch.setattr(ring, "_SQES_AT", 0x20000000)  # no part of a ring is there
    with pytest.raises(StoreError, match="cannot be mapped"):
        ring.Ring()
    assert held() == before


@pytest.mark.alone
@pytest.mark.parametrize("fail", [False, True])
def test_closing_leaves_no_descriptor_thread_or_map(segments: Segments, fail: bool) -> None:
    before = held()
    engine, other = UringEngine(segments), UringEngine(segments)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: gather(engine, np.random.default_rng(seed).integers(0, 900, 200), 512), range(30)))
    assert 1 <= held()[2] - before[2] <= UringEngine.threads.threads
    assert held()[1] > before[1]  # (neighboring maps may count as one)
    if fail:
        os.truncate(segments.paths[0], 0)
        with pytest.raises(StoreError, match="ends there"):
            gather(engine, np.arange(0, PAGES, 2), PAGE)
    engine.close()
    other.close()
    assert (held()[0], held()[2]) == (before[0], before[2])
    assert held()[1] == before[1]


@pytest.mark.usefixtures("no_o_direct")
def test_where_o_direct_is_refused_reads_are_buffered(segments: Segments) -> None:
    engine = open_engine("uring", segments)
    assert describe(engine).startswith("uring (the file system refuses O_DIRECT")
    ids = np.random.default_rng(0).integers(0, len(DATA) // 700, 500)
    np.testing.assert_array_equal(gather(engine, ids, 700), rows(ids, 700))
    engine.close()


def test_an_older_kernel_goes_without_the_newer_flags(segments: Segments, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "_DEFER_TASKRUN", 1 << 31)  # unknown to this kernel as the real one is to older ones
    engine = UringEngine(segments)
    ids = np.random.default_rng(0).integers(0, len(DATA) // 700, 500)
    np.testing.assert_array_equal(gather(engine, ids, 700), rows(ids, 700))
    engine.close()


def test_a_kernel_without_plain_reads_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "_FEATURES", 1 << 31)
    before = held()
    assert ring.unavailable() == "no io_uring can be set up: it is older than Linux 5.6"
    assert held() == before


def test_auto_is_uring_where_the_system_allows_it(segments: Segments) -> None:
    for name in ("auto", "uring"):
        engine = open_engine(name, segments)
        assert isinstance(engine, UringEngine)
        assert describe(engine) == ("uring (auto: the system allows io_uring)" if name == "auto" else "uring")
        engine.close()


_FORBID = """
import ctypes, struct, sys
from ooc.stores.io.engines import describe, open_engine
from ooc.stores.io.segments import Segments
from pathlib import Path
import numpy as np
from ooc.stores.io.read_plan import plan_reads

path, number = Path(sys.argv[1]), int(sys.argv[2])
filters = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x50000 | number), (0x06, 0, 0, 0x7FFF0000)]
code = b"".join(struct.pack("HBBI", *one) for one in filters)
buffer = ctypes.create_string_buffer(code)
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(filters), ctypes.addressof(buffer)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()
for name in ("auto", "uring"):
    engine = open_engine(name, Segments((path,), np.array([4096])))
    out = np.zeros(3, np.uint8)
    engine.gather(plan_reads(np.array([5, 4095, 0]), 1, count=4096), out)
    print(describe(engine), out.tolist(), sep="|")
    engine.close()
"""


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOSYS, "the kernel has no io_uring, or a sandbox hides it"),
        (errno.EPERM, "the system forbids io_uring (a sandbox, or sysctl kernel.io_uring_disabled)"),
        (errno.ENOMEM, "no io_uring can be set up: Cannot allocate memory"),
    ],
)
def test_where_a_sandbox_forbids_io_uring_pread_reads_and_says_why(segments: Segments, number: int, reason: str) -> None:
    """In a process of its own, under a seccomp filter that refuses io_uring_setup."""
    command = [sys.executable, "-c", _FORBID, str(segments.paths[0]), str(number)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = DATA[[5, 4095, 0]].tolist()
    assert done.stdout.splitlines() == [f"pread (auto; {reason})|{rows}", f"pread ({reason})|{rows}"]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("name", ["uring", "pread", "mmap"])
def test_a_forked_process_opens_its_own(segments: Segments, name: str) -> None:
    engine = open_engine(name, segments)
    ids = np.arange(0, PAGES, 2)
    gather(engine, ids, PAGE)

    def work() -> None:
        with pytest.raises(StoreError, match="opened before a fork"):
            gather(engine, ids, PAGE)
        own = open_engine(name, segments)
        np.testing.assert_array_equal(gather(own, ids, PAGE), rows(ids, PAGE))
        own.close()
        engine.close()

    assert in_child(work) == 0
    np.testing.assert_array_equal(gather(engine, ids, PAGE), rows(ids, PAGE))
    engine.close()


def test_a_pread_engine_stands_beside(segments: Segments) -> None:
    """Both kinds share code but no threads: closing one leaves the other's."""
    one, other = UringEngine(segments), PreadEngine(segments)
    one.close()
    np.testing.assert_array_equal(gather(other, [7], PAGE), rows([7], PAGE))
    other.close()


def test_memory_that_a_lost_ring_reads_into_stays(segments: Segments, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing tells when the last read has ended, so nobody else may ever get it."""
    monkeypatch.setattr(UringEngine, "threads", SharedPool("ooc-test-ring", 1))
    held = np.empty(65 * PAGE, np.uint8)
    begin = -held.ctypes.data % PAGE
    buffer, before = held[begin : begin + 64 * PAGE], len(ring._ABANDONED)
    plan = plan_reads(np.arange(64), PAGE, count=PAGES)
    engine = UringEngine(segments)
    engine.read(plan, buffer)
    assert (buffer == DATA[: 64 * PAGE]).all()
    with open(os.devnull) as null:
        engine._pool.submit(lambda: os.dup2(null.fileno(), uring._local.ring.parts.fd)).result()
    with pytest.raises(StoreError, match=r"io_uring fails with .*; choose pread"):
        engine.read(plan, buffer)
    assert [memory is buffer for memory in ring._ABANDONED[before:]] == [False, True]
    buffer[:] = 0
    engine.read(plan, buffer)  # by a new ring
    assert (buffer == DATA[: 64 * PAGE]).all()
    engine.close()
