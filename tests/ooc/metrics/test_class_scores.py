"""Scores of classes and of numbers, to the bit those of torchmetrics."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torchmetrics import MeanAbsoluteError, MeanSquaredError, classification

from ooc.metrics.nodes import Scores
from ooc.metrics.numbers import RegressionLoss, RegressionScores

NAMES = {"accuracy": "Accuracy", "precision": "Precision", "recall": "Recall", "f1": "F1Score"}
RANKING = {"auroc": "AUROC", "average_precision": "AveragePrecision"}


def of_torchmetrics(task: str, classes: int, probability: Tensor, target: Tensor) -> dict[str, float]:
    """All scores of rows at once; ranking scores are means over the classes with both positives and negatives."""
    sizes = {"binary": {}, "multiclass": {"num_classes": classes}, "multilabel": {"num_labels": classes, "ignore_index": -1}}

    def score(name: str, **average: str) -> Tensor:
        metric = getattr(classification, task.capitalize() + name)(**sizes[task], **average)
        found: Tensor = metric(probability, target)
        return found

    if task == "binary":
        return {name: float(score(each)) for name, each in (NAMES | RANKING).items()}
    found = {"accuracy": float(score("Accuracy", average="micro"))}
    for name, average in [(name, average) for name in ("precision", "recall", "f1") for average in ("macro", "micro")]:
        found[f"{name}_{average}"] = float(score(NAMES[name], average=average))
    columns = torch.nn.functional.one_hot(target, classes) if task == "multiclass" else target
    both = (columns == 1).any(0) & (columns == 0).any(0)
    return found | {name: float(score(each, average="none")[both].mean()) for name, each in RANKING.items()}


def drawn(task: str, classes: int, rows: int, ties: bool) -> tuple[Tensor, Tensor]:
    """Logits and labels, of which the last class never is one, nor predicted; some labels are unknown."""
    logits = torch.randn(rows, 1 if task == "binary" else classes)
    logits = (logits * 2).round() if ties else logits
    if task == "multilabel":
        labels = torch.randint(-1, 2, (rows, classes))
        labels[:, -1] = 0
    else:
        labels = torch.randint(-1, 2 if task == "binary" else classes - 1, (rows,))
    if task == "multiclass":
        logits[:, -1] = -9
    return logits, labels


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    ("task", "classes"), [("binary", 2), ("multiclass", 3), ("multiclass", 40), ("multilabel", 2), ("multilabel", 9)]
)
@pytest.mark.parametrize("rows", [30, 1000])
@pytest.mark.filterwarnings("ignore:No positive samples", "ignore:No negative samples")
def test_they_are_those_of_torchmetrics(task: str, classes: int, rows: int, ties: bool) -> None:
    torch.manual_seed(rows)
    logits, labels = drawn(task, classes, rows, ties)
    scores = Scores(task, classes, rows)
    for first in range(0, rows, 300):
        scores.update(logits[first : first + 300], labels[first : first + 300])
    known = torch.ones(rows, dtype=torch.bool) if task == "multilabel" else labels >= 0
    logits, labels = logits[known], labels[known]
    probability = logits.softmax(1) if task == "multiclass" else logits.sigmoid()
    wanted: dict[str, Any] = of_torchmetrics(task, classes, probability.view(-1) if task == "binary" else probability, labels)
    found = scores.compute()
    del found["loss"]
    assert found == {name: value if value == value else None for name, value in wanted.items()}


@pytest.mark.parametrize("targets", [1, 3])
def test_errors_are_those_of_torchmetrics(targets: int) -> None:
    torch.manual_seed(0)
    outputs, labels = torch.randn(500, targets), torch.randn(500, targets)
    scores = RegressionScores(targets, RegressionLoss())
    own = {"mse": MeanSquaredError().set_dtype(torch.float64), "mae": MeanAbsoluteError().set_dtype(torch.float64)}
    for first in range(0, 500, 200):
        rows = slice(first, first + 200)
        scores.update(outputs[rows], labels[rows])
        for each in own.values():
            each.update(outputs[rows].double(), labels[rows].double())
    found = scores.compute()
    assert {name: found[name] for name in own} == {name: float(each.compute()) for name, each in own.items()}
