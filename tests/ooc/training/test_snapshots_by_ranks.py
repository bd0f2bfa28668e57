"""Snapshots by several processes, each with a share of a window's events or labels: as one process, also after a kill."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from ooc.training.checkpoint import read_metrics
from ooc.training.loop import train
from tests.ooc.process_groups import GlooProcesses, in_processes
from tests.ooc.ranks import run_ranks
from tests.ooc.runs import KillAt, Killed
from tests.ooc.temporal_stores import Edges
from tests.ooc.training.test_snapshot_runs import KINDS, configure


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Edges().store(tmp_path_factory.mktemp("windows"), edge_features=["msg=m*", "state=s"], allow_nan=True)


def runs(store: Path, out: Path, kinds: list[str], more: dict[str, Any]) -> dict[str, Any]:
    """The scores of a run of each kind."""
    return {kind: train(configure(store, out / kind, kind, **more), resume=(out / kind).exists())["metrics"] for kind in kinds}


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(out)[0]]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "kinds"), [(2, list(KINDS)), (4, ["roland", "nodes"])])
def test_processes_train_as_one(store: Path, tmp_path: Path, size: int, kinds: list[str]) -> None:
    """But for rounding, which may swap two nearly equal scores: one pair of 11,250 in AUROC."""
    (expected,) = in_processes(1, runs, store, tmp_path / "one", kinds, {})
    for found in in_processes(size, runs, store, tmp_path / "several", kinds, {}):
        for kind in kinds:
            assert losses(tmp_path / "several" / kind) == pytest.approx(losses(tmp_path / "one" / kind), abs=1e-6), kind
            for split, scores in expected[kind].items():
                assert found[kind][split] == pytest.approx(scores, abs=3e-4), kind


class _Kill(KillAt):
    """A kill of this process, not an exception."""

    def step(self, *given: Any) -> None:
        try:
            super().step(*given)
        except Killed:
            os.kill(os.getpid(), signal.SIGKILL)


def killed(store: Path, out: Path, at: int) -> None:
    train(configure(store, out, checkpoint_every=2), watcher=_Kill(at), resume=out.exists())


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_bit(store: Path, tmp_path: Path) -> None:
    in_processes(2, killed, store, tmp_path / "whole", 10**6)
    for at in (3, 8, 13):
        with GlooProcesses(2, killed, store, tmp_path / "cut", at) as group:
            codes = group.wait()
            assert codes[0] == -signal.SIGKILL
            assert codes[1] not in (0, None)
    in_processes(2, killed, store, tmp_path / "cut", 10**6)
    assert (tmp_path / "cut/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()


@pytest.mark.slow
def test_events_are_refused_in_one_line(store: Path, tmp_path: Path) -> None:
    done = run_ranks(2, "-m", "ooc", "train", store, "--out", tmp_path / "run", "--mode", "events")
    assert [each.returncode for each in done] == [2, 2]
    lines = [line for each in done for line in each.stderr.splitlines()]
    assert len(lines) == 1, lines
    assert "mode events trains in one process" in lines[0]
    assert not (tmp_path / "run").exists()
