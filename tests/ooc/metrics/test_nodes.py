"""Losses and scores against scipy-free float64 references written out here."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ooc.metrics import nodes as metrics
from ooc.metrics.nodes import Loss, Scores, class_weights, metric_names
from ooc.stores.errors import ConfigError
from tests.forked import python
from tests.ooc.process_groups import process_group

RNG = np.random.default_rng(0)


def softmax(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits - logits.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def auroc(score: np.ndarray, positive: np.ndarray) -> float:
    """Probability that a positive scores above a negative, ties half."""
    p, n = score[positive], score[~positive]
    return float((p[:, None] > n).mean() + 0.5 * (p[:, None] == n).mean())


def average_precision(score: np.ndarray, positive: np.ndarray) -> float:
    order = np.argsort(-score, kind="stable")
    hit = positive[order]
    return float((np.cumsum(hit) / np.arange(1, len(hit) + 1))[hit].mean())


def f1(predicted: np.ndarray, positive: np.ndarray) -> float:
    true = (predicted & positive).sum()
    return float(2 * true / (predicted.sum() + positive.sum()))


def in_batches(scores: Scores, logits: np.ndarray, labels: np.ndarray) -> dict[str, float | None]:
    for first in range(0, len(logits), 37):
        rows = slice(first, first + 37)
        scores.update(torch.from_numpy(logits[rows]), torch.from_numpy(labels[rows]))
    return scores.compute()


def test_multiclass_scores_leave_unknown_labels_out() -> None:
    logits, labels = RNG.standard_normal((200, 4)), RNG.integers(-1, 4, 200)
    found = in_batches(Scores("multiclass", 4, 200), logits, labels)
    known = labels >= 0
    p, y = softmax(logits[known]), labels[known]
    assert list(found) == metric_names("multiclass")
    assert found["accuracy"] == pytest.approx((p.argmax(1) == y).mean())
    assert found["f1_micro"] == pytest.approx(found["accuracy"])
    assert found["loss"] == pytest.approx(-np.log(p[np.arange(len(y)), y]).mean(), rel=1e-5)
    each = range(4)
    assert found["f1_macro"] == pytest.approx(np.mean([f1(p.argmax(1) == c, y == c) for c in each]), rel=1e-5)
    assert found["recall_macro"] == pytest.approx(np.mean([(p.argmax(1) == c)[y == c].mean() for c in each]), rel=1e-5)
    assert found["auroc"] == pytest.approx(np.mean([auroc(p[:, c], y == c) for c in each]), rel=1e-5)
    expected = np.mean([average_precision(p[:, c], y == c) for c in each])
    assert found["average_precision"] == pytest.approx(expected, rel=1e-5)


def test_binary_scores() -> None:
    logits, labels = RNG.standard_normal((300, 1)), RNG.integers(-1, 2, 300).astype(np.int8)
    found = in_batches(Scores("binary", 2, 300), logits, labels)
    known = labels >= 0
    score, positive = logits[known, 0], labels[known] == 1
    assert list(found) == metric_names("binary")
    assert found["auroc"] == pytest.approx(auroc(score, positive), rel=1e-5)
    assert found["average_precision"] == pytest.approx(average_precision(score, positive), rel=1e-5)
    assert found["f1"] == pytest.approx(f1(score > 0, positive), rel=1e-5)
    assert found["accuracy"] == pytest.approx(((score > 0) == positive).mean(), rel=1e-5)


@pytest.mark.parametrize("unknown", [-1, np.nan])
def test_multilabel_scores_leave_single_unknown_labels_out(unknown: float) -> None:
    logits, labels = RNG.standard_normal((250, 3)), RNG.integers(0, 2, (250, 3)).astype(np.float32)
    labels[RNG.random((250, 3)) < 0.2] = unknown
    found = in_batches(Scores("multilabel", 3, 250), logits, labels)
    known = labels >= 0
    columns = [(logits[known[:, c], c], labels[known[:, c], c] == 1) for c in range(3)]
    assert found["auroc"] == pytest.approx(np.mean([auroc(s, p) for s, p in columns]), rel=1e-5)
    assert found["f1_macro"] == pytest.approx(np.mean([f1(s > 0, p) for s, p in columns]), rel=1e-5)
    assert found["accuracy"] == pytest.approx(((logits > 0) == (labels == 1))[known].mean(), rel=1e-5)


@pytest.mark.parametrize("task", ["binary", "multiclass", "multilabel"])
def test_binned_ranking_scores_are_close_to_exact_ones(monkeypatch: pytest.MonkeyPatch, task: str) -> None:
    classes = 2 if task == "binary" else 30
    logits = 3 * RNG.standard_normal((2000, 1 if task == "binary" else classes))
    labels = RNG.integers(-1, classes, 2000) if task != "multilabel" else RNG.integers(-1, 2, (2000, classes))
    exact = in_batches(Scores(task, classes, 2000), logits, labels)
    monkeypatch.setattr(metrics, "EXACT_SCORES", 10)
    binned = in_batches(Scores(task, classes, 2000), logits, labels)
    for name in ("auroc", "average_precision"):
        assert binned[name] == pytest.approx(exact[name], abs=1e-2)
        assert binned[name] != exact[name]
    assert {name: binned[name] for name in ("loss", "accuracy")} == {name: exact[name] for name in ("loss", "accuracy")}


@pytest.mark.parametrize("task", ["binary", "multiclass", "multilabel"])
@pytest.mark.parametrize(("mean", "spread"), [(40.0, 4.0), (25.0, 12.0), (3000.0, 900.0)])
def test_binned_scores_of_confident_models(monkeypatch: pytest.MonkeyPatch, task: str, mean: float, spread: float) -> None:
    """Probabilities that round to 0 and 1: the log-odds still rank. The reference ranks the log-odds in float64."""
    monkeypatch.setattr(metrics, "EXACT_SCORES", 10)
    classes = {"binary": 2, "multiclass": 3, "multilabel": 2}[task]
    labels = RNG.integers(0, classes if task != "multilabel" else 2, 2000 if task != "multilabel" else (2000, 2))
    positive = labels[:, None] == np.arange(3) if task == "multiclass" else labels.reshape(2000, -1) == 1
    logits = np.where(positive, mean, -mean) + spread * RNG.standard_normal(positive.shape)
    logits = logits.astype(np.float32)  # as they come from a model
    odds = logits.astype(np.float64)
    if task == "multiclass":
        others = np.stack([np.logaddexp(odds[:, (c + 1) % 3], odds[:, (c + 2) % 3]) for c in range(3)], axis=1)
        odds = odds - others
    found = in_batches(Scores(task, classes, 2000), logits, labels)
    for name, of in (("auroc", auroc), ("average_precision", average_precision)):
        expected = np.mean([of(odds[:, c], positive[:, c]) for c in range(positive.shape[1])])
        assert found[name] == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("task", ["multiclass", "multilabel"])
def test_ranking_scores_leave_out_classes_without_positives_or_negatives(
    monkeypatch: pytest.MonkeyPatch, task: str, exact: bool
) -> None:
    if not exact:
        monkeypatch.setattr(metrics, "EXACT_SCORES", 10)
    logits = RNG.standard_normal((300, 5))
    if task == "multiclass":
        labels = RNG.choice([0, 1, 3], 300)
        columns = [(softmax(logits)[:, c], labels == c) for c in (0, 1, 3)]
    else:
        labels = RNG.integers(0, 2, (300, 5))
        labels[:, 2], labels[:, 4] = 0, 1
        columns = [(logits[:, c], labels[:, c] == 1) for c in (0, 1, 3)]
    found = in_batches(Scores(task, 5, 300), logits, labels)
    tolerance = 1e-4 if exact else 1e-2
    assert found["auroc"] == pytest.approx(np.mean([auroc(s, p) for s, p in columns]), abs=tolerance)
    assert found["average_precision"] == pytest.approx(np.mean([average_precision(s, p) for s, p in columns]), abs=tolerance)


def test_ranking_scores_of_one_class_alone_are_undefined() -> None:
    found = in_batches(Scores("binary", 2, 10), RNG.standard_normal((10, 1)), np.ones(10, np.int64))
    assert (found["auroc"], found["average_precision"]) == (None, None)
    assert found["accuracy"] is not None


def test_no_known_label_gives_no_score() -> None:
    scores = Scores("multiclass", 3, 2)
    scores.update(torch.zeros(2, 3), torch.tensor([-1, -1]))
    assert set(scores.compute().values()) == {None}


def test_losses_count_known_labels_alone() -> None:
    logits = torch.from_numpy(RNG.standard_normal((6, 3)))
    labels = torch.tensor([0, -1, 2, 1, -1, 0])
    keep = labels >= 0
    weight = torch.tensor([1.0, 2.0, 3.0])
    expected = torch.nn.CrossEntropyLoss(weight=weight, label_smoothing=0.1)(logits[keep].float(), labels[keep])
    torch.testing.assert_close(Loss("multiclass", weight, 0.1)(logits, labels), expected)

    many = torch.tensor([[1.0, float("nan"), 0.0], [0.0, 1.0, -1.0]])
    p = torch.sigmoid(logits[:2].float())
    each = -(many * p.log() + (1 - many) * (1 - p).log())
    torch.testing.assert_close(Loss("multilabel")(logits[:2], many), each[many >= 0].mean())
    torch.testing.assert_close(Loss("binary")(logits[:2, :1], many[:, 0]), each[:, 0].mean())


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("task", ["multiclass", "binary", "multilabel"])
def test_a_batch_without_labels_has_a_zero_loss_with_a_gradient(task: str, weighted: bool, rows: int) -> None:
    """Also where the first class has no weight, and where there are no rows."""
    channels = 1 if task == "binary" else 2
    logits = torch.ones(rows, channels, requires_grad=True)
    labels = torch.full((rows, 2) if task == "multilabel" else (rows,), -1)
    loss = Loss(task, torch.arange(channels).float() if weighted else None)(logits, labels)
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_a_batch_of_classes_without_weight_has_loss_0_and_gradients() -> None:
    logits = torch.randn(2, 3, requires_grad=True)
    loss = Loss("multiclass", torch.tensor([0.0, 1.0, 1.0]))(logits, torch.zeros(2, dtype=torch.int64))
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None
    assert not logits.grad.any()
    with pytest.raises(ConfigError, match="class_weights are all 0"):
        class_weights([0.0, 0.0], "multiclass", 2, [])


def test_class_weights() -> None:
    labels = torch.tensor([0, 0, 0]), torch.tensor([1, -1])  # in pieces
    assert class_weights("none", "multiclass", 2, labels) is None
    balanced = class_weights("balanced", "multiclass", 2, labels)
    assert balanced is not None
    assert (balanced * torch.tensor([3, 1])).tolist() == pytest.approx([2, 2])
    positives = class_weights("balanced", "binary", 2, labels)
    assert positives is not None
    assert positives.tolist() == [3]
    with pytest.raises(ConfigError, match="3 numbers"):
        class_weights([1.0, 2.0, 3.0], "multiclass", 2, labels)


@pytest.mark.parametrize("task", ["multiclass", "binary", "multilabel"])
@pytest.mark.parametrize("weighted", [False, True])
def test_parts_of_a_loss_add_up_to_its_mean(task: str, weighted: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    channels = 1 if task == "binary" else 4
    logits = torch.randn(50, channels, generator=rng)
    shape = (50, 4) if task == "multilabel" else (50,)
    labels = torch.randint(-1, 4 if task == "multiclass" else 2, shape, generator=rng)
    weights = torch.rand(channels, generator=rng) + 0.5 if weighted else None
    loss = Loss(task, weights, label_smoothing=0.1)
    parts = [slice(0, 7), slice(7, 8), slice(8, 50)]
    total = sum(loss.weight(labels[part]) for part in parts)
    found = sum(float(loss.part(logits[part], labels[part])) for part in parts) / total
    assert found == pytest.approx(float(loss(logits, labels)), rel=1e-6)


@pytest.mark.parametrize("task", ["binary", "multiclass", "multilabel"])
@pytest.mark.parametrize("exact", [0, 1 << 22])
def test_a_model_that_gives_nan_is_scored(task: str, exact: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "EXACT_SCORES", exact)
    logits = RNG.standard_normal((40, 1 if task == "binary" else 3)).astype(np.float32)
    logits[5], logits[6, 0] = np.nan, np.inf
    labels = RNG.integers(0, 2, (40, 3)) if task == "multilabel" else np.arange(40) % 2
    found = in_batches(Scores(task, 3, 40), logits, labels)
    assert found["loss"] is None
    assert 0 < (found["auroc"] or 0) < 1


@pytest.mark.parametrize("task", ["binary", "multiclass", "multilabel"])
def test_scores_are_those_of_this_process_in_a_process_group(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def waits(*_: object, **__: object) -> None:
        raise AssertionError("the other ranks may score nothing now")

    monkeypatch.setattr("torch.distributed.barrier", waits)
    logits = RNG.standard_normal((40, 1 if task == "binary" else 3)).astype(np.float32)
    labels = RNG.integers(0, 2, (40, 3)) if task == "multilabel" else np.arange(40) % 2
    alone = in_batches(Scores(task, 3, 40), logits, labels)
    with process_group(1):
        assert in_batches(Scores(task, 3, 40), logits, labels) == alone


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest tensor that torch makes."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.nbytes = max([self.nbytes, *(each.nbytes for each in tree_leaves(out) if isinstance(each, torch.Tensor))])
        return out


@pytest.fixture
def deterministic() -> Iterator[None]:
    """As in runs."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("count", [1000, 10**9])
