"""Suggestions for misspelt names: what is meant, or nothing."""

import pytest

from ooc.config.closest import closest
from ooc.config.modes import classes

KEYS = {key for each in classes().values() for key in each.model_fields}


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("modle", "model"),
        ("moed", "mode"),
        ("epohcs", "epochs"),
        ("epoch", "epochs"),
        ("batchsize", "batch_size"),
        ("batch-sise", "batch_size"),
        ("num_epochs", "epochs"),
        ("hidden_channels", "hidden"),
        ("momen", "momentum"),
        ("lrr", "lr"),
        ("colour", None),
        ("optoin", None),
        ("xy", None),
        ("", None),
    ],
)
def test_a_name_is_suggested_only_where_it_is_close(word: str, meant: str | None) -> None:
    assert closest(word, KEYS) == meant


def test_names_of_other_cases_are_found() -> None:
    assert closest("LR", ["lr", "x"]) == "lr"
    assert closest("anything", []) is None
