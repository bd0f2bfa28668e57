"""The configuration of `ooc train --mode snapshots`. Nothing heavy is imported here; see `ooc.config.nodes`."""

import re
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from ooc.config.base import Fraction, Numbers, Positive, RunConfig, Words, changed, check_model


def _text(value: object) -> object:
    """Numbers of a configuration file as text."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


Length = Annotated[str, BeforeValidator(_text)]
MODELS = ("recurrent", "roland", "evolvegcn")
OF_MODEL = {"conv": ("recurrent", "roland"), "update": ("roland",)}
"""settings that mean something to these models only"""
OF_TASK = {
    "links": ("negatives", "ratio", "eval_negatives", "eval_ratio", "destinations"),
    "nodes": ("labels",),
}
"""settings that mean something to that task only"""


class SnapshotsConfig(RunConfig):
    """Everything that training on windows of time depends on.

    >>> SnapshotsConfig(store="messages.ooc", out="runs/weeks", window="7d").model
    'roland'
    """

    mode: Literal["snapshots"] = Field(
        "snapshots", description="snapshots: windows of the events, each foretelling the next, with what nodes carry on disk."
    )
    window: Length = Field(description="Length of a window: 7d, 12h, 250ms, or a number of the store's units, or of events.")
    stride: Length | None = Field(None, description="From one window's beginning to the next one's; by default --window.")
    by: Literal["time", "count"] = Field("time", description="Whether windows go by time, or count events.")
    task: Literal["links", "nodes"] = Field(
        "links", description="links: the next window's events; nodes: classes of a window's nodes (of the store's splits)."
    )
    labels: str | None = Field(None, description="Event column with the classes of the sources; by default the nodes' labels.")
    model: str = Field(
        "roland",
        description="recurrent: a GNN, then a GRU; roland: every layer's rows are updated; evolvegcn: its weights are; or "
        "package.module:Class of your own.",
    )
    conv: Literal["sage", "gcn", "gat", "gin"] = Field("sage", description="Convolutions (recurrent, roland).")
    update: Literal["gru", "mlp", "average"] = Field("gru", description="How rows are updated (roland): gru, mlp or average.")
    hidden: Positive = Field(64, description="Width of the nodes' rows.")
    layers: Positive = Field(2, description="Layers.")
    dropout: Fraction = Field(0.0, description="Dropout between layers.")
    identity: Annotated[int, Field(ge=0)] = Field(
        32, description="Random numbers that tell a node from others, beside its features (0: none)."
    )
    both_ways: bool = Field(True, description="Convolve along events in both directions, or (--no-both-ways) from src to dst.")
    columns: Words | None = Field(None, description="Event columns that the model is given (none: []); by default all.")
    live: bool = Field(False, description="Learn from windows of validation and test too, each when it has been scored.")
    updates: Positive = Field(1, description="Optimizer steps a window.")
    val: Fraction = Field(0.15, description="Share of the events, before the test's, to validate on.")
    test: Fraction = Field(0.15, description="Share of the events, the last ones, to test on.")
    negatives: Literal["random", "historical"] = Field(
        "random", description="Negatives to train on: random, or historical: the source's earlier ones."
    )
    ratio: Positive = Field(1, description="Negatives an event in training.")
    eval_negatives: Literal["random", "historical"] = Field("random", description="Negatives to score: random or historical.")
    eval_ratio: Positive = Field(1, description="Negatives an event in scores.")
    destinations: Annotated[Numbers, Field(max_length=2)] = Field(
        default_factory=list, description="FIRST,LAST: nodes that random negatives are drawn from; by default all."
    )
    epochs: Positive = Field(20, description="Epochs: passes over the training windows, from the beginning.")
    lr: float = Field(0.003, gt=0, description="Learning rate.")
    monitor: str | None = Field(
        None,
        description="Score on validation that chooses the best model; by default ap (mrr with several negatives), accuracy.",
    )

    @model_validator(mode="after")
    def _of_the_others(self) -> Self:
        check_model(self, MODELS)
        for name in changed(self, *OF_MODEL):
            if self.model not in OF_MODEL[name]:
                raise ValueError(f"{name} means nothing to the model {self.model}: leave it out")
        idle = changed(self, *(name for task, names in OF_TASK.items() if task != self.task for name in names))
        if idle:
            raise ValueError(f"{idle[0]} means nothing to the task {self.task}: leave it out")
        if len(self.destinations) == 1:
            raise ValueError("destinations are two numbers: the first node, and the last")
        if self.val + self.test >= 1:
            raise ValueError("val and test are shares of the events, and leave some to train on")
        return self

    @property
    def span(self) -> tuple[str | float, str | float | None]:
        """(window, stride) as `ooc.sampling.time_windows.windows` takes them: numbers as numbers."""
        return _number(self.window), None if self.stride is None else _number(self.stride)


def _number(text: str) -> str | float:
    """The number that a text is, or the text."""
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
        return text
    return float(text) if "." in text else int(text)
