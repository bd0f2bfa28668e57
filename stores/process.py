"""The process's memory: what it uses, and what the machine has available."""

import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Self

_CGROUP = Path("/sys/fs/cgroup")
_SMAPS = Path("/proc/self/smaps")


@dataclass(frozen=True)
class ProcessMemory:
    """Memory that the loaders of a data set divide, in bytes."""

    limit: int
    """limit of the whole process"""
    baseline: int
    """bytes in use when it was measured"""
    origin: str
    """where the limit comes from, for messages"""

    @classmethod
    def measure(cls, limit: int | None) -> Self:
        """Measure the process; without a limit, it may use half of what the machine has available, or of that an even part
        where torchrun has started several processes on the host (`LOCAL_WORLD_SIZE`).

        What importing libraries alone needed of their files does not count: see `release_library_pages`.
        """
        release_library_pages()
        baseline, _ = resident_bytes()
        if limit is None:
            processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            among = f", for {processes} processes" if processes > 1 else ""
            return cls(baseline + available_bytes() // 2 // processes, baseline, f"(half of what is available{among})")
        return cls(limit, baseline, "given")


def resident_bytes() -> tuple[int, int]:
    """Return (current, peak) resident bytes of the process, from /proc/self/status."""
    now = high = 0
    with open("/proc/self/status", "rb") as status:
        for line in status:
            if line.startswith(b"VmRSS:"):
                now = int(line.split()[1]) * 1024
            elif line.startswith(b"VmHWM:"):
                high = int(line.split()[1]) * 1024
    return now, max(now, high)


def group_reader() -> Callable[[], tuple[int, int]]:
    """Return a function that reads (current, peak) bytes of the process's control group; zeros where it has none of its own.

    They are what a limit of a container counts: all of its processes, and pages of files that were read or written.
    """
    for root, path, names in _groups():
        now, high = (root / path.lstrip("/") / name for name in names)
        if now.exists():
            return lambda: _group_bytes(now, high)
    return lambda: (0, 0)


def _groups() -> Iterator[tuple[Path, str, tuple[str, str]]]:
    """(root, path, file names) of the groups that may count the process's memory, of cgroup v2 and v1."""
    try:
        own = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in own:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            yield _CGROUP, path, ("memory.current", "memory.peak")
        elif controllers == "memory":
            yield _CGROUP / "memory", path, ("memory.usage_in_bytes", "memory.max_usage_in_bytes")


def _group_bytes(now: Path, high: Path) -> tuple[int, int]:
    try:
        current = int(now.read_text())
        return current, max(current, int(high.read_text()) if high.exists() else 0)
    except (OSError, ValueError):  # the group is gone, or its files are not ours to read
        return 0, 0


def release_library_pages() -> None:
    """Take the pages of shared libraries out of the process; those in use come back from the page cache, some at a time.

    Importing touches most pages of torch and LLVM once, 150 MB, and few of them again. Released are mappings of a library's
    code and constants that nothing was written to: they hold the file's bytes. They come back by 64 KiB and not by 2 MiB where
    a file stands in the page cache in huge pages (150 MB in all). Linux 6.18 maps smaller large pages whole, which a file that
    was just installed has too: a process then maps up to 110 MB more of what the page cache has. Nothing happens where no
    module was imported since the last time, as pages that came back are in use, or where the kernel lists no mappings.
    """
    _release_after(len(sys.modules))


@lru_cache(maxsize=1)
def _release_after(imports: int) -> None:
    """Release them, unless as many modules were imported the last time."""
    release_library_pages_now()


def release_library_pages_now() -> None:
    """`release_library_pages`, of those in use too."""
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None or not _SMAPS.exists():
        return
    for begin, end in _library_pages(_SMAPS.read_bytes()):
        for advice in (mmap.MADV_NOHUGEPAGE, mmap.MADV_DONTNEED):
            madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)


def _library_pages(smaps: bytes) -> Iterator[tuple[int, int]]:
    """(begin, end) of the mappings in `smaps` that no byte was written to, of files that are mapped as code."""
    unwritten: list[tuple[bytes, bytes]] = []
    code: set[bytes] = set()
    span = file = b""
    for line in smaps.splitlines():
        words = line.split(maxsplit=5)
        if not words[0].endswith(b":"):  # a mapping: span, mode, offset, device, inode, path if it is of a file
            span, file = words[0], words[5] if len(words) > 5 and words[1] in (b"r-xp", b"r--p") else b""
            code |= {file} if words[1] == b"r-xp" else set()
        elif words[0] == b"Anonymous:" and words[1] == b"0" and file.startswith(b"/"):
            unwritten.append((file, span))
    for file, span in unwritten:
        if file in code:
            begin, end = span.split(b"-")
            yield int(begin, 16), int(end, 16)


def available_bytes() -> int:
    """Bytes the process can still allocate: MemAvailable within the limits of its control group, without swap."""
    own = Path("/proc/self/cgroup").read_text().splitlines()
    return min([_meminfo_available(), *_unified_headroom(own), *_legacy_headroom(own)])


def _meminfo_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable")


def _unified_headroom(own: list[str]) -> list[int]:
    """Bytes left by each cgroup v2 memory limit from this process's group to the root; cache is reclaimable."""
    path = next((line.partition("::")[2] for line in own if line.startswith("0::")), "/")
    return _headroom(_CGROUP, path, "memory.max", "anon")


def _legacy_headroom(own: list[str]) -> list[int]:
    """The same for cgroup v1, whose memory controller has its own hierarchy."""
    path = next((line.split(":", 2)[2] for line in own if line.split(":")[1] == "memory"), "/")
    return _headroom(_CGROUP / "memory", path, "memory.limit_in_bytes", "total_rss")


def _headroom(root: Path, path: str, limit_file: str, used_field: str) -> list[int]:
    group = root / path.lstrip("/")
    left = []
    for folder in [group, *group.parents]:
        if not folder.is_relative_to(root) or not (folder / limit_file).exists():
            continue
        limit = (folder / limit_file).read_text().strip()
        if limit != "max":
            used = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            left.append(max(0, int(limit) - int(used[used_field])))
    return left
