"""Collectives of ranks, and what becomes of a rank that ends."""

from pathlib import Path

from tests.ooc.ranks import run_ranks

COLLECTIVES = """
import torch
from ooc.runtime.ranks import RankLost, joined_ranks
with joined_ranks() as ranks:
    assert (ranks.world_size, ranks.first) == (3, ranks.rank == 0)
    assert ranks.sum(torch.tensor([1.0, ranks.rank])).tolist() == [3.0, 3.0]
    assert ranks.any(ranks.rank == 1, False) == [True, False]
    assert ranks.gather(ranks.rank) == [0, 1, 2]
    assert ranks.decided(lambda: ranks.rank + 5) == 5
    assert ranks.together(lambda: ranks.rank) == ranks.rank
    parts = [torch.full((to + 1, 2), ranks.rank) for to in range(3)]
    found = ranks.exchange(parts, [ranks.rank + 1] * 3)
    assert [part.tolist() for part in found] == [[[r, r]] * (ranks.rank + 1) for r in range(3)]
    for fails in (ranks.decided, ranks.together):
        failing = (0,) if fails == ranks.decided else (1, 2)
        try:
            fails(lambda: [] if ranks.rank not in failing else 1 // 0)
        except ZeroDivisionError:
            assert ranks.rank == failing[0]
        except RankLost as lost:
            assert ranks.rank != failing[0] and str(failing[0]) in str(lost)
        else:
            raise AssertionError("nothing was raised")
"""

LOST = """
import sys, torch
from ooc.runtime.ranks import RankLost, joined_ranks
try:
    with joined_ranks() as ranks:
        ranks.barrier()
        if ranks.rank == 1:
            sys.exit(7)
        while True:
            ranks.sum(torch.ones(1))
except RankLost:
    sys.exit(3)
"""


def test_collectives() -> None:
    done = run_ranks(3, "-c", COLLECTIVES)
    assert [each.returncode for each in done] == [0, 0, 0], done


def test_a_rank_that_ends_is_noticed() -> None:
    assert [each.returncode for each in run_ranks(3, "-c", LOST, timeout=60)] == [3, 7, 3]


def test_python_m_ooc_is_the_command_line(tmp_path: Path) -> None:
    (done,) = run_ranks(1, "-m", "ooc", "info", tmp_path / "none.ooc")
    assert done.returncode == 2
    assert done.stderr.startswith("ooc: error: there is no store at")
