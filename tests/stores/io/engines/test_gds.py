"""What is particular to the engine gds: refusals, and reads into GPU memory, here with the host's in its place.

kvikio cannot read without a CUDA driver. A stand-in for its file handle, over the same files, shows which reads are made and
where they land; that kvikio makes them is tested where there is a GPU (tests/gpu, and the engines' contract).
"""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ooc.runtime.memory_plan import SCRATCH_BYTES, read_buffer_bytes
from ooc.stores.errors import ConfigError, StoreError
from ooc.stores.io.engines import describe, gds, open_engine
from ooc.stores.io.engines.gds import DEPTH, GdsEngine
from ooc.stores.io.read_plan import plan_reads
from ooc.stores.io.segments import Segments
from tests.forked import python

SIZES = (5 * 4096, 40 * 4096, 3 * 4096 + 77)
DATA = np.random.default_rng(0).integers(0, 256, sum(SIZES)).astype(np.uint8)


class DeviceBuffer:
    """Bytes that look like a GPU's; slices are views, as of torch's and cupy's arrays."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self.array.__array_interface__, "version": 3}

    def __getitem__(self, part: slice) -> "DeviceBuffer":
        return DeviceBuffer(self.array[part])


class File:
    """kvikio.CuFile's `pread`: a future of the bytes read, RuntimeError where the system refuses."""

    def __init__(self, path: Path, flags: str, log: list[tuple[str, Any]]) -> None:
        self.log, self.name = log, Path(path).name
        self.fd = os.open(path, os.O_RDONLY)

    def pread(self, buffer: DeviceBuffer, size: int, file_offset: int) -> Any:
        assert len(buffer.array) == size
        self.log.append((self.name, "begin"))

        def get() -> int:
            self.log.append((self.name, "end"))
            try:
                return os.preadv(self.fd, [memoryview(buffer.array)], file_offset)
            except OSError as error:
                raise RuntimeError(f"KvikIO failure: {error.strerror}\nmore") from error

        return SimpleNamespace(get=get)

    def close(self) -> None:
        os.close(self.fd)


class Defaults:
    """kvikio.defaults, with the values of version 26.10; an unknown name is a KeyError."""

    def __init__(self, log: list[tuple[str, Any]]) -> None:
        self.log, self.compatible = log, False
        self.values: dict[str, Any] = {
            "num_threads": 1,
            "gds_threshold": 16384,
            "bounce_buffer_size": 2**24,
            "task_size": 2**22,
        }
        self.values["auto_direct_io_read"] = False

    def get(self, name: str) -> Any:
        return self.values[name]

    def set(self, config: dict[str, Any]) -> None:
        for name, value in config.items():
            _ = self.values[name]
            self.values[name] = value
            self.log.append(("set", name))

    def is_compat_mode_preferred(self) -> bool:
        return self.compatible


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    events: list[tuple[str, Any]] = []
    kvikio = SimpleNamespace(
        CuFile=lambda path, flags: File(path, flags, events),
        defaults=Defaults(events),
        cufile_driver=SimpleNamespace(properties=SimpleNamespace(is_gds_available=True)),
        memory_register=lambda buffer: events.append(("memory", "register")),
        memory_deregister=lambda buffer: events.append(("memory", "deregister")),
    )
    for _, variables in gds.SETTINGS.values():
        for variable in variables:
            monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(gds, "unavailable", lambda: None)
    monkeypatch.setattr(gds, "_kvikio", lambda: kvikio)
    return events


@pytest.fixture(scope="module")
def segments(tmp_path_factory: pytest.TempPathFactory) -> Segments:
    folder = tmp_path_factory.mktemp("gds")
    start = np.cumsum((0, *SIZES))
    paths = tuple(folder / str(number) for number in range(len(SIZES)))
    for path, first, size in zip(paths, start, SIZES, strict=False):
        path.write_bytes(DATA[first : first + size].tobytes() + b"\xff" * 60)  # an index behind the payload
    return Segments(paths, np.array(SIZES))


