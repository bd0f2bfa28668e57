"""What is foretold of windows, and by when: tasks and classes, splits of the windows, and what EdgeBank makes of them."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

from ooc.metrics.edgebank import EdgeBank
from ooc.metrics.links import LinkScores
from ooc.runtime.pace import Pace
from ooc.sampling.event_labels import last_labels
from ooc.sampling.negatives import Negatives
from ooc.temporal.forecast_loader import Forecast, WindowPair, draw
from stores.dataset import Dataset
from stores.errors import ConfigError, InputError

Found = dict[str, float | None]
_BLOCK = 2**16


def task_of(dataset: Dataset, task: str, labels: str | None) -> tuple[str | None, int]:
    """(the task of the nodes' classes as `ooc.metrics.nodes` has it, or None for links; how many classes there are).

    labels: a column of the events, whose classes are counted over all of them; None: the nodes' own. Raises ConfigError where
    there are none, InputError for a column that holds none.
    """
    if task == "links":
        return None, 0
    if labels is None:
        if dataset.task is None:
            raise ConfigError(f"{dataset.path} has no labels of nodes: give the event column that holds them by --labels")
        return dataset.task, dataset.num_classes or 2
    events, most = dataset.events, -1
    if (width := events.width(labels)) not in ((), (1,)):
        raise InputError(f"the column {labels} has {width[0]} values an event: a label is one")
    for start in range(0, len(events), _BLOCK):
        block = events.read(start, min(start + _BLOCK, len(events)), [labels])
        most = max(most, int(last_labels(len(block), np.arange(len(block)), block.columns[labels]).max()))
    if most < 1:
        raise InputError(f"the column {labels} tells no two classes apart")
    return ("binary", 2) if most == 1 else ("multiclass", most + 1)


def split_steps(steps: Iterable[WindowPair], train_end: int, val_end: int) -> dict[str, tuple[int, int]]:
    """Name -> (first, last) step of each split: "train" learns from no event from `train_end` on, "val" from `val_end` on.

    A window across such a border belongs to the later split.
    """
    train = val = count = 0
    for step in steps:
        count += 1
        end = max(step.window.last, step.last)
        train += end <= train_end
        val += end <= val_end
    return {"train": (0, train), "val": (train, val), "test": (val, count)}


def parts(forecast: Forecast, pairs: int) -> Iterator[Forecast]:
    """The forecast with some of its events to foresee at a time: `pairs` with their negatives, but one at least."""
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
    most: int,
    tell: Pace,
    folder: Path | None = None,
) -> dict[str, Found]:
    """Split -> EdgeBank's scores of the events that its windows are to foresee: it knows all pairs up to each window's end.

    {} where those pairs take more than `most` bytes. folder: where scores wait that are too many for the memory.
    """
    events, bank, known = dataset.events, EdgeBank(dataset.num_nodes), 0
    scores = {split: LinkScores(folder=folder) for split, (first, last) in splits.items() if split != "train" and last > first}
    for step in steps:
        for start in range(known, step.window.last, _BLOCK):
            block = events.read(start, min(start + _BLOCK, step.window.last), [])
            bank.update(block.src, block.dst, block.time)
        known = max(known, step.window.last)
        tell("EdgeBank", known, len(events), "events")
        if bank.nbytes > most:
            return {}
        split = next(name for name, (first, last) in splits.items() if first <= step.step < last)
        for start in range(step.first, step.last, _BLOCK) if split in scores else ():
            block = events.read(start, min(start + _BLOCK, step.last), [])
            wrong = draw(events, negatives, block, step.window.last, key)
            true = torch.from_numpy(bank.score(block.src, block.dst, block.time))
            false = [torch.from_numpy(bank.score(block.src, column, block.time)) for column in wrong.T]
            scores[split].update(true, torch.stack(false, dim=1))
    return {split: dict(each.compute()) for split, each in scores.items()}
