"""Losses and scores of a regression against float64 references written out here."""

from typing import Any

import numpy as np
import pytest
import torch

from ooc.config.nodes import TrainConfig
from ooc.metrics import numbers
from ooc.metrics.numbers import RegressionLoss, RegressionScores
from ooc.metrics.tasks import LabelTask
from ooc.stores.errors import ConfigError
from tests.ooc.metrics.test_nodes import LargestTensor
from tests.ooc.process_groups import process_group

RNG = np.random.default_rng(0)
EACH = {
    "mse": np.square,
    "mae": np.abs,
    "huber": lambda d: np.where(np.abs(d) <= 0.5, d**2 / 2, 0.5 * (np.abs(d) - 0.25)),
}


def r2_score(y: np.ndarray, p: np.ndarray) -> float:
    return float(1 - ((y - p) ** 2).sum() / ((y - y.mean()) ** 2).sum())


def drawn(rows: int, targets: int | None, mean: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """(outputs, labels) in float32, a fifth of the labels unknown."""
    shape = (rows,) if targets is None else (rows, targets)
    labels = mean + RNG.standard_normal(shape)
    outputs = labels + 0.3 * RNG.standard_normal(shape)
    labels[RNG.random(shape) < 0.2] = np.nan
    return outputs.reshape(rows, -1).astype(np.float32), labels.astype(np.float32)


def scored(outputs: np.ndarray, labels: np.ndarray, name: Any = "mse", batch: int = 37) -> dict[str, float | None]:
    scores = RegressionScores(outputs.shape[1], RegressionLoss(name, 0.5))
    for first in range(0, len(outputs), batch):
        rows = slice(first, first + batch)
        scores.update(torch.from_numpy(outputs[rows]), torch.from_numpy(labels[rows]))
    return scores.compute()


def reference(outputs: np.ndarray, labels: np.ndarray, name: str = "mse") -> dict[str, float]:
    y, p = labels.reshape(len(labels), -1).astype(np.float64), outputs.astype(np.float64)
    known = ~np.isnan(y)
    error = (p - y)[known]
    each = [r2_score(y[known[:, t], t], p[known[:, t], t]) for t in range(y.shape[1])]
    mse = float(np.mean(error**2))
    return {"loss": float(EACH[name](error).mean()), "mse": mse, "mae": float(np.abs(error).mean()), "rmse": mse**0.5} | {
        "r2": float(np.mean(each))
    }


@pytest.mark.parametrize("name", ["mse", "mae", "huber"])
@pytest.mark.parametrize("targets", [None, 1, 3])
def test_scores_leave_unknown_targets_out(name: str, targets: int | None) -> None:
    outputs, labels = drawn(200, targets)
    found = scored(outputs, labels, name)
    assert list(found) == numbers.SCORES
    assert found == pytest.approx(reference(outputs, labels, name), rel=1e-6)


@pytest.mark.parametrize("batch", [1, 7, 1000])
def test_scores_of_targets_far_from_zero(batch: int) -> None:
    outputs, labels = drawn(1000, 2, mean=1e4)
    assert scored(outputs, labels, batch=batch) == pytest.approx(reference(outputs, labels), rel=1e-6)


def test_scores_that_are_undefined_are_none() -> None:
    assert set(scored(np.zeros((4, 2), np.float32), np.full((4, 2), np.nan, np.float32)).values()) == {None}
    constant = scored(np.array([[1.0], [2.0]], np.float32), np.array([3.0, 3.0], np.float32))
    assert (constant["r2"], constant["mse"]) == (None, 2.5)
    assert scored(np.array([[1.0]], np.float32), np.array([3.0], np.float32))["r2"] is None
    outputs, labels = drawn(50, 1)
    outputs[3] = np.nan
    labels[3] = 0
    assert set(scored(outputs, labels).values()) == {None}
    some = scored(np.array([[1.0, 1.0], [2.0, 2.0]], np.float32), np.array([[1.0, 5.0], [2.0, 5.0]], np.float32))
    assert some["r2"] == 1.0, "a target that does not vary is left out of the mean"


@pytest.mark.parametrize("name", ["mse", "mae", "huber"])
@pytest.mark.parametrize("targets", [None, 3])
def test_losses_and_their_gradients_count_known_targets_alone(name: Any, targets: int | None) -> None:
    outputs, labels = drawn(40, targets)
    weights = RNG.random(40).astype(np.float32)
    given = torch.from_numpy(outputs).requires_grad_()
    loss = RegressionLoss(name, 0.5)
    found = loss(given, torch.from_numpy(labels))
    y = labels.reshape(40, -1).astype(np.float64)
    known = ~np.isnan(y)
    each = np.where(known, EACH[name](np.where(known, outputs - y, 0)), 0)
    assert float(found.detach()) == pytest.approx(each.sum() / known.sum(), rel=1e-5)
    found.backward()  # type: ignore[no-untyped-call]
    assert given.grad is not None
    assert torch.isfinite(given.grad).all()
    assert not given.grad.numpy()[~known].any()
    rows = each.sum(1) / np.maximum(known.sum(1), 1)
    weighed = loss(given, torch.from_numpy(labels), torch.from_numpy(weights))
    assert float(weighed.detach()) == pytest.approx((rows * weights).sum(), rel=1e-5)
    parts = [slice(0, 7), slice(7, 8), slice(8, 40)]
    y_all, p_all = torch.from_numpy(labels), torch.from_numpy(outputs)
    total = sum(loss.weight(y_all[part]) for part in parts)
    assert sum(float(loss.part(p_all[part], y_all[part])) for part in parts) / total == pytest.approx(
        float(found.detach()), rel=1e-6
    )


def test_a_batch_without_targets_has_a_zero_loss_with_a_gradient() -> None:
    outputs = torch.randn(3, 1, requires_grad=True)
    loss = RegressionLoss("huber")(outputs, torch.full((3,), torch.nan))
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 0
    assert outputs.grad is not None
    assert not outputs.grad.any()


@pytest.mark.parametrize("targets", [1, 12])
def test_the_memory_of_scores_does_not_grow_with_the_batch(monkeypatch: pytest.MonkeyPatch, targets: int) -> None:
    monkeypatch.setattr(numbers, "NUMBERS_AT_ONCE", 2**10)
    outputs, labels = (torch.from_numpy(each) for each in drawn(4000, targets))
    scores = RegressionScores(targets, RegressionLoss())
    with LargestTensor() as largest:
        scores.update(outputs, labels)
    assert largest.nbytes <= max(outputs.nbytes, 8 * numbers.NUMBERS_AT_ONCE)
    assert scores.compute() == pytest.approx(reference(outputs.numpy(), labels.numpy()), rel=1e-6)


def test_scores_are_those_of_this_process_in_a_process_group() -> None:
    outputs, labels = drawn(40, 2)
    alone = scored(outputs, labels)
    with process_group(1):
        assert scored(outputs, labels) == alone


class Store:
    task: Any
    num_classes: int | None = None

    def __init__(self, task: Any, num_classes: int | None = None) -> None:
        self.task, self.num_classes = task, num_classes


def config(**settings: Any) -> TrainConfig:
    return TrainConfig(store="a.ooc", out="run", **settings)


def test_what_a_task_is() -> None:
    task = LabelTask.of(Store("regression", 3), config(loss="huber", huber_delta=0.5))
    assert (task.channels, task.monitor, task.loss_name, task.huber_delta) == (3, "rmse", "huber", 0.5)
    assert task.metric_names == numbers.SCORES
    assert LabelTask.of(Store("regression")).channels == 1
    assert LabelTask.of(Store("binary")) == LabelTask("binary", 2)
    assert (LabelTask.of(Store("multiclass", 4)).channels, LabelTask("binary", 2).channels) == (4, 1)


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        (
            "multiclass",
            {"loss": "mae"},
            "loss = 'mae' is for targets of a regression, and the labels are multiclass: leave it out",
        ),
        ("regression", {"label_smoothing": 0.1}, "label_smoothing = 0.1 is for classes, and the labels are targets"),
        ("regression", {"class_weights": "balanced"}, "class_weights = 'balanced' is for classes, and"),
        ("regression", {"monitor": "accuracy"}, "monitor = 'accuracy' is no metric of a regression task: use one of loss, mse"),
        ("binary", {"monitor": "rmse"}, "monitor = 'rmse' is no metric of a binary task"),
        (None, {}, "no labels"),
    ],
)
def test_settings_of_other_labels_are_refused(kind: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LabelTask.of(Store(kind, 2), config(**settings))
