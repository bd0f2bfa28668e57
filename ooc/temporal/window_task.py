"""Tasks on windows: labels and classes, splits of the windows, and EdgeBank's baseline scores."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from ooc.metrics.links import EdgeBank, LinkScores
from ooc.runtime.pace import Pace
from ooc.sampling.negatives import Negatives
from ooc.sampling.time_windows import last_labels
from ooc.temporal.forecast_loader import Forecast, WindowPair, draw
from stores.dataset import Dataset
from stores.errors import ConfigError, InputError

Found = dict[str, float | None]
_BLOCK = 2**16


def task_of(dataset: Dataset, task: str, labels: str | None) -> tuple[str | None, int]:
    """Return the nodes' task as in `ooc.metrics.nodes` (None for links) and the number of classes.

    `labels` is an event column with classes, counted over all events, or None for the nodes' own labels. Raises ConfigError if
    the store has no labels, InputError if the column has no classes.
    """
    if task == "links":
        return None, 0
    if labels is None:
        if dataset.task is None:
            raise ConfigError(f"{dataset.path} has no node labels: name the event column that has them with --labels")
        return dataset.task, dataset.num_classes or 2
    events, largest = dataset.events, -1
    if (width := events.width(labels)) not in ((), (1,)):
        raise InputError(f"column {labels} has {width[0]} values per event, but a label is one value")
    for start in range(0, len(events), _BLOCK):
        block = events.read(start, min(start + _BLOCK, len(events)), [labels])
        largest = max(largest, int(last_labels(len(block), np.arange(len(block)), block.columns[labels]).max()))
    if largest < 1:
        raise InputError(f"column {labels} has fewer than two classes")
    return ("binary", 2) if largest == 1 else ("multiclass", largest + 1)


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
