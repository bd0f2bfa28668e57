"""Available memory: within what the machine has, and within every control group's limit."""

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
