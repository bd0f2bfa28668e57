"""Cost of reads on a disk: measured once through the engine itself, saved per device, and used by the read planner.

The measurement is fio's (direct random reads with many in flight, for several block sizes), made by the engine that will do the
reading, so that its overhead is included.
"""

import os
import re
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from ooc.stores.errors import ConfigError, OocWarning, StoreError
from ooc.stores.io.atomic import disk_errors, write_file
from ooc.stores.io.engines import Engine, open_engine
from ooc.stores.io.engines.pread import DEPTH, PreadEngine
from ooc.stores.io.read_plan import DEFAULT_COST, ReadCost, ReadPlan
from ooc.stores.io.segments import Segments
from ooc.stores.sizes import format_bytes

SIZES = (4096, 16 * 1024, 64 * 1024, 256 * 1024, 2**20)
"""extent sizes that are measured, in bytes"""
DEPTHS = (8, 16, 32, 64, 128, 256)
"""queue depths that are measured, as far as the engine supports them"""
NEARLY_ALL = 0.97
"""the smallest depth reaching this share of the highest read rate is used, because each read in flight adds latency"""
FILE_BYTES = 256 * 2**20
"""a smaller file could be in the device's own cache"""
_BUFFER_BYTES = 8 * 2**20
_ROW_BYTES = 512
_SECONDS, _DEPTH_SECONDS = 1.6, 1.2
_BATCH_SECONDS = 0.04
_FIRST_READS = 64  # in a request, until it is known what they take: a hard disk does a hundred a second
_LATENCY_READS = 200
_LATENCY_SECONDS = 0.2
_FILES_LOOKED_AT = 10_000
_LEAST_BYTE_S = 1e-18
_PAGE_BYTES = 4096
_MMAP_COST = ReadCost(read_s=0.0, byte_s=10e-6 / _PAGE_BYTES, latency_s=70e-6)
"""a map is read page by page on faults, so merging reads gains nothing"""


class Measured(BaseModel):
    """A measurement: random extents of `nbytes`, as many in flight as the engine allows."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    nbytes: PositiveInt
    reads_per_s: PositiveFloat


class MeasuredDepth(BaseModel):
    """A measurement: random extents of 4 KiB, `depth` of them in flight."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    depth: PositiveInt
    reads_per_s: PositiveFloat


