"""The disk's profile: fitted right, measured through the engine, kept per device and engine."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.stores.arrays.zarr_rows import open_zarr_rows
from ooc.stores.arrays.zarr_write import write_array
from ooc.stores.errors import ConfigError, StoreError
from ooc.stores.io import disk
from ooc.stores.io.disk import DiskProfile, calibrate, fit, measure, profile_for
from ooc.stores.io.read_plan import DEFAULT_COST, plan_reads

SIZES = np.array(disk.SIZES)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of 4 MiB are large, and a measurement takes a few reads."""
    monkeypatch.setattr(disk, "FILE_BYTES", 4 * 2**20)
    monkeypatch.setattr(disk, "_SECONDS", 0.0)
    monkeypatch.setattr(disk, "_DEPTH_SECONDS", 0.0)
    monkeypatch.setattr(disk, "_BATCH_SECONDS", 0.0)
    monkeypatch.setattr(disk, "_LATENCY_READS", 3)


def kept(path: Path, engine: str = "pread", **changes: Any) -> DiskProfile:
    """A profile that stands in the cache for the device of `path`."""
    profile = profile_for(path, engine).model_copy(update={"read_s": 1e-3, "measured": "2026-01-01", **changes})
    file = disk._cache_file(profile.device, profile.size_bytes, engine)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(profile.model_dump_json())
    return profile


@given(st.floats(1e-7, 1e-2), st.floats(1e-11, 1e-7))
@settings(max_examples=100, deadline=None)
def test_fit_finds_the_cost_that_made_the_table(read_s: float, byte_s: float) -> None:
    assert fit(SIZES, 1 / (read_s + SIZES * byte_s)) == pytest.approx((read_s, byte_s), rel=1e-6)


@given(st.lists(st.floats(1.0, 1e7), min_size=5, max_size=5))
@settings(max_examples=100, deadline=None)
def test_no_cost_nearby_fits_better(rates: list[float]) -> None:
    rate = np.array(rates)

    def error(read_s: float, byte_s: float) -> float:
        return float(((read_s + SIZES * byte_s) * rate - 1) @ ((read_s + SIZES * byte_s) * rate - 1))

    read_s, byte_s = fit(SIZES, rate)
    assert read_s >= 0
    assert byte_s > 0
    least = error(read_s, byte_s)
    step_read, step_byte = 1e-3 / rate.max(), 1e-3 / (SIZES * rate).max()
    for x, y in [(1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, -1), (1, -1), (-1, 1)]:
        other = max(0.0, read_s + x * step_read), max(disk._LEAST_BYTE_S, byte_s + y * step_byte)
        assert least <= error(*other) * (1 + 1e-9) + 1e-9


def test_what_was_never_measured_is_the_default(tmp_path: Path) -> None:
    profile = profile_for(tmp_path, "pread")
    assert (profile.measured, profile.cost, profile.table) == (None, DEFAULT_COST, ())
    assert profile.size_bytes > 0
    assert "never measured" in str(profile)
    assert profile_for(tmp_path, "mmap").cost.gap_bytes == 0
    with pytest.raises(StoreError, match="absent cannot be found: No such file"):
        profile_for(tmp_path / "absent", "pread")


def test_rows_are_read_at_the_depth_that_was_measured(tmp_path: Path, cache: Path) -> None:
    write_array(tmp_path, "x", np.zeros((10, 3)))
    for depth in (None, 7):
        if depth is not None:
            kept(tmp_path, depth=depth)
        rows = open_zarr_rows(tmp_path, "x", engine="pread")
        assert rows.engine.inner.depth == (depth or 128)
        rows.close()


def test_a_kept_profile_is_that_of_its_device_and_engine(tmp_path: Path, cache: Path) -> None:
    profile = kept(tmp_path)
    (tmp_path / "file").touch()
    assert profile_for(tmp_path / "file", "pread") == profile
    assert profile_for(tmp_path, "uring").measured is None
    (file,) = cache.rglob("*.json")
    file.write_text(profile.model_copy(update={"device": "another disk"}).model_dump_json())
    assert profile_for(tmp_path, "pread").measured is None


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"\xff", b'{"version": 2}', b"null"])
def test_a_cache_of_no_use_is_not_there(tmp_path: Path, cache: Path, content: bytes) -> None:
    kept(tmp_path)
    (file,) = cache.rglob("*.json")
    file.write_bytes(content)
    assert profile_for(tmp_path, "pread").measured is None


@pytest.mark.parametrize("changes", [{"version": 2}, {"byte_s": 0.0}, {"read_s": -1.0}, {"read_s": float("inf")}])
def test_a_kept_profile_that_makes_no_sense_is_not_there(tmp_path: Path, changes: dict[str, Any]) -> None:
    kept(tmp_path, **changes)
    assert profile_for(tmp_path, "pread").measured is None


