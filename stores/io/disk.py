"""What reads cost on the disk at hand: measured once through the engine itself, kept per device, used by the read planner.

The measurement is fio's (direct random reads with many in flight, one block size after the other), made by the engine
that will do the reading, so that its own overhead counts.
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

from stores.errors import ConfigError, StoreError
from stores.io.atomic import disk_errors, write_file
from stores.io.engines import Engine, open_engine
from stores.io.engines.pread import DEPTH, PreadEngine
from stores.io.read_plan import DEFAULT_COST, ReadCost, ReadPlan
from stores.io.segments import Segments
from stores.sizes import format_bytes

SIZES = (4096, 16 * 1024, 64 * 1024, 256 * 1024, 2**20)
"""Bytes of the extents that are measured."""
DEPTHS = (8, 16, 32, 64, 128, 256)
"""Small reads in flight that are measured, as far as the engine goes."""
NEARLY_ALL = 0.97
"""The depth is the least that reaches so much of the most reads a second: each read in flight is one more to wait behind."""
FILE_BYTES = 256 * 2**20
"""A smaller file might lie in the device's own cache."""
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
"""A map is read page by page as faults come, so nothing is gained by merging."""


class Measured(BaseModel):
    """One line of the table: extents of `nbytes` at random places, as many in flight as the engine keeps."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    nbytes: PositiveInt
    reads_per_s: PositiveFloat


class MeasuredDepth(BaseModel):
    """Extents of 4 KiB at random places, `depth` of them in flight."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    depth: PositiveInt
    reads_per_s: PositiveFloat


