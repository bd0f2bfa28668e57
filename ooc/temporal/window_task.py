"""Tasks on windows: a model with its head and the state it carries, classes and splits, and EdgeBank's baseline scores."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ooc.history.history import History
from ooc.metrics.links import EdgeBank, LinkScores
from ooc.metrics.tasks import LabelTask
from ooc.models.builders import full_blocks
from ooc.runtime.messages import Pace
from ooc.runtime.transfer import HostCopy, to_device
from ooc.sampling.negatives import Negatives
from ooc.sampling.time_windows import last_labels
from ooc.stores.arrays.rows import Ids
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError, InputError
from ooc.stores.events import Events
from ooc.temporal.forecast_loader import Forecast, WindowPair, draw
from ooc.temporal.window_models import WindowModel

Found = dict[str, float | None]
_BLOCK = 2**16


class WindowOutput(NamedTuple):
    """Rows [n, channels] of all nodes of a window, the new state of its own nodes, and the weights it used."""

    rows: Tensor
    carried: list[Tensor]
    weights: list[Tensor]


class PairScores(nn.Module):
    """Logits of pairs, from their rows and the product of these."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.src, self.dst, self.both = (nn.Linear(channels, channels) for _ in range(3))
        self.out = nn.Linear(channels, 1)

    def forward(self, rows: Tensor, src: Tensor, dst: Tensor) -> Tensor:
        """Map rows [n, channels] and src, dst int64[k] to [k]."""
        source, target = rows.index_select(0, src), rows.index_select(0, dst)
        hidden = self.src(source) + self.dst(target) + self.both(source * target)
        return self.out(hidden.relu()).squeeze(-1)


class WindowNet(nn.Module):
    """`model` and a head: `links` (`PairScores`), or `classes` outputs of the nodes."""

    def __init__(self, model: WindowModel, channels: int, classes: int | None = None) -> None:
        super().__init__()
        self.model = model
        self.head: nn.Module = PairScores(channels) if classes is None else nn.Linear(channels, classes)

    def outcome(self, forecast: Forecast, carried: Sequence[Tensor]) -> WindowOutput:
        """Compute a window from the state `carried` ([n, width] each) of the forecast's nodes.

        The window's own nodes are computed separately, so their rows do not depend on the next window.
        """
        weights, present = self.model.weights(), forecast.present
        rows, now = self.model(forecast.x[:present], forecast.block, [each[:present] for each in carried], weights)
        if present < len(forecast.node):
            no_edges = torch.empty((2, 0), dtype=torch.int64, device=forecast.x.device)
            alone = full_blocks(no_edges, len(forecast.node) - present, 1)[0]
            others, _ = self.model(forecast.x[present:], alone, [each[present:] for each in carried], weights)
            rows = torch.cat([rows, others])
        return WindowOutput(rows, now, weights)

    def links(self, rows: Tensor, forecast: Forecast) -> tuple[Tensor, Tensor]:
        """Return logits of the target events [k] and of their negatives [k, ratio]."""
        ratio = forecast.negative.size(1)
        src = torch.cat([forecast.src, forecast.src.repeat_interleave(ratio)])
        logits = self.head(rows, src, torch.cat([forecast.dst, forecast.negative.reshape(-1)]))
        positive, negative = logits.split([len(forecast.src), len(logits) - len(forecast.src)])
        return positive, negative.view(-1, ratio)

    def classes(self, rows: Tensor, forecast: Forecast) -> Tensor:
        """Return the outputs of the window's nodes, [present, classes]."""
        out: Tensor = self.head(rows[: forecast.present])
        return out


def carried(history: History | None, forecast: Forecast) -> list[Tensor]:
    """Return the state of the forecast's nodes, [n, width] each, on the device of x; call once per step, in order."""
    if history is None or forecast.fetched is None:
        return []
    rows = [torch.from_numpy(each).float() for each in history.pull(forecast.fetched)]
    return [each[forecast.order] for each in to_device(rows, forecast.x.device)]


