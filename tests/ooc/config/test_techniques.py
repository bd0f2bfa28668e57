"""Techniques against memory change the settings that they name, and no others."""

from pathlib import Path

import pytest

from ooc.config.nodes import TrainConfig
from ooc.config.techniques import PLAIN, TECHNIQUES, names_of, with_technique
from ooc.stores.errors import ConfigError

BASE = TrainConfig(store=Path("a.ooc"), out=Path("run"), fanout=[5, 5, 5], hidden=32, batch_size=100, accumulate=3, lr=0.003)
KEPT = ("store", "out", "model", "hidden", "layers", "lr", "seed", "epochs", "dropout")


@pytest.mark.parametrize("name", TECHNIQUES)
@pytest.mark.parametrize("parts", [None, 64])
def test_a_technique_leaves_the_model_and_the_optimizer_as_they_are(name: str, parts: int | None) -> None:
    made = with_technique(BASE, name, parts)
    kept = {key: getattr(BASE, key) for key in KEPT} | ({"model": "revsage"} if name == "reversible" else {})
    assert {key: getattr(made, key) for key in KEPT} == kept
    for key, value in TECHNIQUES[name].changes(BASE, parts).items():
        assert getattr(made, key) == value


def test_the_settings_as_given_are_not_changed() -> None:
    assert with_technique(BASE, PLAIN, None) == BASE


def test_parts_that_the_settings_give_stay() -> None:
    base = TrainConfig(store=Path("a.ooc"), out=Path("run"), mode="cluster", parts_per_batch=7)
    for name in (PLAIN, "cluster", "history"):
        made = with_technique(base, name, 64)
        assert isinstance(made, TrainConfig)
        assert made.parts_per_batch == 7


def test_accumulated_batches_make_the_same_optimizer_steps() -> None:
    made = with_technique(BASE, "accumulate", None)
    assert isinstance(made, TrainConfig)
    assert made.batch_size * made.accumulate == BASE.batch_size * BASE.accumulate


def test_parts_are_those_of_the_store_where_it_has_some() -> None:
    without, with_parts = (with_technique(BASE, "cluster", parts) for parts in (None, 64))
    assert isinstance(without, TrainConfig)
    assert isinstance(with_parts, TrainConfig)
    assert (without.parts, without.parts_per_batch) == (16, 1)
    assert (with_parts.parts, with_parts.parts_per_batch) == (None, 4)


def test_a_model_without_a_reversible_form_is_refused() -> None:
    with pytest.raises(ConfigError, match="model gin has no reversible form; revsage"):
        with_technique(BASE.model_copy(update={"model": "gin"}), "reversible", None)


def test_names_begin_with_the_settings_as_given() -> None:
    assert names_of(None) == list(TECHNIQUES)
    assert names_of(["labor", "labor"]) == [PLAIN, "labor"]
    with pytest.raises(ConfigError, match=r"techniques: 'x' is unknown; there are plain, "):
        names_of("labor,x")


@pytest.mark.parametrize("given", ["", "labor,,bf16", "labor,", []])
def test_a_missing_name_is_refused(given: str | list[str]) -> None:
    with pytest.raises(ConfigError, match="techniques: a name is missing; there are plain, "):
        names_of(given)
