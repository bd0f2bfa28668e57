"""What modes on nodes share: the task, the model and its loss, scores by split."""

from dataclasses import asdict
from typing import Any

from ooc.config.nodes import NodeConfig
from ooc.history.history import Growth
from ooc.layerwise.scores import ExactScores
from ooc.metrics.nodes import DEFAULT_MONITOR, out_channels
from ooc.runtime.memory_plan import MemoryPlan
from ooc.training.build import make_model
from ooc.training.mode import Mode, Scores, next_epoch
from ooc.training.tasks import check_task
from stores.arrays.rows import Ids
from stores.dataset import Dataset

EXACT_FOLDER = "sweep"
"""of the rows of exact scores, in the run's directory"""


class NodeMode(Mode):
    """Training on the nodes of a split; see `Mode`. exact: exact scores, where they are configured."""

    config: NodeConfig
    exact: ExactScores | None = None

    def __init__(self, config: NodeConfig, dataset: Dataset) -> None:
        super().__init__(config, dataset)
        self.task = check_task(config, dataset)
        self.classes = dataset.num_classes or 2
        channels = out_channels(self.task, self.classes)
        self.model = make_model(config, dataset.num_features, channels).to(self.device)
        self.monitor = config.monitor or DEFAULT_MONITOR[self.task]

    @property
    def batch_budget(self) -> MemoryPlan:
        """What is left for batches, and all else."""
        return self.budget

    @property
    def engine(self) -> str:
        """How rows are read into the host's memory."""
        return "auto" if self.config.engine == "gds" else self.config.engine

    def notes(self) -> list[str]:
        """The memory, and how features are read."""
        memory = [] if self.config.memory is None else [str(self.batch_budget)]
        return [*memory, f"features are read: {self.dataset.reading('x')}"]

    def score(self, split: str, epoch: int) -> Scores | None:
        """Scores of a split with the draws of `epoch`, None where the store has none of that name."""
        assert self.exact is not None, "exact scores are configured"
        return self.exact.score(split) if split in self.exact.splits else None

    def evaluate(self) -> dict[str, Any]:
        """See `Mode`; {"val": scores, "best": whether they are the best so far}."""
        scores = self.score(self.config.val_split, self.run.state.epoch)
        return {} if scores is None else {"val": scores, "best": self.run.judge(scores)}

    def final_scores(self) -> dict[str, Scores]:
        """Of `eval_splits`, with the draws that chose the model."""
        state = self.run.state
        epoch = state.epoch if state.best_epoch is None else state.best_epoch
        with self.run.measure("scoring"), self.run.booked("evaluate_seconds"):
            found = {split: self.score(split, epoch) for split in self.config.eval_splits}
        return {split: scores for split, scores in found.items() if scores is not None}

    def adapt(self, saved: dict[str, Any], touched: Ids) -> tuple[dict[str, Any], Growth]:
        """See `Mode`: with the next epoch, as batches are others now."""
        state = next_epoch(saved)
        return saved | {"state": asdict(state), "refresh": None}, Growth(touched, state.epoch)

    def finish(self, result: dict[str, Any]) -> dict[str, Any]:
        stats = None if self.exact is None else self.exact.stats
        moved = None if stats is None else {"read": stats.bytes_read, "written": stats.bytes_written}
        if self.exact is not None:
            self.exact.close(keep=False)
        return {"sweeps": moved, "budget": asdict(self.batch_budget), "reading": self.dataset.reading("x")}

    def close(self) -> None:
        if self.exact is not None:
            self.exact.close()