class DiskProfile(BaseModel):
    """What reading from one device through one engine costs; frozen, JSON by pydantic, printed as a table.

    device: its name and size in bytes; note: why the engine does less than its name says; measured: when, or None for the
    default. read_s, byte_s, latency_s: see `stores.io.read_plan.ReadCost`; table: the measurements they are fitted to. depth:
    small reads that the engine is to keep in flight; depths: the measurements it is chosen by.

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
        found = ", ".join(f"{line.depth}: {line.reads_per_s:,.0f}" for line in self.depths)
        lines.append(f"small reads in flight: {self.depth}" + (f" (reads/s of 4 KiB by depth: {found})" if found else ""))
        bandwidth = format_bytes(1 / self.byte_s)
        lines.append(f"one small read by itself takes {self.latency_s * 1e6:.0f} us")
        lines.append(f"with many in flight a read costs {self.read_s * 1e6:.1f} us and its bytes, at {bandwidth}/s")
        lines.append(f"so rows up to {self.cost.gap_bytes // 1024} KiB apart share a read")
        return "\n".join(lines)


def profile_for(path: Path | str, engine: str) -> DiskProfile:
    """The profile of the device that holds `path`, read through `engine` (its name once open, not "auto").

    What `calibrate` measured before, else the default. A profile that is damaged or of another version counts as missing.
    StoreError where `path` does not exist.

    >>> profile_for("papers.ooc", "pread").cost.seconds(plan.length)
    """
    device, size_bytes = _device(Path(path))
    try:
        cached = DiskProfile.model_validate_json(_cache_file(device, size_bytes, engine).read_bytes())
        if (cached.device, cached.size_bytes, cached.engine) == (device, size_bytes, engine):
            return cached
    except (OSError, ValidationError):
        pass  # not there, or of no use
    cost = _MMAP_COST if engine == "mmap" else DEFAULT_COST
    return DiskProfile(device=device, size_bytes=size_bytes, engine=engine, **vars(cost))


def calibrate(path: Path | str, engine: str = "auto") -> DiskProfile:
    """`measure`, and keep the profile for `profile_for`; where it cannot be kept a warning says so.

    >>> print(calibrate("papers.ooc"))
    """
    profile = measure(path, engine)
    file = _cache_file(profile.device, profile.size_bytes, profile.engine)
    try:
        with disk_errors(file):
            file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, profile.model_dump_json(indent=1).encode())
    except StoreError as error:
        warnings.warn(f"the disk's measurement is not kept: {error}", stacklevel=2)
    return profile


def measure(path: Path | str, engine: str = "auto") -> DiskProfile:
    """Measure the device that holds `path` through `engine`, in about three seconds, with 8 MiB of memory.

    Reads at random places of `path`, or of the largest file below it on the same device; where none has 256 MiB, of a
    temporary file there. Raises StoreError where `path` does not exist or has no room, ConfigError for the engine "mmap",
    whose reads the page cache serves.

    >>> measure("papers.ooc").read_s
    8.1e-06
    """
    device, size_bytes = _device(Path(path))
    if engine == "mmap":
        raise ConfigError("the engine mmap cannot be measured: the page cache serves its reads; measure uring or pread")
    with _large_file(Path(path)) as file:
        segments = Segments((file,), np.array([file.stat().st_size // _PAGE_BYTES * _PAGE_BYTES]))
        opened = open_engine(engine, segments)
        assert isinstance(opened, PreadEngine)  # all that are left
        try:
            if opened.reason is not None:  # perhaps no O_DIRECT: then what the page cache holds must not count
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
    """(read_s >= 0, byte_s > 0) such that read_s + nbytes * byte_s is 1 / reads_per_s, least squares of the relative error.

    >>> fit(np.array([4096, 2**20]), 1 / (8e-6 + np.array([4096, 2**20]) * 1e-9))
    (8e-06, 1e-09)
    """
    a, b = reads_per_s, nbytes * reads_per_s  # read_s * a + byte_s * b shall be 1
    (read_s, byte_s), *_ = np.linalg.lstsq(np.stack([a, b], 1) / [a.max(), b.max()], np.ones(len(a)), rcond=None)
    read_s, byte_s = read_s / a.max(), byte_s / b.max()
    if read_s < 0:
        read_s, byte_s = 0.0, b.sum() / (b @ b)
    elif byte_s <= 0:
        read_s, byte_s = a.sum() / (a @ a), _LEAST_BYTE_S  # reads of all sizes take the same: merge whatever fits an extent
    return float(read_s), float(byte_s)


def least_depth(depths: Sequence[MeasuredDepth]) -> int:
    """The least depth that reaches `NEARLY_ALL` of the most reads a second.

    >>> least_depth([MeasuredDepth(depth=64, reads_per_s=99_000), MeasuredDepth(depth=128, reads_per_s=100_000)])
    64
    """
    most = max(line.reads_per_s for line in depths)
    return min(line.depth for line in depths if line.reads_per_s >= NEARLY_ALL * most)


def _extents(total: int, nbytes: int, reads: int) -> ReadPlan:
    """`reads` distinct extents at random, in file order as the planner's are, a row of 512 bytes wanted of every page.

    So all of an extent is read and an eighth copied, as when scattered rows are gathered.
    """
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
    """Median seconds of one small read, none other under way."""
    buffer = np.zeros(_PAGE_BYTES, np.uint8)
    _timed(engine, _extents(total, _PAGE_BYTES, 1), buffer)  # compiles the kernels, starts the threads
    taken: list[float] = []
    while len(taken) < _LATENCY_READS and sum(taken) < _LATENCY_SECONDS:
        taken.append(_timed(engine, _extents(total, _PAGE_BYTES, 1), buffer))
    return float(np.median(taken))


def _table(engine: Engine, total: int) -> tuple[Measured, ...]:
    """Reads a second of each size: the median over rounds through all sizes, because a shared disk changes by the minute."""
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
    """Reads of 4 KiB a second at each depth: the median over rounds through all of them."""
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
    """Reads of a request long enough to be timed that fits the buffer; finding it warms everything up."""
    most = min(len(buffer) // _ROW_BYTES * _PAGE_BYTES, total) // nbytes
    reads = min(_FIRST_READS, most)
    while _timed(engine, _extents(total, nbytes, reads), buffer) < _BATCH_SECONDS and reads < most:
        reads = min(reads * 4, most)
    return reads


@contextmanager
def _large_file(path: Path) -> Iterator[Path]:
    """`path`, or the largest file below it, or a temporary one there that is removed afterwards."""
    folder = path if path.is_dir() else path.parent
    found = _largest_below(path) if path.is_dir() else path.resolve()
    if found is not None and _held(found) >= FILE_BYTES:
        yield found
        return
    with disk_errors(folder), tempfile.NamedTemporaryFile(dir=folder, prefix=".ooc-machine-") as file:
        generator = np.random.default_rng()
        for _ in range(0, FILE_BYTES, 2**20):
            file.write(generator.bytes(2**20))  # not zeros: a file system may leave those out
        file.flush()
        os.fsync(file.fileno())
        _drop_cache(Path(file.name))
        yield Path(file.name)


def _largest_below(folder: Path) -> Path | None:
    """The largest file on the folder's device, of the first 10,000 met."""
    device = folder.stat().st_dev
    largest, most, met = None, 0, 0
    for where, _, names in os.walk(folder):
        for name in names:
            file = Path(where, name)
            if not file.is_symlink() and file.is_file() and file.stat().st_dev == device and _held(file) > most:
                largest, most = file, _held(file)
        met += len(names)
        if met >= _FILES_LOOKED_AT:
            break
    return largest


def _held(file: Path) -> int:
    """Bytes of the file that are on the disk: holes would be read at the speed of memory."""
    status = file.stat()
    whole = status.st_blocks * 512 >= status.st_size
    return status.st_size if whole and os.access(file, os.R_OK) else 0


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
    """Name and size in bytes of the disk that holds `path`, a partition's being that of its disk.

    Where a file system has no block device of its own (btrfs, overlay, NFS, tmpfs): its source, as it was mounted, and size.
    """
    try:
        number = path.stat().st_dev
    except OSError as error:
        raise StoreError(f"{path} cannot be found: {error.strerror}; name a file or a directory on the disk") from error
    source = _mount_source(number)
    found = _block_device(number)
    if found is None and source.startswith("/dev/") and os.path.exists(source):
        found = _block_device(os.stat(source).st_rdev)
    if found is not None:
        return found
    held = os.statvfs(path)
    return source, held.f_blocks * held.f_frsize


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
    """What is mounted as this device number ("/dev/sda1", "server:/export", "tmpfs"), or the number itself."""
    wanted = f"{os.major(number)}:{os.minor(number)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, rest = line.partition(" - ")
        if mount.split()[2] == wanted:
            kind, source = rest.split()[:2]
            return source if source.startswith("/") or ":" in source else kind
    return f"device {wanted}"
