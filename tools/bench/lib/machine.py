"""Memory limits that count page cache, cold caches, and a description of the machine."""

import os
import platform
import subprocess
import sys
from pathlib import Path

from ooc.stores.sizes import parse_bytes

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


def limit_memory(size: str, name: str = "ooc_bench") -> None:
    """Move this process to a memory cgroup (v1 or v2) of `size`, page cache counted. Needs root."""
    legacy = (_V1 / "tasks").exists()
    group = (_V1 if legacy else _V2) / name
    group.mkdir(exist_ok=True)
    (group / ("memory.limit_in_bytes" if legacy else "memory.max")).write_text(str(parse_bytes(size)))
    (group / ("tasks" if legacy else "cgroup.procs")).write_text(str(os.getpid()))


def ooc_command(limit: str = "") -> list[str]:
    """The start of an `ooc` command line; `limit` is that of its memory, page cache counted, "" for none."""
    if not limit:
        return [sys.executable, "-m", "ooc.cli"]
    limited = "import sys; from tools.bench.lib.machine import limit_memory; limit_memory(sys.argv.pop(1)); "
    return [sys.executable, "-c", limited + "from ooc.cli.main import main; sys.exit(main(sys.argv[1:]))", limit]


def drop_page_cache() -> None:
    """Write dirty pages back and empty the page cache, so that reads go to the disk. Needs root."""
    subprocess.run(["sync"], check=True)
    Path("/proc/sys/vm/drop_caches").write_text("3")


def describe() -> dict[str, object]:
    """Processor, cores and memory of this machine."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = next((line.split(":")[1].strip() for line in info.splitlines() if line.startswith("model name")), "")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"processor": model or platform.processor(), "cores": os.cpu_count(), "memory_bytes": memory}
