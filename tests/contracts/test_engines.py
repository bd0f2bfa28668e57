"""The contract of Engine, run over every engine, against the bytes themselves."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ooc.stores.errors import StoreError
from ooc.stores.io.engines import Engine, open_engine
from ooc.stores.io.engines.gds import unavailable
from ooc.stores.io.read_plan import plan_reads
from ooc.stores.io.segments import Segments

PAGES = 64  # of each file but the last


def _buffer(nbytes: int, aligned: bool) -> np.ndarray[Any, Any]:
    """uint8[nbytes] of sevens, at the beginning of a page or not: into the former an engine may read directly."""
    raw = np.full(nbytes + 2 * 4096, 7, np.uint8)
    begin = -raw.ctypes.data % 4096 + (0 if aligned else 1)
    return raw[begin : begin + nbytes]


@pytest.fixture
def data() -> np.ndarray[Any, Any]:
    """Three files' worth of bytes; the last one does not end on a page."""
    return np.random.default_rng(0).integers(0, 256, 2 * PAGES * 4096 + 100_001).astype(np.uint8)


@pytest.fixture
def segments(tmp_path: Path, data: np.ndarray[Any, Any]) -> Segments:
    """Files of `data`; what follows the payload in a file is not the array's."""
    parts = [data[: PAGES * 4096], data[PAGES * 4096 : 2 * PAGES * 4096], data[2 * PAGES * 4096 :]]
    paths = tuple(tmp_path / str(number) for number in range(3))
    for path, part, footer in zip(paths, parts, [b"\xff" * 52, b"\xff" * 52, b""], strict=True):
        path.write_bytes(part.tobytes() + footer)
    return Segments(paths, np.array([len(part) for part in parts]))


GDS = pytest.param("gds", marks=[pytest.mark.gpu, pytest.mark.skipif(bool(unavailable()), reason=str(unavailable()))])


