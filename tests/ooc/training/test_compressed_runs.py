"""`--compress` in training on batches: another curve, to the bit after a kill too, and memory that counts it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ooc.config.modes import load_config
from ooc.runtime.memory_plan import compressed_share, divide
from ooc.stores.errors import ConfigError
from ooc.training.checkpoint import read_metrics
from ooc.training.loop import planning, train
from tests.conftest import MakeStore
from tests.ooc.runs import KillAt, Killed, configure, curve

WIDE: dict[str, Any] = {"hidden": 64, "batch_size": 300, "epochs": 4, "dropout": 0.2}
"""activations of more elements than the fewest that are compressed"""
IN_MODES: dict[str, dict[str, Any]] = {
    "sampled": {},
    "cluster": {"mode": "cluster", "fanout": [], "layers": 2, "parts": 3},
    "saint": {"mode": "saint", "fanout": [], "layers": 2, "roots": 300, "saint_coverage": 2},
    "history": {"mode": "history", "fanout": [], "layers": 2, "parts": 3},
}


@pytest.fixture
def store(make_store: MakeStore) -> Path:
    x = np.random.default_rng(3).standard_normal((900, 32), np.float32)
    return make_store(num_nodes=900, num_edges=6000, x=x)


@pytest.mark.cases(1)
@pytest.mark.parametrize("mode", IN_MODES)
@pytest.mark.parametrize("compress", ["int8", "int2"])
def test_a_run_learns_and_resumes_to_the_bit(store: Path, tmp_path: Path, mode: str, compress: Any) -> None:
    settings = {**WIDE, **IN_MODES[mode], "compress": compress}
    train(configure(store, tmp_path / "whole", **settings))
    train(configure(store, tmp_path / "plain", **{**settings, "compress": None}))
    assert curve(tmp_path / "whole") != curve(tmp_path / "plain")
    cut = configure(store, tmp_path / "cut", checkpoint_every=2, **settings)
    with pytest.raises(Killed):
        train(cut, watcher=KillAt(3))
    with pytest.raises(ConfigError, match=f"was trained with compress = '{compress}', not 'int4'"):
        train(cut.model_copy(update={"compress": "int4"}), resume=True)
    train(cut, resume=True)
    assert curve(cut.out) == curve(tmp_path / "whole")
    first, plain = (read_metrics(tmp_path / name)[0][0]["loss"] for name in ("whole", "plain"))
    assert first == plain, "the forward pass of the first step is the same"


@pytest.mark.slow
@pytest.mark.parametrize("refresh", [None, 2])
def test_histories_in_int8_take_half_the_bytes_and_resume_to_the_bit(store: Path, tmp_path: Path, refresh: int | None) -> None:
    settings = {**WIDE, **IN_MODES["history"], "layers": 3, "refresh": refresh}
    found = {dtype: train(configure(store, tmp_path / dtype, **settings, history_dtype=dtype)) for dtype in ("int8", "float16")}
    written = {dtype: summary["histories"]["bytes_written"] for dtype, summary in found.items()}
    assert 0.5 < written["int8"] / written["float16"] < 0.6, "68 bytes of 128, in whole pages, and steps"
    losses = {dtype: [line["loss"] for line in read_metrics(tmp_path / dtype)[0]] for dtype in found}
    assert losses["int8"] != losses["float16"]
    np.testing.assert_allclose(losses["int8"], losses["float16"], rtol=0.02)
    cut = configure(store, tmp_path / "cut", **settings, checkpoint_every=2, history_dtype="int8")
    with pytest.raises(Killed):
        train(cut, watcher=KillAt(5))
    train(cut, resume=True)
    assert curve(cut.out) == curve(tmp_path / "int8")


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"model": "gat", "heads": 4}, {"model": "gcn", "norm": "batch"}, {"precision": "bf16"}])
def test_models_and_precisions_train_compressed(store: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    train(configure(store, tmp_path / "run", compress="int8", **WIDE, **settings))
    losses = [line["loss"] for line in read_metrics(tmp_path / "run")[0]]
    assert np.isfinite(losses).all()
    assert np.mean(losses[-3:]) < losses[0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"compress": "int4", "activation_checkpointing": True}, "save the same memory: leave one of them out"),
        ({"compress": "int4", "compile": True}, "compress does not apply to compile = true"),
        ({"compress": "int3"}, "compress = 'int3' is invalid: expected 'int8', 'int4' or 'int2'"),
        ({"compress": "int8", "mode": "snapshots"}, "compress does not apply to mode snapshots"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(None, {"store": "s", "out": "o", **given})


def test_the_memory_counts_smaller_activations() -> None:
    """The parts are the whole, and a batch may be larger; with many layers on a whole subgraph by much."""
    plain, memory = divide(10**9, baseline=10**8), 10**9
    for share in (compressed_share(0.25, 2, False), compressed_share(0.07, 30, True)):
        smaller = divide(memory, baseline=10**8, activations=share)
        assert abs(smaller.batches - plain.batches) <= 8
        assert smaller.max_batch == pytest.approx(plain.max_batch * 5 / (4 + share), rel=1e-6)
        for beside in (smaller.beside_history(), smaller.beside_tables(10**6)):
            assert beside.batches + beside.states == smaller.batches
    assert compressed_share(0.25, 1, True) == 1
    assert compressed_share(0.25, 30, True) < 0.6


def test_modes_plan_for_them(store: Path, tmp_path: Path) -> None:
    cases: dict[str, dict[str, Any]] = {
        "none": {"compress": None},
        "sage": {},
        "deep": {**IN_MODES["cluster"], "layers": 30},
        "gat": {"model": "gat"},
    }
    shares = {}
    for name, settings in cases.items():
        config = configure(store, tmp_path / name, **{**WIDE, "compress": "int4", **settings})
        with planning(config, config.out) as mode:
            assert mode.loader.budget.activations == mode.budget.activations
            shares[name] = mode.budget.activations
    assert shares["none"] == shares["gat"] == 1, "of attention most is scores by edge"
    assert shares["deep"] < 0.5 < shares["sage"] < 1