def hand_on(history: History | None, base: int, net: WindowNet, forecast: Forecast, outcome: WindowOutput) -> None:
    """Store the new state of the window's nodes and the model's weights, detached; `base` is the history's step of step 0."""
    net.model.keep(outcome.weights)
    if history is not None:
        rows = HostCopy([each.float() for each in outcome.carried]).now_or_later(list)
        history.push(base + forecast.step, forecast.own, rows)


def task_of(dataset: Dataset, task: str, labels: str | None) -> LabelTask | None:
    """Return what is learned of the nodes' labels, None for links.

    `labels` is an event column with classes, counted over all events, or None for the nodes' own labels. Raises ConfigError if
    the store has no labels, InputError if the column has no classes.
    """
    if task == "link":
        return None
    if labels is None:
        if dataset.task is None:
            raise ConfigError(f"{dataset.path} has no node labels: name the event column that has them as `labels`")
        return LabelTask.of(dataset)
    events, largest = dataset.events, -1
    if (width := events.width(labels)) not in ((), (1,)):
        raise InputError(f"column {labels} has {width[0]} values per event, but a label is one value")
    for found in labels_of_events(events, labels, len(events)):
        largest = max(largest, int(found.max()))
    if largest < 1:
        raise InputError(f"column {labels} has fewer than two classes")
    return LabelTask("binary", 2) if largest == 1 else LabelTask("multiclass", largest + 1)


def labels_of_events(events: Events, column: str, stop: int) -> Iterator[Ids]:
    """The labels that events before `stop` have in a column, int64[k, ...], a piece at a time; -1 for unknown ones."""
    for start in range(0, stop, _BLOCK):
        block = events.read(start, min(start + _BLOCK, stop), [column])
        yield last_labels(len(block), np.arange(len(block)), block.columns[column])


def split_steps(steps: Iterable[WindowPair], train_end: int, val_end: int) -> dict[str, tuple[int, int]]:
    """Return (first, last) step of each split: "train" uses no event from `train_end` on, "val" none from `val_end` on.

    A window across a border belongs to the later split.
    """
    train = val = count = 0
    for step in steps:
        count += 1
        end = max(step.window.last, step.last)
        train += end <= train_end
        val += end <= val_end
    return {"train": (0, train), "val": (train, val), "test": (val, count)}


def parts(forecast: Forecast, pairs: int) -> Iterator[Forecast]:
    """Yield the forecast in parts of about `pairs` scored pairs, at least one target event each."""
    each = max(1, pairs // (1 + forecast.negative.size(1)))
    for first in range(0, len(forecast.src), each):
        part = slice(first, first + each)
        yield forecast._replace(src=forecast.src[part], dst=forecast.dst[part], negative=forecast.negative[part])


def edgebank(
    dataset: Dataset,
    steps: Iterable[WindowPair],
    splits: Mapping[str, tuple[int, int]],
    negatives: Negatives,
    key: int,
    max_bytes: int,
    progress: Pace,
    folder: Path | None = None,
) -> dict[str, Found]:
    """Return EdgeBank's scores of each split's target events, using all pairs up to the end of each window.

    Returns {} if the pairs take more than `max_bytes` bytes. `folder` is used for scores that do not fit the memory.
    """
    events, bank, known = dataset.events, EdgeBank(dataset.num_nodes), 0
    scores = {split: LinkScores(folder=folder) for split, (first, last) in splits.items() if split != "train" and last > first}
    for step in steps:
        if not bank.read(events, known, step.window.last, max_bytes, progress):
            return {}
        known = max(known, step.window.last)
        split = next(name for name, (first, last) in splits.items() if first <= step.step < last)
        for start in range(step.first, step.last, _BLOCK) if split in scores else ():
            block = events.read(start, min(start + _BLOCK, step.last), [])
            negative = draw(events, negatives, block, step.window.last, key)
            scores[split].update(bank.score(block.src, block.dst), bank.score(block.src[:, None], negative))
    return {split: dict(each.compute()) for split, each in scores.items()}