class DiskProfile(BaseModel):
    """Cost of reading from one device through one engine; frozen, serialized by pydantic, printed as a table.

    Attributes:
        device: Name of the device, and `size_bytes` its size.
        read_s: See `ooc.stores.io.read_plan.ReadCost`, as for `byte_s` and `latency_s`; fitted to `table`.
        depth: Small reads the engine should keep in flight; chosen from `depths`.
        note: Why the engine does less than its name says, or None.
        measured: Time of the measurement; None for the default profile.

    >>> profile = profile_for("papers.ooc", "uring")
    >>> profile.cost.gap_bytes
    12288
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    version: Literal[1] = 1
    device: str
    size_bytes: int = Field(ge=0)
    engine: str
    read_s: float = Field(ge=0, allow_inf_nan=False)
    byte_s: PositiveFloat
    latency_s: float = Field(ge=0, allow_inf_nan=False)
    table: tuple[Measured, ...] = ()
    depth: PositiveInt = DEPTH
    depths: tuple[MeasuredDepth, ...] = ()
    note: str | None = None
    measured: str | None = None

    @property
    def cost(self) -> ReadCost:
        """The cost of extents, for the read planner."""
        return ReadCost(self.read_s, self.byte_s, self.latency_s)

    def __str__(self) -> str:
        when = "never measured: the default" if self.measured is None else f"measured {self.measured}"
        lines = [f"{self.device} ({format_bytes(self.size_bytes)}), engine {self.engine}: {when}"]
        lines += [] if self.note is None else [f"note: {self.note}"]
        if self.table:
            lines.append(f"{'bytes a read':>12} {'reads/s':>10} {'bandwidth':>12} {'model':>10}")
        for line in self.table:
            model = 1 / (self.read_s + line.nbytes * self.byte_s)
            bandwidth = format_bytes(line.nbytes * line.reads_per_s) + "/s"
            lines.append(f"{line.nbytes // 1024:>8} KiB {line.reads_per_s:>10,.0f} {bandwidth:>12} {model:>10,.0f}")
        rates = ", ".join(f"{line.depth}: {line.reads_per_s:,.0f}" for line in self.depths)
        lines.append(f"small reads in flight: {self.depth}" + (f" (reads/s of 4 KiB by depth: {rates})" if rates else ""))
        bandwidth = format_bytes(1 / self.byte_s)
        lines.append(f"one small read by itself takes {self.latency_s * 1e6:.0f} us")
        lines.append(f"with many in flight a read costs {self.read_s * 1e6:.1f} us and its bytes, at {bandwidth}/s")
        lines.append(f"so rows up to {self.cost.gap_bytes // 1024} KiB apart share a read")
        return "\n".join(lines)


def profile_for(path: Path | str, engine: str) -> DiskProfile:
    """Return the saved profile of the device that holds `path` and of `engine` (not "auto"), else the default.

    A damaged profile or one of another version is ignored. Raises StoreError if `path` does not exist.

    >>> profile_for("papers.ooc", "pread").cost.seconds(plan.length)
    """
    device, size_bytes = _device(Path(path))
    try:
        cached = DiskProfile.model_validate_json(_cache_file(device, size_bytes, engine).read_bytes())
        if (cached.device, cached.size_bytes, cached.engine) == (device, size_bytes, engine):
            return cached
    except (OSError, ValidationError):
        pass  # missing or unusable
    cost = _MMAP_COST if engine == "mmap" else DEFAULT_COST
    return DiskProfile(device=device, size_bytes=size_bytes, engine=engine, **vars(cost))


def calibrate(path: Path | str, engine: str = "auto") -> DiskProfile:
    """Measure the device and save the profile for `profile_for`; warns if it cannot be saved.

    >>> print(calibrate("papers.ooc"))
    """
    profile = measure(path, engine)
    file = _cache_file(profile.device, profile.size_bytes, profile.engine)
    try:
        with disk_errors(file):
            file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, profile.model_dump_json(indent=1).encode())
    except StoreError as error:
        warnings.warn(f"the disk's measurement was not saved: {error}", OocWarning, stacklevel=2)
    return profile


def measure(path: Path | str, engine: str = "auto") -> DiskProfile:
    """Measure the device that holds `path` through `engine`, in about three seconds and 8 MiB of memory.

    Reads at random from `path`, the largest file below it on the same device, or a temporary file if none has 256 MiB. Raises
    StoreError if `path` does not exist or there is no space, ConfigError for the engine "mmap", whose reads the page cache
    serves.

    >>> measure("papers.ooc").read_s
    8.1e-06
    """
    device, size_bytes = _device(Path(path))
    if engine == "mmap":
        raise ConfigError("the engine mmap cannot be measured: the page cache serves its reads; measure uring or pread")
    with large_file(Path(path)) as file:
        segments = Segments((file,), np.array([file.stat().st_size // _PAGE_BYTES * _PAGE_BYTES]))
        opened = open_engine(engine, segments)
        assert isinstance(opened, PreadEngine)  # all other engines are
        try:
            if opened.reason is not None:  # possibly no O_DIRECT: exclude the page cache
                _drop_cache(file)
            latency_s = _latency(opened, segments.total)
            depths = _depths(opened, segments.total)
            opened.depth = least_depth(depths)
            table = _table(opened, segments.total)
        finally:
            opened.close()
    read_s, byte_s = fit(np.array(SIZES), np.array([line.reads_per_s for line in table]))
    return DiskProfile(
        device=device,
        size_bytes=size_bytes,
        engine=opened.name,
        read_s=read_s,
        byte_s=byte_s,
        latency_s=latency_s,
        table=table,
        depth=opened.depth,
        depths=depths,
        note=opened.reason,
        measured=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def fit(nbytes: NDArray[np.int64], reads_per_s: NDArray[np.float64]) -> tuple[float, float]:
    """Fit read_s >= 0 and byte_s > 0 to 1 / reads_per_s = read_s + nbytes * byte_s by relative least squares.

    >>> fit(np.array([4096, 2**20]), 1 / (8e-6 + np.array([4096, 2**20]) * 1e-9))
    (8e-06, 1e-09)
    """
    a, b = reads_per_s, nbytes * reads_per_s  # solve read_s * a + byte_s * b = 1
    (read_s, byte_s), *_ = np.linalg.lstsq(np.stack([a, b], 1) / [a.max(), b.max()], np.ones(len(a)), rcond=None)
    read_s, byte_s = read_s / a.max(), byte_s / b.max()
    if read_s < 0:
        read_s, byte_s = 0.0, b.sum() / (b @ b)
    elif byte_s <= 0:
        read_s, byte_s = a.sum() / (a @ a), _LEAST_BYTE_S  # size does not matter: merge whatever fits an extent
    return float(read_s), float(byte_s)


def least_depth(depths: Sequence[MeasuredDepth]) -> int:
    """Return the smallest depth that reaches `NEARLY_ALL` of the highest read rate.

    >>> least_depth([MeasuredDepth(depth=64, reads_per_s=99_000), MeasuredDepth(depth=128, reads_per_s=100_000)])
    64
    """
    most = max(line.reads_per_s for line in depths)
    return min(line.depth for line in depths if line.reads_per_s >= NEARLY_ALL * most)


def _extents(total: int, nbytes: int, reads: int) -> ReadPlan:
    """Random distinct extents in file order, with one 512-byte row per page, as when scattered rows are gathered."""
    slots, pages = total // nbytes, nbytes // _PAGE_BYTES
    offset = np.sort(np.random.default_rng().choice(slots, min(reads, slots), replace=False)) * nbytes
    rows = np.arange(len(offset) * pages)
    first = np.arange(len(offset) + 1) * pages
    return ReadPlan(_ROW_BYTES, offset, np.full(len(offset), nbytes), rows * _PAGE_BYTES, rows, first)


def _timed(engine: Engine, plan: ReadPlan, buffer: NDArray[np.uint8]) -> float:
    start = time.perf_counter()
    engine.gather(plan, buffer[: len(plan.order) * _ROW_BYTES])
    return time.perf_counter() - start


def _latency(engine: Engine, total: int) -> float:
    """Median seconds of a single small read."""
    buffer = np.zeros(_PAGE_BYTES, np.uint8)
    _timed(engine, _extents(total, _PAGE_BYTES, 1), buffer)  # compiles the kernels, starts the threads
    taken: list[float] = []
    while len(taken) < _LATENCY_READS and sum(taken) < _LATENCY_SECONDS:
        taken.append(_timed(engine, _extents(total, _PAGE_BYTES, 1), buffer))
    return float(np.median(taken))


def _table(engine: Engine, total: int) -> tuple[Measured, ...]:
    """Reads per second for each size: medians over rounds, because a shared disk varies by the minute."""
    buffer = np.zeros(_BUFFER_BYTES, np.uint8)
    reads = {nbytes: _request_size(engine, total, nbytes, buffer) for nbytes in SIZES}
    rates: dict[int, list[float]] = {nbytes: [] for nbytes in SIZES}
    end = time.perf_counter() + _SECONDS
    while len(rates[SIZES[-1]]) < 2 or time.perf_counter() < end:
        for nbytes in SIZES:
            plan = _extents(total, nbytes, reads[nbytes])
            rates[nbytes].append(len(plan.length) / _timed(engine, plan, buffer))
    return tuple(Measured(nbytes=nbytes, reads_per_s=float(np.median(rate))) for nbytes, rate in rates.items())


def _depths(engine: PreadEngine, total: int) -> tuple[MeasuredDepth, ...]:
    """Reads of 4 KiB per second at each depth: medians over rounds."""
    buffer = np.zeros(_BUFFER_BYTES, np.uint8)
    own, depths = engine.depth, [depth for depth in DEPTHS if depth <= engine.most_depth]
    reads = _request_size(engine, total, _PAGE_BYTES, buffer)
    rates: dict[int, list[float]] = {depth: [] for depth in depths}
    end = time.perf_counter() + _DEPTH_SECONDS
    while len(rates[depths[-1]]) < 3 or time.perf_counter() < end:
        for engine.depth in depths:
            plan = _extents(total, _PAGE_BYTES, reads)
            rates[engine.depth].append(len(plan.length) / _timed(engine, plan, buffer))
    engine.depth = own
    return tuple(MeasuredDepth(depth=depth, reads_per_s=float(np.median(rate))) for depth, rate in rates.items())


def _request_size(engine: Engine, total: int, nbytes: int, buffer: NDArray[np.uint8]) -> int:
    """Reads per request that fit the buffer and take long enough to be timed; also warms up."""
    most = min(len(buffer) // _ROW_BYTES * _PAGE_BYTES, total) // nbytes
    reads = min(_FIRST_READS, most)
    while _timed(engine, _extents(total, nbytes, reads), buffer) < _BATCH_SECONDS and reads < most:
        reads = min(reads * 4, most)
    return reads


@contextmanager
def large_file(path: Path) -> Iterator[Path]:
    """Yield `path`, the largest file below it, or a temporary file that is removed afterwards."""
    folder = path if path.is_dir() else path.parent
    found = _largest_below(path) if path.is_dir() else path.resolve()
    if found is not None and _allocated_bytes(found) >= FILE_BYTES:
        yield found
        return
    with disk_errors(folder), tempfile.TemporaryFile(dir=folder) as file:  # without a name, which a kill would leave there
        generator = np.random.default_rng()
        for _ in range(0, FILE_BYTES, 2**20):
            file.write(generator.bytes(2**20))  # random, because a file system may not store zeros
        file.flush()
        os.fsync(file.fileno())
        opened = Path(f"/proc/self/fd/{file.fileno()}")
        _drop_cache(opened)
        yield opened


def _largest_below(folder: Path) -> Path | None:
    """The largest file on the folder's device, among the first 10,000."""
    device = folder.stat().st_dev
    largest, most, visited = None, 0, 0
    for where, _, names in os.walk(folder):
        for name in names:
            file = Path(where, name)
            if not file.is_symlink() and file.is_file() and file.stat().st_dev == device and _allocated_bytes(file) > most:
                largest, most = file, _allocated_bytes(file)
        visited += len(names)
        if visited >= _FILES_LOOKED_AT:
            break
    return largest