@pytest.fixture
def engine(log: Any, segments: Segments) -> Any:
    engine = open_engine("gds", segments)
    yield engine
    engine.close()


@pytest.mark.skipif(gds.unavailable() is None, reason="gds can be used here")
def test_without_cuda_or_kvikio_one_line_says_what_is_missing(tmp_path: Path, segments: Segments, make_store: Any) -> None:
    with pytest.raises(ConfigError, match=r"the engine gds cannot be used: .+: .+; or choose the engine auto"):
        open_engine("gds", segments)
    done = python("-m", "ooc.cli", "train", make_store(), "--out", tmp_path / "run", "--engine", "gds")
    assert done.returncode == 2
    assert done.stderr.startswith("ooc: error: the engine gds cannot be used: ")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("log")
class TestReads:
    @given(
        st.lists(st.integers(0, len(DATA) // 100 - 1), max_size=30),
        st.sampled_from([0, 8192, 2**20]),
        st.sampled_from([4096, 2**14, 2**20]),
    )
    @settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_a_buffer_in_gpu_memory_is_filled_as_one_in_the_host_s(
        self, engine: GdsEngine, ids: list[int], gap_bytes: int, most: int
    ) -> None:
        count = len(DATA) // 100
        plan = plan_reads(np.array(ids, np.int64), 100, count=count, gap_bytes=gap_bytes, max_extent_bytes=most)
        host, device = np.full(plan.nbytes, 7, np.uint8), np.full(plan.nbytes, 7, np.uint8)
        assert engine.read(plan, DeviceBuffer(device)) == engine.read(plan, host)
        np.testing.assert_array_equal(device, host)

    def test_reads_are_as_large_as_the_extents_and_files_allow(self, engine: GdsEngine, log: list[Any]) -> None:
        plan = plan_reads(np.arange(len(DATA)), 1, count=len(DATA), max_extent_bytes=2**24)
        device = np.zeros(plan.nbytes, np.uint8)
        assert engine.read(plan, DeviceBuffer(device)) == len(DATA)
        np.testing.assert_array_equal(device[: len(DATA)], DATA)
        assert [event for event in log if event[1] == "begin"] == [("0", "begin"), ("1", "begin"), ("2", "begin")]

    def test_so_many_are_in_flight_and_no_more(
        self, engine: GdsEngine, log: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(gds, "DEPTH", 4)
        plan = plan_reads(np.arange(0, len(DATA), 8192), 1, count=len(DATA), gap_bytes=0)
        engine.read(plan, DeviceBuffer(np.zeros(plan.nbytes, np.uint8)))
        steps = [{"begin": 1, "end": -1}.get(event[1], 0) for event in log if event[0] != "set"]
        assert np.cumsum(steps).max() == 4 < DEPTH
        assert sum(steps) == 0

    def test_a_failure_names_file_and_byte_once_no_read_is_under_way(self, engine: GdsEngine, log: list[Any]) -> None:
        null = os.open(os.devnull, os.O_RDONLY)
        for place, what in ((null, "the file ends there"), (os.open("/", os.O_RDONLY), "KvikIO failure: Is a directory")):
            os.dup2(place, engine._files[1].fd)
            os.close(place)
            plan = plan_reads(np.arange(len(DATA)), 1, count=len(DATA), max_extent_bytes=8192)
            with pytest.raises(StoreError, match=rf"/1 cannot be read at byte 0: {what}; verify"):
                engine.read(plan, DeviceBuffer(np.zeros(plan.nbytes, np.uint8)))
            events = [event[1] for event in log]
            assert events.count("begin") == events.count("end")

    def test_what_is_active_is_told(self, engine: GdsEngine, segments: Segments) -> None:
        assert describe(engine) == "gds (into GPU memory by kvikio, GPUDirect is active; into host memory by pread)"
        gds._kvikio().cufile_driver.properties.is_gds_available = False
        other = open_engine("gds", segments)
        assert "GPUDirect is not active: the driver nvidia-fs is not loaded; page-locked buffers instead" in describe(other)
        other.close()

    def test_why_kvikio_is_in_compatibility_mode(self, engine: GdsEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        gds._kvikio().defaults.compatible = True
        monkeypatch.setattr(os, "access", lambda path, mode: True)
        assert gds.why_not_direct() == (
            "kvikio is in compatibility mode: libcufile.so cannot be used (it comes with the CUDA toolkit, or the wheel "
            "nvidia-cufile)"
        )
        monkeypatch.setattr(os, "access", lambda path, mode: False)
        assert "/run/udev cannot be read" in str(gds.why_not_direct())
        monkeypatch.setenv("KVIKIO_COMPAT_MODE", "ON")
        assert gds.why_not_direct() == "kvikio is in compatibility mode: KVIKIO_COMPAT_MODE is on"

    def test_threads_and_buffers_of_kvikio_are_set_once_and_fit_the_memory_for_reads(
        self, engine: GdsEngine, segments: Segments, log: list[Any]
    ) -> None:
        assert engine.least_bytes == 16384
        assert sorted(name for kind, name in log if kind == "set") == sorted(gds.SETTINGS)
        open_engine("gds", segments).close()
        assert len([kind for kind, _ in log if kind == "set"]) == len(gds.SETTINGS)
        assert gds.host_bytes() == 9 * 2**22
        assert read_buffer_bytes("gds") == read_buffer_bytes("auto") == SCRATCH_BYTES

    def test_what_the_environment_sets_stays_and_counts_for_the_memory(
        self, segments: Segments, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("KVIKIO_NTHREADS", "16")
        monkeypatch.setenv("KVIKIO_BOUNCE_BUFFER_SIZE", str(2**24))
        defaults = gds._kvikio().defaults
        defaults.values["num_threads"] = 16
        del defaults.values["auto_direct_io_read"]  # as in versions before it
        open_engine("gds", segments).close()
        assert (defaults.get("num_threads"), defaults.get("bounce_buffer_size")) == (16, 2**24)
        assert read_buffer_bytes("gds") == 17 * 2**24 + 128 * 2**17

    def test_a_buffer_is_registered_while_it_is_used(
        self, engine: GdsEngine, log: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        buffer = DeviceBuffer(np.zeros(8, np.uint8))
        with engine.registered(buffer):
            assert log[-1] == ("memory", "register")
        assert log[-1] == ("memory", "deregister")

        def refuse(buffer: Any) -> None:
            raise RuntimeError("cuFileBufRegister: no space in BAR1")

        monkeypatch.setattr(gds._kvikio(), "memory_register", refuse)
        with engine.registered(buffer):
            pass
        assert log.count(("memory", "deregister")) == 1

    def test_a_buffer_of_another_shape_or_type_is_refused(self, engine: GdsEngine) -> None:
        plan = plan_reads(np.array([1]), 8, count=10)
        for array in (np.zeros(17, np.uint8), np.zeros(4096, np.int8), np.zeros(8192, np.uint8)[::2]):
            with pytest.raises(ValueError, match="buffer must be"):
                engine.read(plan, DeviceBuffer(array))

    def test_closed_is_closed(self, engine: GdsEngine) -> None:
        engine.close()
        engine.close()
        plan = plan_reads(np.array([1]), 8, count=10)
        with pytest.raises(StoreError, match="closed"):
            engine.read(plan, DeviceBuffer(np.zeros(plan.nbytes, np.uint8)))

    def test_a_file_that_kvikio_cannot_open_leaves_nothing_open(
        self, segments: Segments, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(path: Path, flags: str) -> Any:
            raise RuntimeError("Unable to open file. Permission denied")

        before = sorted(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(gds._kvikio(), "CuFile", refuse)
        with pytest.raises(StoreError, match=r"/0 cannot be opened by kvikio: Unable to open file.*; choose the engine auto"):
            open_engine("gds", segments)
        assert sorted(os.listdir("/proc/self/fd")) == before
