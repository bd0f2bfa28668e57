"""Available memory: within what the machine has, and within every control group's limit."""

import subprocess
import sys
from pathlib import Path

import pytest

from ooc.stores import process


def test_it_is_at_most_what_the_machine_has():
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 0 < process.available_bytes() <= total


def test_the_tightest_group_counts_and_its_cache_does_not(tmp_path, monkeypatch):
    own = Path("/proc/self/cgroup").read_text().splitlines()
    path = next((line.partition("::")[2] for line in own if line.startswith("0::")), "/")
    group = tmp_path / path.lstrip("/")
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text("5000000\n")
    (group / "memory.stat").write_text("anon 1000000\nfile 3500000\n")
    monkeypatch.setattr(process, "_CGROUP", tmp_path)
    assert process.available_bytes() == 4000000


def test_the_legacy_control_group_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = tmp_path / "memory" / "job"
    group.mkdir(parents=True)
    for folder, limit in ((tmp_path / "memory", 9223372036854771712), (group, 5000000)):
        (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (folder / "memory.stat").write_text("rss 1\ntotal_rss 2000000\n")
    monkeypatch.setattr(process, "_CGROUP", tmp_path)
    assert process._legacy_headroom(["5:cpu:/", "4:memory:/job"]) == [3000000, 9223372036852771712]


SMAPS = b"""\
1000-3000 r-xp 00000000 fe:00 7   /usr/lib/with space.so
Rss:  8 kB
Anonymous:             0 kB
3000-4000 r--p 00000000 fe:00 7   /usr/lib/with space.so
Anonymous:             0 kB
4000-5000 r--p 00000000 fe:00 7   /usr/lib/with space.so
Anonymous:             4 kB
5000-6000 rw-p 00000000 fe:00 7   /usr/lib/with space.so
Anonymous:             0 kB
6000-7000 r--p 00000000 fe:00 8   /home/rows.bin
Anonymous:             0 kB
7000-8000 r--s 00000000 fe:00 7   /usr/lib/with space.so
Anonymous:             0 kB
8000-9000 r-xp 00000000 00:00 0
Anonymous:             0 kB
9000-a000 r-xp 00000000 00:00 0   [vdso]
Anonymous:             0 kB
"""


def test_only_unwritten_pages_of_libraries_are_released() -> None:
    assert list(process._library_pages(SMAPS)) == [(0x1000, 0x3000), (0x3000, 0x4000)]


def test_measuring_does_not_count_what_imports_needed_once() -> None:
    code = (
        "import llvmlite.binding as llvm\n"
        "from ooc.stores.process import ProcessMemory, resident_bytes\n"
        "before, measured = resident_bytes()[0], ProcessMemory.measure(10**9).baseline\n"
        "print(before - measured > 10_000_000, llvm.parse_assembly('define void @f() { ret void }').get_function('f').name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "f"]


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no huge pages")
def test_libraries_come_back_in_small_pages_whatever_the_page_cache_has() -> None:
    code = (
        "import llvmlite.binding\n"
        "from ooc.stores.process import release_library_pages\n"
        "release_library_pages()\n"
        "mappings = open('/proc/self/smaps').read().split('VmFlags:')\n"
        "code = [after.split('\\n')[0].split() for before, after in zip(mappings, mappings[1:])\n"
        "        if 'r-xp' in before and 'llvmlite' in before]\n"
        "print(bool(code) and all('nh' in flags for flags in code))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"]