def _allocated_bytes(file: Path) -> int:
    """Bytes of the file if it is readable and fully allocated, else 0; holes would be read at memory speed."""
    status = file.stat()
    allocated = status.st_blocks * 512 >= status.st_size
    return status.st_size if allocated and os.access(file, os.R_OK) else 0


def _drop_cache(file: Path) -> None:
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _cache_file(device: str, size_bytes: int, engine: str) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    name = re.sub(r"[^\w.-]+", "_", f"{device}-{size_bytes}-{engine}")
    return Path(base) / "ooc" / "disks" / f"{name}.json"


def _device(path: Path) -> tuple[str, int]:
    """Return name and size in bytes of the disk that holds `path` (for a partition, of its disk).

    For a file system without a block device (btrfs, overlay, NFS, tmpfs), its mount source and size.
    """
    try:
        number = path.stat().st_dev
    except OSError as error:
        raise StoreError(f"{path} cannot be found: {error.strerror}; name a file or a directory on the disk") from error
    source = _mount_source(number)
    block = _block_device(number)
    if block is None and source.startswith("/dev/") and os.path.exists(source):
        block = _block_device(os.stat(source).st_rdev)
    if block is not None:
        return block
    filesystem = os.statvfs(path)
    return source, filesystem.f_blocks * filesystem.f_frsize


def _block_device(number: int) -> tuple[str, int] | None:
    node = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not node.exists():
        return None
    node = node.resolve()
    node = node.parent if (node / "partition").exists() else node
    mapped = node / "dm/name"  # dm-0 may be another volume tomorrow
    name = mapped.read_text().strip() if mapped.exists() else node.name
    return name, int((node / "size").read_text()) * 512


def _mount_source(number: int) -> str:
    """The mount source of a device number ("/dev/sda1", "server:/export", "tmpfs"), or the number itself."""
    device = f"{os.major(number)}:{os.minor(number)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, rest = line.partition(" - ")
        if mount.split()[2] == device:
            kind, source = rest.split()[:2]
            return source if source.startswith("/") or ":" in source else kind
    return f"device {device}"
