"""Which mode is recommended, as a function of numbers; and on stores, what is compared and printed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch_geometric.nn import SAGEConv

from ooc.cli.main import main
from ooc.config.nodes import TrainConfig, in_mode
from ooc.planning.choose_mode import LEAST_SECONDS, Candidate, choose
from ooc.training.compare_modes import TRIED, compare
from ooc.training.loop import train
from tests.conftest import MakeStore

MODES = ("sampled", "history", "cluster", "saint")
"""the less a mode loses the earlier it stands"""
MOST_DROPPED = 0.3
WORTH = {"history": 2.0, "cluster": 2.0, "saint": 8.0}


def candidate(mode: str, **found: Any) -> Candidate:
    return Candidate(mode, TRIED[mode].traits, {}, **found)


class Own(nn.Module):
    """As PyG users write them."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = SAGEConv(in_channels, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        found: Tensor = self.conv(x, edge_index)
        return found


def tried(**seconds: float) -> list[Candidate]:
    return [candidate(mode, seconds=seconds[mode]) for mode in MODES if mode in seconds]


def test_sampling_is_left_only_for_what_pays() -> None:
    assert choose(tried(sampled=10, history=6, cluster=6, saint=3), 2).recommended == "sampled"
    assert choose(tried(sampled=0.2, history=0.02, cluster=0.01, saint=0.01), 2).recommended == "sampled", "hardly any time"
    deep = choose(tried(sampled=100, history=6, cluster=5, saint=3), 8)
    assert deep.recommended == "history"
    assert "8 layers take 100 s an epoch" in deep.reason
    assert "one hop for all 8 layers: 6 s" in deep.reason
    assert choose(tried(sampled=100, history=60, cluster=5), 8).recommended == "cluster"
    assert choose(tried(sampled=100, history=60, cluster=50, saint=5), 8).recommended == "saint"


def test_clusters_that_drop_many_edges_are_named_but_not_chosen() -> None:
    half = candidate("cluster", seconds=1.0, lost=0.5)
    found = choose([*tried(sampled=10), half], 2)
    assert found.recommended == "sampled"
    assert "clusters would take 1 s, but drop 50 % of the edges" in found.reason
    refused = candidate("sampled", fix="9 GB of memory would do")
    assert choose([refused, half], 2).recommended == "cluster", "where nothing else fits"
    attention = candidate("saint", seconds=0.1, weighed=False)
    assert choose([*tried(sampled=10), attention], 2).recommended == "sampled"


def test_what_does_not_fit_is_named_with_its_fix() -> None:
    refused = [candidate(mode, fix=f"give {number}GB") for number, mode in enumerate(MODES, 2)]
    nothing = choose(refused, 3)
    assert nothing.recommended == "sampled"
    assert nothing.reason == "Nothing fits; for mode sampled: give 2GB."
    one = choose([*refused[:2], *tried(cluster=4.0), refused[3]], 3)
    assert one.recommended == "cluster"
    assert "neighborhoods of 3 layers do not fit; parts keep 100 % of a batch's edges: 4 s an epoch" in one.reason


def pays(other: Candidate, one: Candidate) -> bool:
    return one.seconds > max(WORTH[other.mode] * other.seconds, other.seconds + LEAST_SECONDS)


candidates = st.builds(
    candidate,
    mode=st.just("sampled"),
    fix=st.sampled_from([None, None, "more"]),
    seconds=st.floats(0.01, 1e4),
    lost=st.floats(0, 1),
    weighed=st.booleans(),
)


@given(st.tuples(candidates, candidates, candidates, candidates), st.integers(1, 64))
def test_laws_of_choosing(found: Any, layers: int) -> None:
    """What is chosen fits if anything does. None that loses more is so much faster, and each that loses less is so much slower
    than another. The order given does not matter."""
    each = [replace(one, mode=mode, traits=TRIED[mode].traits) for one, mode in zip(found, MODES, strict=True)]
    made = choose(each, layers)
    fitting = [one for one in each if one.fix is None]
    assert (made.best.fix is None) == bool(fitting)
    good = [one for one in fitting if one.mode != "saint" or one.weighed]
    good = [one for one in good if one.mode != "cluster" or one.lost <= MOST_DROPPED]
    if good:
        assert made.best in good
        later = [one for one in good if MODES.index(one.mode) > MODES.index(made.recommended)]
        assert not any(pays(one, made.best) for one in later)
        before = [one for one in good if MODES.index(one.mode) < MODES.index(made.recommended)]
        for k, one in enumerate(before):
            assert any(pays(other, one) for other in [*before[k + 1 :], made.best, *later])
    assert choose(each[::-1], layers) == made
    assert made.reason.endswith(".")
    assert json.loads(json.dumps(made.asdict()))["recommended"] == made.recommended


