"""The process's memory: what it uses, and what the machine has available."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

_CGROUP = Path("/sys/fs/cgroup")


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
        """Measure the process; without a limit, it may use half of what the machine has available."""
        baseline, _ = resident_bytes()
        if limit is None:
            return cls(baseline + available_bytes() // 2, baseline, "(half of what is available)")
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
