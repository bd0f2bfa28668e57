"""Runs whose sampler learns: killed at random moments they come to the same end; what does not fit is refused in one line."""

import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ooc.runtime.ranks import Ranks
from ooc.stores.errors import ConfigError
from ooc.training.batch_modes import SampledMode
from ooc.training.checkpoint import read_metrics
from ooc.training.loop import train
from ooc.training.open_run import open_dataset
from tests.conftest import MakeStore
from tests.ooc.hetero_batches import hetero_data
from tests.ooc.ranks import run_ranks, start_ranks
from tests.ooc.runs import configure
from tests.ooc.training.test_hetero_runs import graph_of, write

FLAGS = "--fanout 12,20 --batch-size 4 --epochs 6 --hidden 8 --threads 1 --no-plan --seed 5 --checkpoint-every 2 --eval-every 2"


def losses(out: Path) -> list[Any]:
    return [(line["step"], line["loss"]) for line in read_metrics(out)[0]]


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["gradient", "learned"])
def test_kill_9_at_random_moments(make_store: MakeStore, tmp_path: Path, sampler: str) -> None:
    store, rng = make_store(num_nodes=150, num_edges=2500), random.Random(7)

    def words(out: Path) -> list[Any]:
        more = ["--resume"] if (out / "config.json").exists() else []
        return ["-m", "ooc", "train", store, "--out", out, *FLAGS.split(), "--sampler", sampler, *more]

    began = time.monotonic()
    whole, out = tmp_path / "whole", tmp_path / "killed"
    assert run_ranks(1, *words(whole))[0].returncode == 0
    took = time.monotonic() - began
    for _ in range(3):
        running = start_ranks(1, *words(out))[0]
        time.sleep(rng.uniform(0.5, 1) * took)
        with suppress(ProcessLookupError):  # it has come to its end
            running.send_signal(signal.SIGKILL)
        running.wait()
    done = run_ranks(1, *words(out))[0]
    assert done.returncode == 0, done.stderr
    assert losses(out) == losses(whole)
    if sampler == "gradient":
        assert (out / "importance" / "latest" / "rows.bin").read_bytes() == (
            whole / "importance" / "latest" / "rows.bin"
        ).read_bytes()


@pytest.mark.parametrize("sampler", ["gradient", "learned"])
def test_what_does_not_fit_is_refused(make_store: MakeStore, tmp_path: Path, sampler: str) -> None:
    config = configure(make_store(), tmp_path / "run", sampler=sampler, fanout=[5, 5], eval_fanout=[5, 5])
    with open_dataset(config) as dataset, pytest.raises(ConfigError, match=f"sampler = {sampler} learns from the steps of one"):
        SampledMode(config, dataset, Ranks(0, 2, 0, 2))
    store = write(tmp_path / "h.ooc", graph_of(hetero_data()))
    typed = configure(store, tmp_path / "typed", model="rsage", sampler=sampler, fanout=[5, 5], eval_fanout=[5, 5])
    with pytest.raises(ConfigError, match=f"sampler = {sampler} is for graphs of one type") as caught:
        train(typed)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "typed").exists()
