"""Histories that ranks share, against a dictionary: what a pull sees, and what is left where one is killed anywhere."""

import os
import signal
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ooc.history.history import History
from ooc.history.rows import NEVER
from ooc.history.shares import HistoryShare
from ooc.layerwise.node_ranges import even_ranges
from ooc.runtime.ranks import Ranks, joined_ranks
from tests.ooc.process_groups import GlooProcesses

N, WIDTHS, STEPS = 5 * 1024 + 100, (4, 7), 34
POINTS = ("step", "state", "saved", "committed")


def own_of(step: int, count: int) -> list[np.ndarray]:
    """The nodes that each of `count` batches of a step pushes, some of them none."""
    rng = np.random.default_rng([7, step])
    order, cuts = rng.permutation(N), np.sort(rng.integers(0, N // 2, count - 1))
    return [np.sort(each) for each in np.split(order[: N // 2], cuts)]


def rows_of(step: int, ids: np.ndarray, layer: int) -> np.ndarray:
    """What a step pushes of some nodes."""
    return (1000 * step + ids[:, None] % 997 + np.arange(WIDTHS[layer]) + layer).astype(np.float32)


def seen(step: int, lag: int, ids: np.ndarray) -> np.ndarray:
    """The step whose rows a pull is to see of each node, NEVER before any."""
    last = np.full(N, NEVER)
    for earlier in range(step - lag):
        last[np.concatenate(own_of(earlier, 4))] = earlier
    return last[ids]


def check(history: History, fetched: Any) -> None:
    wanted = seen(fetched.step, history.lag, fetched.ids)
    for layer, rows in enumerate(history.pull(fetched)):
        expected = np.zeros_like(rows)
        for step in np.unique(wanted[wanted != NEVER]):
            of = wanted == step
            expected[of] = rows_of(int(step), fetched.ids[of], layer)
        np.testing.assert_array_equal(rows, expected)
    np.testing.assert_array_equal(fetched.steps, wanted)


def train(folder: Path, lag: int, at: int, point: str, victim: int) -> int:
    """Steps of ranks that share four batches of each, from the last checkpoint on; rank `victim` is killed at a point of the
    first checkpoint from step `at` on. Returns how many steps were done."""
    with joined_ranks() as ranks:
        state = torch.load(folder / "state.pt") if (folder / "state.pt").exists() else None
        share = HistoryShare(ranks, even_ranges(N, 1024, ranks.world_size)[ranks.rank])
        settings: dict[str, Any] = {"lag": lag, "max_bytes": 10**7, "engine": "pread", "share": share}
        path = folder / "history"
        made = (
            History.create(path, N, WIDTHS, "float32", **settings)
            if state is None
            else History.open(path, 2, state, **settings)
        )
        with closing(made) as history:
            return _steps(history, ranks, folder, at, point, victim)


def _steps(history: History, ranks: Ranks, folder: Path, at: int, point: str, victim: int) -> int:
    rng, began, waiting = np.random.default_rng([ranks.rank, at]), history.next_step, dict[int, Any]()
    history.begin_epoch()

    def reached(where: str, step: int) -> None:
        if where == point and ranks.rank == victim and step >= at:
            os.kill(os.getpid(), signal.SIGKILL)

    for step in range(began, STEPS):
        for later in range(step, min(step + 3, STEPS)):
            if later not in waiting:
                waiting[later] = history.fetch(later, np.sort(rng.choice(N, 700, replace=False)))
        check(history, waiting.pop(step))
        time.sleep(float(rng.random()) * 0.004)  # ranks are apart, as far as they can be
        parts = own_of(step, 4)[ranks.rank :: ranks.world_size]
        own = np.sort(np.concatenate([np.empty(0, np.int64), *parts]))
        history.push(step, own, [rows_of(step, own, layer) for layer in range(2)])
        reached("step", step)
        if step % 4 == 3:
            kept = history.state()
            reached("state", step)
            if ranks.first:
                torch.save(kept, folder / "new.pt")
                os.replace(folder / "new.pt", folder / "state.pt")
            reached("saved", step)
            history.commit()
            reached("committed", step)
        if step % 6 == 5:
            waiting.clear()
            history.end_epoch()
            history.begin_epoch()
    history.end_epoch()
    check(history, history.fetch(STEPS, np.arange(N)))
    return STEPS - began


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 2])
def test_pulls_see_the_pushes_of_all_ranks_whoever_is_killed_and_however_many_go_on(tmp_path: Path, lag: int) -> None:
    kills = [(2, 2, "step", 1), (2, 5, "state", 0), (3, 6, "saved", 0), (4, 9, "saved", 3), (1, 13, "saved", 0)]
    kills += [(2, 17, "committed", 1), (3, 21, "state", 2), (2, 25, "step", 0)]
    assert {point for _, _, point, _ in kills} == set(POINTS)
    for size, at, point, victim in kills:
        with GlooProcesses(size, train, tmp_path, lag, at, point, victim) as group:
            codes = group.wait()
            assert codes[victim] == -signal.SIGKILL, group.results(1)
            assert None not in codes
    with GlooProcesses(2, train, tmp_path, lag, STEPS, "", 0) as group:
        assert set(group.results()) <= set(range(1, 20))