def test_the_fan_out_is_the_depth_of_other_modes() -> None:
    config = TrainConfig(store="s", out="o", fanout=[5, 5, 5], batch_size=32, eval_batch_size=8, hidden=16)
    other = in_mode(config, "history", {"parts": 4, "evaluate": "layerwise"})
    assert (other.mode, other.layers, other.fanout, other.hidden) == ("history", 3, [-1] * 3, 16)
    assert in_mode(config, "sampled", {}).fanout == [5, 5, 5]
    assert "mode" not in config.model_fields_set


@pytest.fixture
def store(make_store: MakeStore) -> Path:
    rng = np.random.default_rng(1)
    dst = rng.integers(0, 3000, 30_000)
    src = (dst + rng.integers(-30, 31, 30_000)) % 3000
    return make_store(num_nodes=3000, src=src, dst=dst, parts=np.arange(33) * 3000 // 32)


@pytest.mark.slow
def test_what_is_compared_is_what_a_run_reads(store: Path, tmp_path: Path) -> None:
    """Of every mode, run with the settings it was compared with."""
    config = TrainConfig(store=store, out=tmp_path / "run", layers=2, hidden=16, epochs=2)
    choice, made = compare(config)
    assert not (tmp_path / "run").exists()
    assert [each.mode for each in choice.candidates] == list(MODES)
    assert made.prediction.peak_rss_bytes == pytest.approx(choice.best.peak_bytes, rel=0.15)
    assert {each.mode for each in choice.candidates if each.fix} == set()
    history, cluster = choice.candidates[1:3]
    assert history.settings == cluster.settings == {"parts_per_batch": 2, "evaluate": "layerwise"}
    assert 0 < cluster.lost < 0.3
    assert 0 < history.lost < 0.5
    for each in choice.candidates:
        run = in_mode(config, each.mode, each.settings).model_copy(update={"out": tmp_path / each.mode, "plan": False})
        summary = train(run)
        # A part's rows of a layer are less than a page, so what is written depends on which parts an epoch has together.
        histories = summary["histories"] or {"bytes_read": 0, "bytes_written": 0}
        assert each.features_read + each.edges_read == pytest.approx(summary["bytes_read"] / 2, rel=0.1)
        assert each.histories_read == pytest.approx(histories["bytes_read"] / 2, rel=0.1)
        assert each.histories_written == pytest.approx(histories["bytes_written"] / 2, rel=0.1)
        assert each.peak_bytes == pytest.approx(summary["peak_rss_bytes"], rel=0.15)


def test_ooc_plan_compares_unless_it_is_told_the_mode(make_store: MakeStore, capsys: pytest.CaptureFixture[str]) -> None:
    store = make_store(num_nodes=300, num_edges=2000, parts=np.arange(9) * 300 // 8)
    arguments = ["plan", str(store), "--hidden", "16", "--epochs", "2"]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "an epoch by mode" in said
    assert "ooc train" in said
    assert "predicted peak" in said
    assert main([*arguments, "--memory", "1MB"]) == 2
    assert "give at least" in capsys.readouterr().err
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["mode"] for each in found["choice"]["candidates"]] == list(MODES)
    assert found["prediction"]["peak_rss_bytes"] > 0
    assert main([*arguments, "--json", "--mode", "history"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "choice" not in found
    assert found["prediction"]["history_bytes_written"] > 0


@pytest.mark.parametrize("setting", [["--sampler", "labor"], ["--pack", "1GB"]])
def test_a_setting_of_one_mode_rules_the_others_out(
    make_store: MakeStore, capsys: pytest.CaptureFixture[str], setting: list[str]
) -> None:
    store = make_store(num_nodes=300, num_edges=2000, parts=np.arange(9) * 300 // 8)
    assert main(["plan", str(store), "--hidden", "16", "--epochs", "2", *setting, "--json"]) == 0
    choice = json.loads(capsys.readouterr().out)["choice"]
    assert choice["recommended"] == "sampled"
    refused = {each["mode"]: each["fix"] for each in choice["candidates"] if each["fix"]}
    assert refused.keys() == {*MODES[1:]}
    assert all(f"{setting[0][2:]} does not apply to mode {mode}: " in fix for mode, fix in refused.items())


def test_a_model_with_its_own_forward_has_no_histories(store: Path, tmp_path: Path) -> None:
    config = TrainConfig(store=store, out=tmp_path / "run", model="tests.ooc.planning.test_choose_mode:Own", hidden=8, epochs=1)
    choice, _ = compare(config)
    found = {each.mode: each for each in choice.candidates}
    assert "has its own forward" in str(found["history"].fix)
    assert found["cluster"].fix is None
    assert found["cluster"].settings == {"parts_per_batch": 2}
    assert not found["saint"].weighed
