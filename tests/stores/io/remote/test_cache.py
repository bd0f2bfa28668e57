"""The cache keeps to its limit, gives up what nobody uses, and knows after a crash what it holds."""

import fcntl
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ooc.stores.errors import StoreError
from ooc.stores.io.remote import cache as cache_module
from ooc.stores.io.remote.cache import PRESENT, CacheDir, Presence, default_folder
from ooc.stores.io.segments import Segments
from tests.stores.io.remote.objects import remote_array

CHUNK = 2**16


def taken(folder: Path) -> int:
    """Bytes that a folder takes on the disk."""
    return sum(each.stat().st_blocks * 512 for each in folder.rglob("*") if each.is_file())


def filled(folder: Path, chunks: int, limit: int = 2**40) -> None:
    """Fetch an array into the cache and let go of it."""
    segments, _ = remote_array(folder, np.ones(chunks * CHUNK, np.uint8), CHUNK, 4, limit)
    segments.fill()


def test_reservations_keep_to_the_limit(tmp_path: Path) -> None:
    cache = CacheDir(tmp_path)
    cache.open(100_000)
    assert [cache.reserve(40_000) for _ in range(3)] == [True, True, False]
    cache.release(40_000)
    other = CacheDir(tmp_path)  # another process's view
    assert other.reserve(40_000)
    assert cache.counts == other.counts == (80_000, 100_000)
    other.open(100_000)  # counts anew: nothing was written
    assert cache.counts == (taken(tmp_path), 100_000)


def test_the_default_is_half_of_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = CacheDir(tmp_path)
    cache.open(None)
    found = os.statvfs(tmp_path)
    assert cache.counts[1] == pytest.approx(found.f_bavail * found.f_frsize / 2, rel=0.05)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "ooc" / "stores"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=f"cannot write {tmp_path}/file"):
        CacheDir(tmp_path / "file" / "cache")


def test_what_nobody_uses_is_given_up_the_oldest_first(tmp_path: Path) -> None:
    for number, name in enumerate("abc"):
        filled(tmp_path / name, 16)
        os.replace(tmp_path / name / "m", tmp_path / f"{name}-mirror")
        lock = cache_module.mirror_lock(tmp_path / f"{name}-mirror")
        lock.touch()
        os.utime(lock, (number, number))
    cache = CacheDir(tmp_path)
    before = taken(tmp_path)
    cache.open(before)
    assert cache.reserve(CHUNK)
    assert sorted(each.name for each in tmp_path.glob("*-mirror")) == ["b-mirror", "c-mirror"]
    cache.open(20 * CHUNK)
    assert [each.name for each in tmp_path.glob("*-mirror")] == ["c-mirror"]
    assert taken(tmp_path) <= 20 * CHUNK


def test_arrays_in_use_stay_and_others_of_their_mirror_go(tmp_path: Path) -> None:
    filled(tmp_path, 16)
    segments, objects = remote_array(tmp_path, np.ones(16 * CHUNK, np.uint8), CHUNK, 4)
    cache = CacheDir(tmp_path)
    lock = os.open(cache_module.mirror_lock(tmp_path / "m"), os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_SH)  # the mirror stays open
    cache.open(CHUNK)
    out = np.zeros(16 * CHUNK, np.uint8)
    segments.read(0, out)
    assert out.all()
    assert objects.asked == []
    del segments
    cache.open(CHUNK)
    assert taken(tmp_path / "m" / "store") == 0
    segments, objects = remote_array(tmp_path, np.ones(16 * CHUNK, np.uint8), CHUNK, 4)
    segments.read(0, out[:CHUNK])
    assert len(objects.asked) == 1
    os.close(lock)


def test_a_map_that_does_not_fit_is_refused_in_one_line(tmp_path: Path) -> None:
    segments, _ = remote_array(tmp_path, np.ones(16 * CHUNK, np.uint8), CHUNK, 4, 4 * CHUNK)
    with pytest.raises(StoreError, match=r"s.ooc/x takes 1.05 MB of the cache in .*: give a larger `cache`, or another"):
        segments.fill()
    assert taken(tmp_path) <= 4 * CHUNK + 4096


