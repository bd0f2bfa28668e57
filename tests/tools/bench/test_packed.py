"""The comparison of packed batches with shared scans runs both ways on the same batches."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from tools.bench.sampled import packed


def test_each_way_has_the_same_batches_and_losses_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str]) -> dict[str, Any]:
        commands.append(command)
        if "7GB" in command:
            return {"failed": 1, "error": ["no"]}
        sizes = {"bytes_read": 40, "topology_bytes_read": 0, "bytes_written": 20 * ("--pack" in command)}
        counts = {"seconds_per_batch": 1.0, "windows": 2, "nodes_per_batch": 5.0, "peak_rss_bytes": 9}
        return {"batches": 4, "losses": [1.0], "stages": {"read": {"busy_s": 2.0}}, **sizes, **counts}

    monkeypatch.setattr(packed, "make_store", lambda store, **settings: None)
    monkeypatch.setattr(packed, "run_cold", run)
    sizes = {"nodes": 10, "edges": 20, "width": 4, "batches": 4, "batch_size": 2}
    found = packed.compare(argparse.Namespace(work=tmp_path, limit="2GB", pack="6GB,7GB", **sizes), "rmat", "3,2")
    assert [command[command.index("--pack") + 1] if "--pack" in command else None for command in commands] == [
        None,
        "6GB",
        "7GB",
    ]
    assert len({tuple(word for word in command if word not in ("--pack", "6GB", "7GB")) for command in commands}) == 1
    assert found["losses_equal"]
    assert found["arms"]["packed, 6GB"]["bytes_written_per_batch"] == 5
    assert found["arms"]["scans"]["stages_per_batch"] == {"read": 0.5}
    assert found["arms"]["packed, 7GB"] == {"failed": 1, "error": ["no"]}
