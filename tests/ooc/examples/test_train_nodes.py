"""The script that users copy for training on nodes."""

import sys
from pathlib import Path

import numpy as np
import pytest

from ooc.examples.train_nodes import main
from tests.conftest import MakeStore


def test_the_script_trains_and_predicts_every_node(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(make_store()), "--epochs", "2", "--hidden", "8", "--out", f"{tmp_path}/p.csv"]
    monkeypatch.setattr(sys, "argv", ["train_nodes", *words])
    main()
    out = capsys.readouterr().out
    assert "epoch 2: loss" in out
    assert "test accuracy" in out
    rows = np.genfromtxt(tmp_path / "p.csv", dtype=None, delimiter=",", names=True, encoding="utf8")
    np.testing.assert_array_equal(rows["id"], np.arange(50))
    assert set(rows["class"]) <= {0, 1, 2}