def test_marks_that_were_not_made_durable_end_with_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, cache, path = tmp_path / PRESENT / "x", CacheDir(tmp_path), tmp_path / "data"
    path.touch()
    Presence.create(file, 4)
    presence = Presence(file, 4, cache)
    presence.mark(0)
    presence.sync((path,))
    presence.mark(2)
    everything = np.arange(4)
    assert Presence(file, 4, cache).missing(everything).tolist() == [1, 3]
    del presence
    monkeypatch.setattr(cache_module, "_boot", lambda: b"another start")
    assert Presence(file, 4, cache).missing(everything).tolist() == [1, 2, 3]
    with pytest.raises(StoreError, match="is damaged: remove"):
        Presence(file, 5, cache)


@pytest.mark.slow
def test_a_killed_process_leaves_the_cache_whole(tmp_path: Path) -> None:
    """Killed at 20 moments while the cache is written: what is marked is right, what is not is fetched, the limit holds."""
    array = np.random.default_rng(0).integers(0, 256, 64 * CHUNK).astype(np.uint8)
    for moment in range(20):
        folder = tmp_path / str(moment)
        child = os.fork()
        if child == 0:

            def kill(number: int, data: object, moment: int = moment) -> object:
                if number == 3 * moment + 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                return data

            remote_array(folder, array, CHUNK, 10, 100 * CHUNK, kill)[0].fill()
            os._exit(1)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        segments, objects = remote_array(folder, array, CHUNK, 10, 100 * CHUNK)
        out = np.zeros(len(array), np.uint8)
        segments.read(0, out)
        assert np.array_equal(out, array)
        assert len(objects.asked) <= 64
        used, limit = CacheDir(folder).counts
        assert taken(folder) <= used + 4096 * 16 <= limit


def test_two_processes_fetch_a_chunk_once_and_count_it_once(tmp_path: Path) -> None:
    """Also where one of them fetches all of it, as maps are filled, and is killed."""
    array = np.random.default_rng(0).integers(0, 256, 64 * CHUNK).astype(np.uint8)
    told, tell = os.pipe()

    def slow(number: int, data: object) -> object:
        os.write(tell, b"1")
        time.sleep(0.002)
        return data

    def fill(kill_at: int) -> int:
        child = os.fork()
        if child == 0:

            def killed(number: int, data: object) -> object:
                if number == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return slow(number, data)

            try:
                remote_array(tmp_path, array, CHUNK, 10, 66 * CHUNK, killed)[0].fill()
            finally:
                os._exit(0)
        return child

    first, _ = remote_array(tmp_path, array, CHUNK, 10, 66 * CHUNK, slow)
    children = [fill(0), fill(0), fill(16)]
    first.fill()
    codes = [os.waitpid(child, 0)[1] for child in children]
    assert codes[:2] == [0, 0]
    out = np.zeros(len(array), np.uint8)
    first.read(0, out)
    assert np.array_equal(out, array)
    assert 64 <= len(os.read(told, 1000)) <= 64 + 32  # at most what the killed one had in flight again
    used, _ = CacheDir(tmp_path).counts
    assert used <= 66 * CHUNK


def test_without_room_nobody_waits_for_chunks_that_will_not_come(tmp_path: Path) -> None:
    array, asked = np.ones(4 * CHUNK, np.uint8), threading.Barrier(2, timeout=20)

    def both(number: int, data: object) -> object:
        asked.wait()
        return data

    def read(segments: Segments) -> None:
        out = np.zeros(CHUNK, np.uint8)
        segments.read(0, out)
        assert out.all()

    arrays = [remote_array(tmp_path, array, CHUNK, 4, 1, both)[0] for _ in range(2)]  # each opens the files for itself
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(read, arrays)) == [None, None]


def test_a_process_that_is_stopped_keeps_no_chunk_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_PATIENCE_S", 0.05)
    array = np.ones(4 * CHUNK, np.uint8)
    (one, _), (other, objects) = (remote_array(tmp_path, array, CHUNK, 4) for _ in range(2))
    assert one.far is not None
    assert one.far.claim(np.arange(4)) == [0, 1, 2, 3]  # and goes no further
    other.fill()
    assert len(objects.asked) == 4
