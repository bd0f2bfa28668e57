"""Runs of mode "lightgcn" that are killed, in memory that does not hold their rows, beside one that nobody kills."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ooc.config.lightgcn import LightGCNConfig
from ooc.stores.arrays.mutable_rows import DiskRows
from ooc.training.loop import train
from tests.forked import Python
from tests.ooc.runs import KillAt, Killed, curve, kill_at_random


def embeddings(out: Path) -> np.ndarray:
    """The propagated rows of a run that has ended."""
    ended = torch.load(out / "model.pt", weights_only=True)  # a run that ended before has another name for them
    with closing(DiskRows.open(out / ended["embeddings"])) as rows:
        found = np.empty(rows.shape, np.float32)
        rows.read(np.arange(len(found)), found)
        return found


def same_run(out: Path, whole: Path) -> None:
    """Both have the same losses, scores and rows, to the bit."""
    assert curve(out) == curve(whole)
    np.testing.assert_array_equal(embeddings(out), embeddings(whole))


def killed_in_little_memory(
    make: Callable[..., LightGCNConfig], shrink: Callable[[], None]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(summary of a whole run, those of runs that were cut off and gone on with), all of the same bits.

    make: the settings of a run in the directory of this name, with further ones; shrink: leaves little memory.
    """
    whole, cut_off = make("whole"), []
    result = train(whole)
    shrink()
    for killed_at in (0, 5, 9):
        cut = make(f"cut-{killed_at}", checkpoint_every=2)
        with pytest.raises(Killed):
            train(cut, watcher=KillAt(killed_at))
        cut_off.append(train(cut, resume=True))
        assert cut_off[-1]["metrics"] == result["metrics"]
        same_run(cut.out, whole.out)
        assert not list(cut.out.glob("embeddings-*"))
    return result, cut_off


def kill_the_command(store: Path, folder: Path, flags: str, shrink: str, said: str) -> None:
    """`kill_at_random` of `ooc train` with these flags. shrink: code that leaves little memory; said: what a run says then."""
    code = f"import sys\nfrom ooc.cli.main import main\nfrom ooc.runtime.memory_plan import MemoryPlan\n{shrink}\n"

    def begin(out: Path) -> Python:
        words = ["train", str(store), "--out", str(out), *flags.split(), *(["--resume"] if out.exists() else [])]
        return Python("-c", f"{code}sys.exit(main({words!r}))")

    assert said in begin(folder / "first").wait().stderr  # compiles
    kill_at_random(begin, folder, lambda out: same_run(out, folder / "whole"), earliest=0.3)