@pytest.mark.parametrize("name", ["pread", "mmap", "uring", GDS])
class TestEngine:
    @pytest.fixture
    def engine(self, name: str, segments: Segments) -> Any:
        engine = open_engine(name, segments)
        yield engine
        engine.close()

    # Rows within a page, across pages, across files, and longer than any thread's scratch.
    @pytest.mark.parametrize("row_bytes", [1, 52, 512, 5732, 150_000, 300_000])
    @pytest.mark.parametrize("gap_bytes", [0, 2**20])
    def test_gather(self, engine: Engine, data: np.ndarray[Any, Any], row_bytes: int, gap_bytes: int) -> None:
        count = len(data) // row_bytes
        ids = np.random.default_rng(1).integers(0, count, 300 if row_bytes < 10_000 else 9)
        ids[-1] = count - 1
        plan = plan_reads(ids, row_bytes, count=count, gap_bytes=gap_bytes)
        out = np.zeros(len(ids) * row_bytes, np.uint8)
        nbytes = engine.gather(plan, out)
        wanted = [data[row * row_bytes : (row + 1) * row_bytes] for row in ids.tolist()]
        np.testing.assert_array_equal(out, np.concatenate(wanted))
        assert nbytes >= len(np.unique(ids)) * row_bytes

    @pytest.mark.parametrize("row_bytes", [52, 512, 150_000])
    def test_gather_to_given_places(self, engine: Engine, data: np.ndarray[Any, Any], row_bytes: int) -> None:
        count, rng = len(data) // row_bytes, np.random.default_rng(2)
        ids, at = rng.integers(0, count, 3), rng.permutation(5)[:3]
        out = np.full((5, row_bytes), 7, np.uint8)
        wanted = out.copy()
        wanted[at] = data[: count * row_bytes].reshape(count, row_bytes)[ids]
        engine.gather(plan_reads(ids, row_bytes, count=count), out.reshape(-1), at)
        np.testing.assert_array_equal(out, wanted)

    def test_read_fills_the_extents_and_leaves_what_lies_beyond_the_array(
        self, engine: Engine, data: np.ndarray[Any, Any]
    ) -> None:
        count = len(data)
        ids = np.array([0, 3 * 4096, PAGES * 4096 - 1, PAGES * 4096, 40 * 4096, count - 1])
        for gap_bytes, aligned in ((0, True), (0, False), (2**20, True), (2**20, False)):
            plan = plan_reads(ids, 1, count=count, gap_bytes=gap_bytes)
            buffer = _buffer(plan.nbytes, aligned)
            padded = np.concatenate([data, np.full(4096, 7, np.uint8)])
            parts = [padded[o : o + n] for o, n in zip(plan.offset.tolist(), plan.length.tolist(), strict=True)]
            held = plan.nbytes - (int(plan.offset[-1] + plan.length[-1]) - count)
            assert engine.read(plan, buffer) == held
            np.testing.assert_array_equal(buffer, np.concatenate(parts))

    def test_an_empty_plan_reads_nothing(self, engine: Engine) -> None:
        plan = plan_reads(np.zeros(0, np.int64), 8, count=10)
        assert engine.gather(plan, np.zeros(0, np.uint8)) == 0
        assert engine.read(plan, np.zeros(0, np.uint8)) == 0

    def test_a_buffer_of_the_wrong_size_is_refused(self, engine: Engine) -> None:
        plan = plan_reads(np.array([1, 2]), 8, count=10)
        with pytest.raises(ValueError, match="buffer must be"):
            engine.read(plan, np.zeros(17, np.uint8))
        with pytest.raises(ValueError, match="out must be"):
            engine.gather(plan, np.zeros(17, np.uint8))

    def test_calls_from_many_threads(self, engine: Engine, data: np.ndarray[Any, Any]) -> None:
        count = len(data) // 52
        requests = [np.random.default_rng(seed).integers(0, count, 500) for seed in range(16)]
        rows = data[: count * 52].reshape(count, 52)

        def gather(ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            out = np.zeros((len(ids), 52), np.uint8)
            engine.gather(plan_reads(ids, 52, count=count, gap_bytes=0), out.reshape(-1))
            return out

        with ThreadPoolExecutor(8) as pool:
            for ids, out in zip(requests, pool.map(gather, requests), strict=True):
                np.testing.assert_array_equal(out, rows[ids])

    def test_close_is_idempotent_and_spares_the_others(self, name: str, segments: Segments) -> None:
        one, other = open_engine(name, segments), open_engine(name, segments)
        plan = plan_reads(np.arange(0, 300_000, 4096), 1, count=400_000, gap_bytes=0)
        one.close()
        one.close()
        other.gather(plan, np.zeros(len(plan.order), np.uint8))
        other.close()
        with pytest.raises(StoreError, match="closed"):
            one.gather(plan, np.zeros(len(plan.order), np.uint8))

    def test_a_missing_or_truncated_file_is_named_on_opening(self, name: str, segments: Segments) -> None:
        segments.paths[1].write_bytes(b"short")
        with pytest.raises(StoreError, match=f"{segments.paths[1]} is truncated: 5 bytes where {PAGES * 4096}"):
            open_engine(name, segments)
        segments.paths[1].unlink()
        with pytest.raises(StoreError, match=f"{segments.paths[1]} is missing"):
            open_engine(name, segments)

    def test_closing_leaves_no_descriptor_thread_or_map(self, name: str, segments: Segments) -> None:
        open_engine(name, segments).close()  # what a library opens once for the process is no leak
        before = held()
        for _ in range(3):
            engine = open_engine(name, segments)
            for row_bytes in (512, 150_000):
                ids = np.arange(0, 400_000 // row_bytes, 2)
                plan = plan_reads(ids, row_bytes, count=400_000 // row_bytes, gap_bytes=0)
                engine.gather(plan, np.zeros(len(ids) * row_bytes, np.uint8))
            engine.close()
        assert held() == before

    def test_out_must_be_writable_and_places_within_it(self, engine: Engine) -> None:
        plan = plan_reads(np.array([1, 2]), 512, count=10)
        out = np.zeros(1024, np.uint8)
        out.flags.writeable = False
        with pytest.raises(ValueError, match="out must be contiguous and writable"):
            engine.gather(plan, out)
        with pytest.raises(ValueError, match="out must be contiguous and writable"):
            engine.gather(plan, np.zeros(2048, np.uint8)[::2])
        for places in ([0, 2], [-1, 0]):
            with pytest.raises(ValueError, match="at must be"):
                engine.gather(plan, np.zeros(1024, np.uint8), np.array(places))


def held() -> tuple[int, list[str], int]:
    """This process's descriptors, reading threads, and maps of files and rings."""
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("ooc-r")]
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), threads, maps.count("io_uring") + maps.count("pytest-of")


@pytest.mark.parametrize("name", ["pread", "uring"])  # a map has no reads that fail: a file that shrinks under it is a SIGBUS
class TestFaults:
    """The system's own: what stands in the place of a file's descriptor decides what a read of it returns."""

    @pytest.fixture
    def engine(self, name: str, segments: Segments) -> Any:
        before = held()
        engine = open_engine(name, segments)
        yield engine
        engine.close()
        assert held() == before

    # Pages of all three files; one by one, and as one extent.
    @pytest.mark.parametrize("gap_bytes", [0, 2**20])
    @pytest.mark.parametrize(
        ("path", "flags", "what"),
        [
            ("/proc/self/mem", os.O_RDONLY, "Input/output error"),  # no memory is mapped at these addresses
            (os.devnull, os.O_WRONLY, "Bad file descriptor"),
            ("/", os.O_RDONLY | os.O_DIRECTORY, "Is a directory"),
            (os.devnull, os.O_RDONLY, "the file ends there"),
        ],
    )
    def test_a_failing_read_names_file_and_byte(
        self, engine: Any, data: np.ndarray[Any, Any], segments: Segments, path: str, flags: int, what: str, gap_bytes: int
    ) -> None:
        fd = os.open(path, flags | os.O_CLOEXEC)
        os.dup2(fd, int(engine._fds[0]))
        os.close(fd)
        plan = plan_reads(np.arange(0, len(data), 2 * 4096), 1, count=len(data), gap_bytes=gap_bytes)
        with pytest.raises(StoreError, match=rf"{segments.paths[0]} cannot be read at byte \d+: {what}"):
            engine.gather(plan, np.zeros(len(plan.order), np.uint8))
        with pytest.raises(StoreError, match=rf"{segments.paths[0]} cannot be read at byte \d+: {what}"):
            engine.read(plan, np.zeros(plan.nbytes, np.uint8))
        positions = np.arange(PAGES * 4096, len(data), 3000)  # the other files are read as ever
        out = np.zeros(len(positions), np.uint8)
        engine.gather(plan_reads(positions, 1, count=len(data)), out)
        np.testing.assert_array_equal(out, data[positions])

    @pytest.mark.parametrize("size", [0, 3 * 4096, 3 * 4096 + 100, 5 * 4096])
    def test_a_file_that_shrinks_while_open(
        self, engine: Any, data: np.ndarray[Any, Any], segments: Segments, size: int
    ) -> None:
        os.truncate(segments.paths[1], size)
        byte = size // 4096 * 4096
        first = PAGES * 4096 // 40960 + 1  # the first row that begins in the second file
        plan = plan_reads(np.array([first]), 10 * 4096, count=2 * PAGES * 4096 // 40960)
        begin = first * 40960 - PAGES * 4096
        with pytest.raises(StoreError, match=f"{segments.paths[1]} cannot be read at byte {max(byte, begin)}: the file ends"):
            engine.gather(plan, np.zeros(10 * 4096, np.uint8))
