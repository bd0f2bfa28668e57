"""The engine of arrays far away gives what the objects hold, whatever the cache has, and asks for no chunk twice."""

import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.stores.errors import ConfigError, StoreError
from ooc.stores.io.engines import describe, open_engine
from ooc.stores.io.engines.checking import CheckingEngine
from ooc.stores.io.read_plan import plan_ranges, plan_reads
from ooc.stores.io.remote.cache import CacheDir
from tests.stores.io.remote.objects import failing, remote_array

CHUNK = 3 * 4096


def _data(chunks: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 256, chunks * CHUNK).astype(np.uint8)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_reads_give_the_objects_bytes(data: st.DataObject) -> None:
    """Any plan, over files of any number of chunks, some of them in the cache, with room for any number of others."""
    chunks, in_file = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 5))
    row_bytes, room = data.draw(st.sampled_from([1, 52, 512, 5000, 30_000])), data.draw(st.integers(0, 12))
    held, array = data.draw(st.sets(st.integers(0, chunks - 1))), _data(chunks)
    count = len(array) // row_bytes
    if count == 0:
        return
    with tempfile.TemporaryDirectory() as folder:
        segments, objects = remote_array(Path(folder), array, CHUNK, in_file, 2**20 + room * CHUNK)
        far: Any = segments.far
        for number in held:
            segments.read(number * CHUNK, np.empty(1, np.uint8))
        name = data.draw(st.sampled_from(["pread", "mmap", "uring"]))
        with closing(CheckingEngine(open_engine(name, segments), segments, data.draw(st.booleans()))) as engine:
            for _ in range(3):
                ids = np.array(data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=40)), np.int64)
                plan = plan_reads(ids, row_bytes, count=count, gap_bytes=data.draw(st.sampled_from([0, 4096, 2**20])))
                out = np.zeros(len(ids) * row_bytes, np.uint8)
                engine.gather(plan, out)
                assert np.array_equal(out.reshape(len(ids), row_bytes), array[: count * row_bytes].reshape(count, -1)[ids])
                buffer = np.zeros(plan.nbytes, np.uint8)
                engine.read(plan, buffer)
                whole = np.concatenate([array[at : at + size] for at, size in zip(plan.offset, plan.length, strict=True)])
                assert np.array_equal(buffer[: len(whole)], whole)
        whole_chunks = [each for each in objects.asked if each[2] == CHUNK]
        if room >= 12:
            assert len(set(objects.asked)) == len(objects.asked) == len(whole_chunks), "a chunk is requested once, and whole"
        assert far.presence.complete == (len(far.presence.missing(np.arange(chunks))) == 0)


def test_the_cache_is_read_by_the_next_process_without_a_request(tmp_path: Path) -> None:
    array = _data(6)
    plan = plan_reads(np.arange(6), CHUNK, count=6)
    out = np.zeros(len(array), np.uint8)
    segments, objects = remote_array(tmp_path, array, CHUNK, 4)
    with closing(open_engine("auto", segments)) as engine:
        assert "remote" in describe(engine)
        engine.gather(plan, out)
    assert len(objects.asked) == 6
    segments, objects = remote_array(tmp_path, array, CHUNK, 4)
    out[:] = 0
    with closing(open_engine("auto", segments)) as engine:
        engine.gather(plan, out)
    assert objects.asked == []
    assert np.array_equal(out, array)


def test_what_has_no_room_is_requested_as_it_is_wanted_and_no_more_is_kept(tmp_path: Path) -> None:
    array = _data(8)
    remote_array(tmp_path, array, CHUNK, 8)
    segments, objects = remote_array(tmp_path, array, CHUNK, 8)
    cache = CacheDir(tmp_path)
    cache.open(2**40)
    cache.open(cache.counts[0] + 2 * CHUNK)
    plan = plan_reads(np.arange(0, 24, 3), 4096, count=24, gap_bytes=0)  # a page of each chunk
    out = np.zeros(8 * 4096, np.uint8)
    with closing(open_engine("pread", segments)) as engine:
        for _ in range(2):
            engine.gather(plan, out)
            assert np.array_equal(out, array.reshape(24, 4096)[::3].reshape(-1))
    sizes = sorted(size for _, _, size in objects.asked)
    assert sizes == [4096] * 12 + [CHUNK] * 2


def test_chunks_are_asked_for_again_until_they_match_their_checksums(tmp_path: Path) -> None:
    def damaged_at_first(number: int, data: Any) -> Any:
        return data ^ 1 if number == 1 else data

    array = _data(1)
    segments, objects = remote_array(tmp_path / "a", array, CHUNK, 1, answers=damaged_at_first)
    out = np.zeros(CHUNK, np.uint8)
    segments.read(0, out)
    assert np.array_equal(out, array)
    assert len(objects.asked) == 2
    segments, objects = remote_array(tmp_path / "b", array, CHUNK, 1, answers=lambda number, data: data ^ 1)
    with pytest.raises(StoreError, match="is damaged: chunk 0"):
        segments.read(0, out)
    assert len(objects.asked) == 3


def test_a_failure_is_raised_when_no_thread_writes_any_more_and_leaves_what_came(tmp_path: Path) -> None:
    array = _data(40)
    segments, objects = remote_array(tmp_path, array, CHUNK, 40, answers=failing(20))
    plan, out = plan_reads(np.arange(40), CHUNK, count=40), np.zeros(len(array), np.uint8)
    with closing(open_engine("pread", segments)) as engine:
        with pytest.raises(StoreError, match="the network is gone"):
            engine.gather(plan, out)
        before = out.copy()
        far: Any = segments.far
        assert 0 < len(far.presence.missing(np.arange(40))) < 40
        assert np.array_equal(out, before)
        engine.gather(plan, out)
    assert np.array_equal(out, array)
    assert len(objects.asked) == 41


def test_threads_that_want_the_same_chunks_share_their_requests(tmp_path: Path) -> None:
    array = _data(30)

    def slow(number: int, data: Any) -> Any:
        time.sleep(0.002)
        return data

    segments, objects = remote_array(tmp_path, array, CHUNK, 7, answers=slow)
    plan, outs = plan_reads(np.arange(30), CHUNK, count=30), [np.zeros(len(array), np.uint8) for _ in range(4)]
    with closing(open_engine("pread", segments)) as engine:
        threads = [threading.Thread(target=engine.gather, args=(plan, out)) for out in outs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(np.array_equal(out, array) for out in outs)
    assert len(objects.asked) == 30


def test_maps_and_ranges_of_rows_are_filled_first(tmp_path: Path) -> None:
    array = _data(5)
    segments, objects = remote_array(tmp_path, array, CHUNK, 2)
    told: list[tuple[int, int]] = []
    segments.fill(lambda done, total: told.append((done, total)))
    assert told == [(number * CHUNK, len(array)) for number in range(1, 6)]
    segments.fill()
    assert len(objects.asked) == 5
    plan, at = plan_ranges(np.array([3, 0]), np.array([5, 1]), CHUNK, count=5)
    buffer = np.zeros(plan.nbytes, np.uint8)
    with closing(open_engine("mmap", segments)) as engine:
        engine.read(plan, buffer)
    assert np.array_equal(buffer[at[0] : at[0] + 2 * CHUNK], array[3 * CHUNK :])


def test_gds_is_refused(tmp_path: Path) -> None:
    segments, _ = remote_array(tmp_path, _data(1), CHUNK, 1)
    with pytest.raises(ConfigError, match="gds reads files of a local disk"):
        open_engine("gds", segments)
