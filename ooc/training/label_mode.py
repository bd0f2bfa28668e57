"""What modes share that learn labels by split, whatever the labels are of: checks, choice of the best model, final scores."""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from ooc.config.labels import LabelConfig
from ooc.metrics.losses import LabelLoss
from ooc.metrics.tasks import Labelled, LabelTask
from ooc.runtime.ranks import ALONE, Ranks
from ooc.stores.arrays.members import Members
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError
from ooc.training.mode import Mode, Scores


class LabelledSplits(Labelled, Protocol):
    """What has labels and splits: a data set, or the nodes or edges of a type."""

    @property
    def splits(self) -> list[str]: ...
    def members(self, name: str) -> Members: ...


class LabelMode(Mode):
    """Training on the labels of a split; see `Mode`."""

    config: LabelConfig

    def __init__(self, config: LabelConfig, dataset: Dataset, ranks: Ranks = ALONE) -> None:
        super().__init__(config, dataset, ranks)
        self.task = self.check()
        self.monitor = config.monitor or self.task.monitor

    @abstractmethod
    def check(self) -> LabelTask:
        """Return what is learned. Raises ConfigError where the store cannot be trained on, or not so; see `task_of_labels`."""

    @abstractmethod
    def score(self, split: str, epoch: int) -> Scores | None:
        """Scores of a split with the draws of `epoch`, None where the store has none of that name."""

    def checked(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The outputs of a batch. Raises ConfigError where the model, which may be the user's own, has other ones."""
        shape, wanted = tuple(outputs.shape), (len(labels), self.task.channels)
        if shape != wanted and (self.task.channels != 1 or shape != (len(labels),)):
            raise ConfigError(
                f"model {self.config.model} returns a tensor {list(shape)}, and labels of the {self.task.kind} task need "
                f"{list(wanted)}: change the width of its last layer"
            )
        return outputs

    def evaluate(self) -> dict[str, Any]:
        """See `Mode`; {"val": scores, "best": whether they are the best so far}."""
        scores = self.score(self.config.val_split, self.run.state.epoch)
        if scores is None:
            return {}
        best = self.run.judge(scores)
        if best:
            self.keep_best()
        return {"val": scores, "best": best}

    def times_scored(self, splits: Iterable[str], epochs: int) -> dict[str, int]:
        """Split -> how often a run of so many epochs scores it; splits: those that can be scored."""
        config = self.config
        after_epochs = {config.val_split: -(-epochs // config.eval_every)}  # at the end its scores are known
        return dict.fromkeys(splits, 0) | dict.fromkeys(config.eval_splits, 1) | after_epochs

    def keep_best(self) -> None:
        """The model is the best so far: keep what of it is not in its `state_dict`."""

    def final_scores(self) -> dict[str, Scores]:
        """Of `eval_splits`, with the draws that chose the model; validation's are known since then."""
        state = self.run.state
        epoch = state.epoch if state.best_epoch is None else state.best_epoch
        with self.run.measure("scoring"), self.run.booked("evaluate_seconds"):
            known = {} if state.best_scores is None else {self.config.val_split: state.best_scores}
            found = {split: known[split] if split in known else self.score(split, epoch) for split in self.config.eval_splits}
        return {split: scores for split, scores in found.items() if scores is not None}


def task_of_labels(config: LabelConfig, labelled: LabelledSplits) -> LabelTask:
    """Return what is learned of the labels, whose splits are checked too.

    Raises:
        ConfigError: If there is no label, no node (or edge) in the training split, no such split, or a setting does not apply.
    """
    splits = ", ".join(labelled.splits) or "none"
    if labelled.task is None:
        raise ConfigError(f"{config.store} holds no labels to train on: ingest it with `label` or `labels`")
    if config.train_split not in labelled.splits:
        raise ConfigError(f"{config.store} has no split {config.train_split!r} to train on (it has: {splits})")
    if not len(labelled.members(config.train_split)):
        raise ConfigError(f"split {config.train_split!r} of {config.store} is empty: nothing to train on")
    unknown = sorted({config.val_split, *config.eval_splits} - {"val", "test", "train"} - set(labelled.splits))
    if unknown:
        raise ConfigError(f"{config.store} has no split {unknown[0]!r} (it has: {splits})")
    there = config.val_split in labelled.splits
    if config.needs_scores and not (there and len(labelled.members(config.val_split))):
        why = f"{config.val_split!r} of {config.store} is {'empty' if there else 'missing'}"
        raise ConfigError(f"{config.needs_scores} needs a validation split, and {why}: leave it out")
    return LabelTask.of(labelled, config)


def training_loss(
    config: LabelConfig, task: LabelTask, labels: Callable[[], Iterable[Tensor]], device: torch.device
) -> LabelLoss:
    """Return the task's loss, with class weights from the training split's labels.

    Args:
        config: Of the run.
        task: What is learned.
        labels: Returns the labels of the training split, [k] or [k, C], a piece at a time.
        device: Where the outputs are.

    Raises:
        ConfigError: If no label counts: each is unknown, or of a class of weight 0.
    """
    loss = task.loss(config, labels(), device)
    if not any(loss.weight(piece) for piece in labels()):
        weighted = task.kind == "multiclass" and config.class_weights != "none"
        but = " of a class whose weight is not 0" if weighted else ""
        raise ConfigError(f"split {config.train_split!r} of {config.store} has no known label{but}: nothing to train on")
    return loss
