"""The benchmark of stores far away, on a small store."""

from argparse import Namespace
from pathlib import Path

import pytest

from tools.bench.io.remote import compare
from tools.bench.lib.range_server import KINDS, at_random

pytest.importorskip("obstore")


@pytest.mark.slow
def test_epochs_of_both_clients_are_measured(tmp_path: Path) -> None:
    shape = {"nodes": 20_000, "edges": 60_000, "width": 64, "train_share": 0.1, "fanout": "3,3", "hidden": 8, "batch_size": 512}
    imposed = {"latency": 0.001, "bandwidth": 10**9, "failures": [0.05], "clients": ["http", "s3"]}
    found = compare(Namespace(work=tmp_path, epochs=2, memory="3GB", cache=None, **shape, **imposed))
    assert [arm["client"] for arm in found["arms"]] == ["http", "s3"]
    for arm in found["arms"]:
        first, second = arm["epochs"]
        assert arm["losses_equal"]
        assert first["bytes"] >= 20_000 * 64 * 4
        assert 0 < first["of_bandwidth"] < first["of_bandwidth_in_flight"] < 1
        assert second["requests"] == 0


def test_failures_are_of_all_kinds_and_of_their_share() -> None:
    failing = at_random(0.5)
    kinds = [failing("/") for _ in range(400)]
    assert set(kinds) == {None, *KINDS}
    assert 150 < kinds.count(None) < 250
