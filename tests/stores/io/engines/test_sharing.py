"""Reads that processes share: every byte is that of the file, whoever read it, and whoever is killed; the disk is read once."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ooc.stores.io.block_table import ACTIVE, BLOCK_BYTES, PROGRESS
from ooc.stores.io.engines import open_engine
from ooc.stores.io.engines.sharing import SharingEngine
from ooc.stores.io.read_plan import ReadPlan, plan_reads
from ooc.stores.io.segments import Segments
from ooc.stores.io.shared_blocks import SharedBlocks
from tests.forked import Python

ROW_BYTES = 512
ROWS = 26 * BLOCK_BYTES // ROW_BYTES + 5
PASSES = 6


@pytest.fixture(scope="module")
def segments(tmp_path_factory: pytest.TempPathFactory) -> Segments:
    """Two files of random bytes, of which neither ends with a block."""
    folder = tmp_path_factory.mktemp("files")
    content = np.random.default_rng(0).integers(0, 256, ROWS * ROW_BYTES, np.uint8)
    cut = 11 * BLOCK_BYTES + 5 * 4096
    paths = folder / "0", folder / "1"
    content[:cut].tofile(paths[0])
    content[cut:].tofile(paths[1])
    return Segments(paths, np.array([cut, len(content) - cut]))


def content_of(segments: Segments) -> NDArray[np.uint8]:
    out = np.empty(segments.total, np.uint8)
    segments.read(0, out)
    return out


def ids_of(seed: int, share: float) -> NDArray[np.int64]:
    """Rows of a pass."""
    return np.flatnonzero(np.random.default_rng(seed).random(ROWS) < share)


def one_pass(engine: SharingEngine, content: NDArray[np.uint8], seed: int, share: float = 0.3, pieces: int = 7) -> int:
    """Read rows front to back, by `read` and by `gather`, three pieces at a time; returns the bytes from the disk."""
    rows = content.reshape(-1, ROW_BYTES)

    def piece(ids: NDArray[np.int64], plan: ReadPlan) -> int:
        if seed % 2:
            out = np.empty(len(ids) * ROW_BYTES, np.uint8)
            nbytes = engine.gather(plan, out)
            assert np.array_equal(out.reshape(-1, ROW_BYTES), rows[ids])
            return nbytes
        buffer = np.empty(plan.nbytes, np.uint8)
        nbytes, begin = engine.read(plan, buffer), 0
        for offset, length in zip(plan.offset.tolist(), plan.length.tolist(), strict=True):
            expected = content[offset : offset + length]
            assert np.array_equal(buffer[begin : begin + len(expected)], expected)
            begin += length
        return nbytes

    engine.begin_pass()
    running = []
    with ThreadPoolExecutor(3) as pool:
        for ids in np.array_split(ids_of(seed, share), pieces):
            plan = plan_reads(ids, ROW_BYTES, count=ROWS)
            engine.expect(plan)
            running.append(pool.submit(piece, ids, plan))
        nbytes = sum(each.result() for each in running)
    engine.end_pass()
    return nbytes


def opened(segments: Segments, blocks: SharedBlocks, patience: float) -> SharingEngine:
    return SharingEngine(open_engine("pread", segments), segments, blocks, patience)


@pytest.fixture
def blocks() -> Iterator[SharedBlocks]:
    made = SharedBlocks.create(0, members=2)
    yield made
    made.close()


MEMBER = """
from pathlib import Path
import numpy as np
from ooc.stores.io.segments import Segments
from ooc.stores.io.shared_blocks import Address, SharedBlocks
from tests.stores.io.engines.test_sharing import PASSES, content_of, one_pass, opened
paths, payload, address, patience, share = {given!r}
segments = Segments(tuple(map(Path, paths)), np.array(payload))
blocks = SharedBlocks.attach(Address(*address), 1)
engine, content = opened(segments, blocks, patience), content_of(segments)
engine.begin(1)
print(sum(one_pass(engine, content, seed + 100, share) for seed in range(PASSES)))
engine.end()
engine.close()
"""


def other_member(segments: Segments, blocks: SharedBlocks, patience: float, share: float = 0.3) -> Python:
    """A second process, which has begun its passes or is about to."""
    given = [str(path) for path in segments.paths], segments.payload.tolist(), tuple(blocks.address), patience, share
    other = Python("-c", MEMBER.format(given=given))
    deadline = time.monotonic() + 60
    while not blocks.reading[:, 1, ACTIVE].any():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return other


def test_two_processes_read_the_file_once(segments: Segments, blocks: SharedBlocks) -> None:
    engine, content = opened(segments, blocks, 60.0), content_of(segments)
    engine.begin(1)
    other = other_member(segments, blocks, 60.0)
    mine = sum(one_pass(engine, content, seed) for seed in range(PASSES))
    engine.end()
    done = other.wait(60)
    assert done.returncode == 0, done.stderr
    wanted = PASSES * segments.total
    assert 0.9 * wanted < mine + int(done.stdout) <= 1.02 * wanted, "a third of the rows is nearly every page"
    engine.close()


@pytest.mark.cases(2)
@pytest.mark.parametrize("moment", [0.0, 0.01, 0.05, 0.2])
def test_a_process_that_is_killed_holds_nobody_up(segments: Segments, blocks: SharedBlocks, moment: float) -> None:
    engine, content = opened(segments, blocks, 60.0), content_of(segments)
    engine.begin(1)
    other = other_member(segments, blocks, 60.0)
    one_pass(engine, content, 0)
    time.sleep(moment)
    other.send_signal(signal.SIGKILL)
    began = time.monotonic()
    for seed in range(1, 4):
        one_pass(engine, content, seed)
    assert time.monotonic() - began < 20, "it would wait a minute for one that lives"
    assert other.wait(60).returncode == -signal.SIGKILL
    engine.close()


def test_one_that_does_not_move_is_waited_for_once(segments: Segments, blocks: SharedBlocks) -> None:
    engine, content = opened(segments, blocks, 1.0), content_of(segments)
    engine.begin(1)
    other = other_member(segments, blocks, 60.0)
    other.send_signal(signal.SIGSTOP)
    try:
        took = []
        for seed in range(4):
            began = time.monotonic()
            one_pass(engine, content, seed)
            took.append(time.monotonic() - began)
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait(60)
    assert sum(took) < 8
    engine.close()


def test_nothing_is_left_in_the_file_system(segments: Segments) -> None:
    before = set(os.listdir("/dev/shm"))
    made = SharedBlocks.create(2**24, members=2)
    other = other_member(segments, made, 60.0)
    assert set(os.listdir("/dev/shm")) == before
    other.send_signal(signal.SIGKILL)
    other.wait(60)
    made.close()
    assert set(os.listdir("/dev/shm")) == before


def test_members_that_end_while_they_change_the_table_end_the_sharing(segments: Segments, blocks: SharedBlocks) -> None:
    engine, content = opened(segments, blocks, 0.0), content_of(segments)
    engine.begin(1)
    one_pass(engine, content, 0)
    with pytest.raises(KeyboardInterrupt), blocks.locked():
        raise KeyboardInterrupt
    assert one_pass(engine, content, 2) > 0.9 * segments.total
    assert not blocks.works
    engine.close()


Steps = list[tuple[int, int, float]]


@settings(max_examples=40, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 9), st.sampled_from([0.002, 0.05, 0.3, 1.0])), max_size=8))
def test_any_order_of_passes_has_the_bytes_of_the_file(segments: Segments, steps: Steps) -> None:
    """Two members of one process, which take turns: passes of one after another, over any rows."""
    first = SharedBlocks.create(0, members=2)
    second = SharedBlocks.attach(first.address, 1)
    engines = [opened(segments, each, 0.0) for each in (first, second)]
    content = content_of(segments)
    for engine in engines:
        engine.begin(1)
    for member, seed, share in steps:
        nbytes = one_pass(engines[member], content, seed, share)
        assert nbytes <= plan_reads(ids_of(seed, share), ROW_BYTES, count=ROWS).nbytes + 7 * 4096
    for engine in engines:
        engine.close()


def test_progress_is_seen_by_others(segments: Segments, blocks: SharedBlocks) -> None:
    engine = opened(segments, blocks, 0.0)
    engine.begin(5)
    one_pass(engine, content_of(segments), 0)
    assert blocks.reading[0, 0, PROGRESS] == segments.total // BLOCK_BYTES + 1
    engine.end()
    assert not blocks.reading[:, 0, ACTIVE].any()
    engine.close()


def test_groups_end_alike_unless_they_cannot(blocks: SharedBlocks) -> None:
    other = SharedBlocks.attach(blocks.address, 1)
    key = blocks.session_key("train")
    assert other.session_key("train") == key != blocks.session_key("train")
    assert all(blocks.goes_on(key, 0, taken) for taken in range(3))
    assert blocks.ends(key, 0, 3, full=False), "the first one that is as good as full"
    assert other.goes_on(key, 0, 2)
    assert not other.goes_on(key, 0, 3)
    assert blocks.goes_on(key, 1, 3)
    assert not other.ends(key, 1, 3, full=False), "another one has four already"
    assert other.spares(key) == 0
    assert other.ends(key, 1, 3, full=True), "it has no room"
    assert other.spares(key) == blocks.spares(key) == 1


def test_memory_that_cannot_be_seen_is_an_error(blocks: SharedBlocks) -> None:
    with pytest.raises(OSError, match="No such file"):
        SharedBlocks.attach(blocks.address._replace(file=10**6), 1)
