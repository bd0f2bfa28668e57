"""Callbacks that log a run's losses and scores to TensorBoard, Weights & Biases or MLflow: `ooc train --log NAME`."""

import os
import time
import uuid
from pathlib import Path
from typing import Any

from ooc.config.base import RunConfig
from ooc.stores.errors import ConfigError
from ooc.training.callbacks import Callback, scores_of

_FLUSH_SECONDS = 1.0
"""between two requests to an MLflow server"""
_MOST_METRICS = 1000
"""of one request, as MLflow limits them"""


class Logger(Callback):
    """Logs `train/loss` of every batch, the scores of every epoch, and at the end the best model's as `best/...`."""

    package = ""
    """what to install: the name of the extra"""

    def __init__(self) -> None:
        self._total = 0

    def connect(self, config: RunConfig, total_steps: int) -> None:
        """Open the log. Raises ImportError if its package is missing."""
        raise NotImplementedError

    def log(self, values: dict[str, float], step: int) -> None:
        """Log values at a step of the run."""
        raise NotImplementedError

    def begin(self, config: RunConfig, total_steps: int) -> None:
        """Open the log; raises ConfigError, in one line, if that is not possible."""
        self._total = total_steps
        try:
            self.connect(config, total_steps)
        except ImportError:
            raise ConfigError(f"logging to {self.package} needs a package: pip install 'ooc[{self.package}]'") from None

    def step(self, epoch: int, step: int, total_steps: int, loss: float) -> None:
        """See `Callback`."""
        self._total = total_steps
        self.log({"train/loss": loss}, total_steps)

    def epoch(self, line: dict[str, Any]) -> None:
        """See `Callback`."""
        self.log({"epoch": line["epoch"], **scores_of(line)}, self._total)

    def finish(self, summary: dict[str, Any]) -> None:
        """See `Callback`."""
        self.log({f"best/{name}": value for name, value in scores_of(summary["metrics"]).items()}, self._total)


class TensorBoardLogger(Logger):
    """TensorBoard events in RUN/tensorboard; a resumed run replaces what it computes again."""

    package = "tensorboard"
    _writer: Any = None

    def connect(self, config: RunConfig, total_steps: int) -> None:
        """See `Logger`."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(config.out / "tensorboard"), purge_step=total_steps)

    def log(self, values: dict[str, float], step: int) -> None:
        """See `Logger`."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is buffered."""
        if self._writer is not None:
            self._writer.close()


class WandbLogger(Logger):
    """A run of Weights & Biases in the project WANDB_PROJECT (by default "ooc"); WANDB_MODE=offline needs no network."""

    package = "wandb"
    _run: Any = None

    def connect(self, config: RunConfig, total_steps: int) -> None:
        """See `Logger`; a resumed run goes on in the same W&B run."""
        import wandb

        settings: dict[str, Any] = {
            "project": os.environ.get("WANDB_PROJECT", "ooc"),
            "name": config.out.name,
            "dir": str(config.out),
        }
        ident = kept_id(config.out / "wandb.id")
        try:
            self._run = wandb.init(id=ident, resume="allow", config=config.model_dump(mode="json"), **settings)
        except wandb.errors.Error as error:
            hint = "WANDB_MODE=offline logs without a network"
            raise ConfigError(f"logging to wandb: {' '.join(str(error).split())}; {hint}") from None

    def log(self, values: dict[str, float], step: int) -> None:
        """See `Logger`."""
        self._run.log(values, step=step)

    def close(self) -> None:
        """End the W&B run."""
        if self._run is not None:
            self._run.finish()
            self._run = None


class MLflowLogger(Logger):
    """An MLflow run at MLFLOW_TRACKING_URI (by default the file RUN/mlflow.db), experiment MLFLOW_EXPERIMENT_NAME or "ooc"."""

    package = "mlflow"
    _client: Any = None

    def connect(self, config: RunConfig, total_steps: int) -> None:
        """See `Logger`; a resumed run goes on in the same MLflow run."""
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        where = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{config.out.resolve() / 'mlflow.db'}")
        name, known = os.environ.get("MLFLOW_EXPERIMENT_NAME", "ooc"), config.out / "mlflow.id"
        try:
            client = MlflowClient(where)
            if known.exists():
                self._run = known.read_text()
                client.update_run(self._run, "RUNNING")
            else:
                experiment = client.get_experiment_by_name(name)
                number = client.create_experiment(name) if experiment is None else experiment.experiment_id
                self._run = client.create_run(number, run_name=config.out.name).info.run_id
                known.write_text(self._run)
                for key, value in config.model_dump(mode="json").items():
                    client.log_param(self._run, key, value)
        except MlflowException as error:
            raise ConfigError(f"logging to mlflow: {where}: {' '.join(str(error).split())}") from None
        self._client, self._pending, self._sent = client, list[Any](), time.monotonic()

    def log(self, values: dict[str, float], step: int) -> None:
        """See `Logger`; values are sent about once a second."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._pending += [Metric(name, value, now, step) for name, value in values.items()]
        if time.monotonic() - self._sent >= _FLUSH_SECONDS:
            self._flush()

    def _flush(self) -> None:
        for first in range(0, len(self._pending), _MOST_METRICS):
            self._client.log_batch(self._run, self._pending[first : first + _MOST_METRICS])
        self._pending, self._sent = [], time.monotonic()

    def finish(self, summary: dict[str, Any]) -> None:
        """See `Callback`."""
        super().finish(summary)
        self._flush()
        self._client.set_terminated(self._run)
        self._client = None

    def close(self) -> None:
        """Send what is left; the MLflow run of a failed run is marked as failed."""
        if self._client is not None:
            self._flush()
            self._client.set_terminated(self._run, "FAILED")
            self._client = None


LOGGERS: dict[str, type[Logger]] = {each.package: each for each in (TensorBoardLogger, WandbLogger, MLflowLogger)}
"""name in `--log` -> the logger"""


def kept_id(file: Path) -> str:
    """The id in `file`, which is written if there is none."""
    if not file.exists():
        file.write_text(uuid.uuid4().hex)
    return file.read_text()