@pytest.mark.usefixtures("small")
class TestMeasure:
    def test_a_large_file_is_read_and_nothing_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "large").write_bytes(os.urandom(5 * 2**20))
        monkeypatch.setattr(disk.tempfile, "TemporaryFile", None)
        for path in (tmp_path, tmp_path / "large"):
            profile = measure(path, "pread")
            assert [line.nbytes for line in profile.table] == list(disk.SIZES)
            expected = fit(SIZES, np.array([line.reads_per_s for line in profile.table]))
            assert (profile.read_s, profile.byte_s) == expected
            assert profile.latency_s > 0
            assert [line.depth for line in profile.depths] == [8, 16, 32, 64, 128]
            assert profile.depth == disk.least_depth(profile.depths)
            assert f"small reads in flight: {profile.depth} (reads/s of 4 KiB by depth: 8: " in str(profile)
            assert profile.measured is not None
        assert [file.name for file in tmp_path.iterdir()] == ["large"]

    def test_without_one_a_temporary_file_is_read_and_removed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = tmp_path / "folder"
        folder.mkdir()
        (folder / "small").write_bytes(b"x")
        with (folder / "hole").open("wb") as file:
            file.truncate(2**30)
        (folder / "link").symlink_to(folder / "hole")
        opened, beside = [], []
        real = disk.open_engine

        def opening(name: str, segments: Any) -> Any:
            opened.append(os.stat(segments.paths[0]))
            beside.append(sorted(file.name for file in folder.iterdir()))
            return real(name, segments)

        monkeypatch.setattr(disk, "open_engine", opening)
        for path in (folder, folder / "small", folder / "hole"):
            measure(path, "pread")
            assert (opened[-1].st_size, opened[-1].st_dev) == (4 * 2**20, folder.stat().st_dev)
            assert beside[-1] == ["hole", "link", "small"], "a kill would leave it there"
        assert sorted(file.name for file in folder.iterdir()) == ["hole", "link", "small"]

    def test_the_temporary_file_goes_when_the_measurement_fails(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(*args: Any) -> float:
            raise KeyboardInterrupt

        monkeypatch.setattr(disk, "_latency", interrupted)
        with pytest.raises(KeyboardInterrupt):
            measure(tmp_path, "pread")
        assert list(tmp_path.iterdir()) == []

    def test_what_is_measured_is_kept(self, tmp_path: Path, cache: Path) -> None:
        profile = calibrate(tmp_path, "pread")
        assert profile_for(tmp_path, "pread") == profile
        assert [file.suffix for file in (cache / "ooc" / "disks").iterdir()] == [".json"]  # nothing temporary
        assert DiskProfile.model_validate_json(profile.model_dump_json()) == profile

    def test_a_cache_that_cannot_be_written_is_a_warning(self, tmp_path: Path, cache: Path) -> None:
        cache.write_text("a file")
        with pytest.warns(UserWarning, match=f"the disk's measurement was not saved: cannot write {cache}"):
            assert calibrate(tmp_path, "pread").measured is not None

    def test_what_cannot_be_measured(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="mmap cannot be measured"):
            measure(tmp_path, "mmap")
        with pytest.raises(StoreError, match="absent cannot be found"):
            measure(tmp_path / "absent")


@pytest.mark.parametrize("nbytes", [4096, 16_384])
def test_requests_are_distinct_extents_in_file_order(nbytes: int) -> None:
    plan = disk._extents(100 * nbytes, nbytes, 50)
    assert len(plan.length) == 50
    assert len(disk._extents(10 * nbytes, nbytes, 50).length) == 10
    a_row_of_each_page = (plan.offset[:, None] + np.arange(0, nbytes, 4096)).reshape(-1) // 512
    planned = plan_reads(a_row_of_each_page, 512, count=100 * nbytes, gap_bytes=0, max_extent_bytes=nbytes)
    for field in ("row_bytes", "offset", "length", "row_at", "order", "first"):
        np.testing.assert_array_equal(getattr(plan, field), getattr(planned, field))


def test_the_table_is_printed() -> None:
    table = tuple(disk.Measured(nbytes=size, reads_per_s=1 / (8e-6 + size * 1e-9)) for size in disk.SIZES)
    text = str(
        DiskProfile(
            device="vda",
            size_bytes=10**11,
            engine="uring",
            read_s=8e-6,
            byte_s=1e-9,
            latency_s=5e-5,
            table=table,
            measured="now",
        )
    )
    assert text.splitlines()[0] == "vda (100 GB), engine uring: measured now"
    assert "4 KiB     82,672     339 MB/s     82,672" in text
    assert text.endswith("so rows up to 4 KiB apart share a read")


def test_devices_are_named_as_the_system_names_them(tmp_path: Path) -> None:
    name, size_bytes = disk._device(tmp_path)
    assert size_bytes >= os.statvfs(tmp_path).f_bavail
    assert name == disk._device(tmp_path.parent)[0]
    assert disk._device(Path("/proc"))[0] == "proc"
