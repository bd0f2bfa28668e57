"""Settings of `ooc train --mode snapshots`. Imports nothing heavy; see `ooc.config.nodes`."""

import re
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from ooc.config.base import Depth, Fraction, Positive, Ratio, TimeConfig, Width, changed, check_model, task_name


def _text(value: object) -> object:
    """Convert numbers of a configuration file to text."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


Length = Annotated[str, BeforeValidator(_text)]
MODELS = ("recurrent", "roland", "evolvegcn")
OF_MODEL = {"conv": ("recurrent", "roland"), "update": ("roland",)}
"""settings that apply to these models only"""
OF_TASK = {"link": ("negatives", "ratio", "eval_negatives", "eval_ratio", "destinations"), "node": ("labels",)}
"""settings that apply to that task only"""


class SnapshotsConfig(TimeConfig):
    """Settings of training on time windows.

    >>> SnapshotsConfig(store="messages.ooc", out="runs/weeks", window="7d").model
    'roland'
    """

    mode: Literal["snapshots"] = Field(
        default="snapshots", description="windows of events, each predicting the next, with node state on disk."
    )
    window: Length = Field(description="Length of a window: 7d, 12h, 250ms, or a number of the store's units, or of events.")
    stride: Length | None = Field(default=None, description="Distance between the starts of windows; by default --window.")
    by: Literal["time", "count"] = Field(default="time", description="Whether windows are by time or by count of events.")
    task: Annotated[Literal["link", "node"], BeforeValidator(task_name)] = Field(
        default="link",
        description="link (the next window's events) or node (the labels of a window's nodes).",
    )
    labels: str | None = Field(
        default=None, description="Event column with the classes of sources; by default the nodes' labels."
    )
    model: str = Field(
        default="roland",
        description="recurrent: a GNN, then a GRU; roland: updates every layer's rows; evolvegcn: updates the weights; or "
        "package.module:Class for your own.",
    )
    conv: Literal["sage", "gcn", "gat", "gin"] = Field(default="sage", description="Convolutions (recurrent, roland).")
    update: Literal["gru", "mlp", "average"] = Field(
        default="gru", description="Update of the rows (roland): gru, mlp or average."
    )
    hidden: Width = Field(default=64, description="Width of the hidden layers.")
    layers: Depth = Field(default=2, description="Layers.")
    dropout: Fraction = Field(default=0.0, description="Dropout between layers.")
    identity: Annotated[int, Field(ge=0, le=2**16)] = Field(
        default=32, description="Random identity features of a node (0: none)."
    )
    both_ways: bool = Field(default=True, description="Convolve in both directions, or (--no-both-ways) from src to dst only.")
    live: bool = Field(
        default=False, description="Also learn from validation and test windows, at --lr, after each has been scored."
    )
    updates: Positive = Field(default=1, description="Optimizer steps per window.")
    eval_negatives: Literal["destinations", "random", "historical"] = Field(
        default="destinations", description="Evaluation negatives: destinations, random or historical."
    )
    eval_ratio: Ratio = Field(default=1, description="Evaluation negatives per event.")
    epochs: Positive = Field(default=20, description="Epochs: passes over the training data.")
    lr: float = Field(default=0.003, gt=0, description="Learning rate.")
    monitor: str | None = Field(
        default=None,
        description="Validation score that selects the best model; by default ap (mrr with several negatives) or accuracy.",
    )

    @model_validator(mode="after")
    def _of_the_others(self) -> Self:
        check_model(self, MODELS, OF_MODEL)
        unused = changed(self, *(name for task, names in OF_TASK.items() if task != self.task for name in names))
        if unused:
            raise ValueError(f"{unused[0]} does not apply to task {self.task}: leave it out")
        return self

    @property
    def batches(self) -> str:
        stride, unit = self.stride or self.window, " events" if self.by == "count" else ""
        return f"windows of {self.window}{unit}" + (f", one every {stride}{unit}" if stride != self.window else "")

    @property
    def span(self) -> tuple[str | float, str | float | None]:
        """(window, stride) as accepted by `ooc.sampling.time_windows.windows`, with numbers converted."""
        return _number(self.window), None if self.stride is None else _number(self.stride)


def _number(text: str) -> str | float:
    """Convert text to a number if it is one."""
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
        return text
    return float(text) if "." in text else int(text)
