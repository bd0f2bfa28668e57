"""What the machine has left for this process."""

from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Bytes of memory that could still be taken: what the kernel calls available, within the control group's limits.

    Page cache counts as available; swap does not.
    """
    limits = [_meminfo_available(), *_cgroup_headroom()]
    return min(limits)


def _meminfo_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo names no MemAvailable")


def _cgroup_headroom() -> list[int]:
    """What each memory limit (cgroup v2) from this process's group up to the root leaves, the cache being reclaimable."""
    own = Path("/proc/self/cgroup").read_text().splitlines()
    path = next((line.partition("::")[2] for line in own if line.startswith("0::")), "/")
    group = _CGROUP / path.lstrip("/")
    left = []
    for folder in [group, *group.parents]:
        if not folder.is_relative_to(_CGROUP) or not (folder / "memory.max").exists():
            continue
        limit = (folder / "memory.max").read_text().strip()
        if limit != "max":
            used = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            left.append(max(0, int(limit) - int(used["anon"])))
    return left
