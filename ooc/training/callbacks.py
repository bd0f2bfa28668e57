"""Callbacks follow a run while it goes: the progress on a terminal, the loggers, and those of users."""

from typing import Any

from ooc.config.base import RunConfig

Rate = tuple[str, float]
BATCHES: Rate = ("batches", 1)


class Callback:
    """Follows a run; a subclass overrides the methods it needs. Nothing that a callback does changes the run.

    An exception that a method raises ends the run, as an error of the run itself would; a checkpoint is kept.

    >>> class Losses(ooc.Callback):
    ...     def epoch(self, line):
    ...         print(line["epoch"], line["train_loss"])
    >>> train(config, callbacks=[Losses()])
    """

    def begin(self, config: RunConfig, total_steps: int) -> None:
        """The run is set up, and its directory is there.

        Args:
            config: The settings, with resolved values; `config.out` is the run's directory.
            total_steps: Batches that are done, more than 0 for a resumed run.
        """

    def start(self, epoch: int, step: int, epochs: int, steps_per_epoch: int, rate: Rate = BATCHES) -> None:
        """Training begins.

        Args:
            epoch: The epoch it begins in, from 0.
            step: Batches of this epoch that are done.
            epochs: Epochs in all.
            steps_per_epoch: Batches of an epoch.
            rate: What a batch is made of, and how many of it, for speeds.
        """

    def step(self, epoch: int, step: int, total_steps: int, loss: float) -> None:
        """A batch is done.

        Args:
            epoch: The epoch, from 0.
            step: The batch within the epoch, from 0.
            total_steps: The batch within the run, from 0.
            loss: Its loss.
        """

    def epoch(self, line: dict[str, Any]) -> None:
        """An epoch is done.

        Args:
            line: Its line in metrics.jsonl: "epoch" (from 0), "steps", "train_loss", and, if it was scored, "val" (name ->
                score) and "best" (whether it is the best so far).
        """

    def note(self, text: str) -> None:
        """A message to the user."""

    def finish(self, summary: dict[str, Any]) -> None:
        """The run is over.

        Args:
            summary: As in RUN/summary.json; "metrics" has the scores by split.
        """

    def close(self) -> None:
        """Nothing more will come, whether the run is over or failed; called once or more."""


def scores_of(line: dict[str, Any]) -> dict[str, float]:
    """ "split/name" -> score of an epoch's line, or of the "metrics" of a summary.

    >>> scores_of({"epoch": 0, "val": {"accuracy": 0.5, "auroc": None}})
    {'val/accuracy': 0.5}
    """
    splits = {split: scores for split, scores in line.items() if split in ("train", "val", "test") and isinstance(scores, dict)}
    return {f"{split}/{name}": value for split, scores in splits.items() for name, value in scores.items() if value is not None}