@pytest.mark.parametrize(("task", "classes"), [("multiclass", 12), ("multilabel", 12), ("binary", 2)])
def test_the_memory_of_scores_does_not_grow_with_the_batch(
    monkeypatch: pytest.MonkeyPatch, task: str, classes: int, count: int
) -> None:
    """Neither with the square of the classes, as torchmetrics' own way to count under deterministic algorithms."""
    monkeypatch.setattr(metrics, "NUMBERS_AT_ONCE", 2**12)
    rows, channels = 1000, 1 if task == "binary" else classes
    logits = torch.randn(rows, channels)
    labels = torch.randint(classes, (rows,)) if task == "multiclass" else torch.randint(2, (rows, channels)).float()
    labels = labels.view(-1) if task == "binary" else labels
    whole, parts = Scores(task, classes, count), Scores(task, classes, count)
    with LargestTensor() as largest:
        whole.update(logits, labels)
    of_counts = 8 * 2 * channels * metrics.BINS if count > 10**6 else 8 * classes**2
    assert largest.nbytes <= max(logits.nbytes, of_counts, 8 * metrics.NUMBERS_AT_ONCE)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    for first in range(0, rows, 250):
        parts.update(logits[first : first + 250], labels[first : first + 250])
    found, wanted = whole.compute(), parts.compute()
    assert found.pop("loss") == pytest.approx(wanted.pop("loss"), rel=1e-5)
    assert found == wanted


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("count", [1024, 10**9])
@pytest.mark.parametrize("task", ["multiclass", "multilabel"])
def test_tensors_of_scores_of_many_classes_are_small(task: str, count: int) -> None:
    """172 classes, 1,024 seeds: a number for each pair of classes and seed would take 242 MB."""
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(1024, 172, generator=rng)
    labels = torch.randint(172, (1024,), generator=rng)
    labels = labels if task == "multiclass" else torch.randint(2, (1024, 172), generator=rng).float()
    scores = Scores(task, 172, count)
    with LargestTensor() as largest:
        scores.update(logits, labels)
        scores.compute()
    assert largest.nbytes < 25 * 10**6


MEASURE = """
import torch
from tools.bench.sampled.class_scores import FEW, MANY, measure
torch.set_num_threads(1)
for task in ("multiclass", "multilabel"):
    for count in (FEW, MANY):
        for classes in (16, 172):
            print(*measure(task, classes, 1024, count, torch.device("cpu")))
"""


@pytest.mark.alone
def test_scores_take_time_in_proportion_to_classes_and_little_memory() -> None:
    taken = [tuple(map(float, line.split())) for line in python("-c", MEASURE).stdout.splitlines()]
    for few, many in zip(taken[::2], taken[1::2], strict=True):
        # 11 times this for each pair of classes. Bins of 16 classes stay in a cache, which is up to 1.6 times as fast.
        assert sum(many[:2]) < 3 * 172 / 16 * sum(few[:2])
        assert many[2] < 100 * 10**6
