"""The configuration of `ooc train --mode events`. Nothing heavy is imported here; see `ooc.config.nodes`."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from ooc.config.base import Fraction, Numbers, Positive, RunConfig, Words, changed, check_model

MODELS = ("tgn", "tgat", "graphmixer")
OF_MODEL = {"memory_dim": ("tgn",), "past": ("tgn",), "strategy": ("tgn", "tgat"), "heads": ("tgn", "tgat"), "raw": MODELS}
"""settings that mean something to these models only"""
OF_OWN = ("strategy", "heads")
"""of these, to a class of the user's own"""
_NEIGHBORS = {"tgn": [10], "tgat": [10, 10], "graphmixer": [20]}
"""as in the papers, or PyG's example"""


class EventsConfig(RunConfig):
    """Everything that training on a stream of events depends on: predicting each event's destination.

    >>> EventsConfig(store="messages.ooc", out="runs/tgn").num_neighbors
    [10]
    """

    mode: Literal["events"] = Field("events", description="the stream of events, predicting each one's destination.")
    model: str = Field(
        "tgn",
        description="tgn (node memory and attention), tgat (attention, hop by hop), graphmixer (the latest events), or "
        "package.module:Class of your own.",
    )
    hidden: Positive = Field(100, description="Width of the nodes' rows.")
    memory_dim: Positive = Field(100, description="Width of a node's memory (tgn).")
    time_dim: Positive = Field(100, description="Width of the encoding of times.")
    heads: Positive = Field(2, description="Attention heads (tgn, tgat); --hidden is their width together.")
    past: Literal["event", "batch"] = Field(
        "event", description="What an event is asked about (tgn): its own past, or its batch's, as in PyG's example: faster."
    )
    dropout: Fraction = Field(0.1, description="Dropout, of attention (tgn, tgat) or in the mixer (graphmixer).")
    num_neighbors: Numbers = Field(
        default_factory=list, description="Past events to draw at a node, a number a hop: tgn 10, tgat 10,10, graphmixer 20."
    )
    strategy: Literal["last", "uniform"] = Field("last", description="Which of a node's past events: the last, or uniform.")
    columns: Words | None = Field(None, description="Event columns that the model is given (none: []); by default all.")
    raw: bool = Field(False, description="Give the model the columns' values as they are, not asinh of them.")
    batch_size: Positive = Field(200, description="Events a batch; those of one time stay together.")
    val: Fraction = Field(0.15, description="Share of the events, before the test's, to validate on.")
    test: Fraction = Field(0.15, description="Share of the events, the last ones, to test on.")
    negatives: Literal["random", "historical"] = Field(
        "random", description="Negatives to train on: random, or historical: the source's earlier ones."
    )
    ratio: Positive = Field(1, description="Negatives an event in training.")
    eval_negatives: str = Field(
        "random",
        description="Negatives to score: random, historical, or an npy file, a row each event from validation's first on.",
    )
    eval_ratio: Positive = Field(1, description="Negatives an event in scores (a file has its own number).")
    destinations: Annotated[Numbers, Field(max_length=2)] = Field(
        default_factory=list, description="FIRST,LAST: nodes that random negatives are drawn from; by default all."
    )
    epochs: Positive = Field(50, description="Epochs: passes over the training events, from an empty memory.")
    lr: float = Field(0.0005, gt=0, description="Learning rate.")
    monitor: Literal["ap", "auroc", "mrr"] | None = Field(
        None, description="Score on validation that chooses the best model; by default ap, or mrr with several negatives."
    )

    @field_validator("num_neighbors")
    @classmethod
    def _counts(cls, value: list[int]) -> list[int]:
        if any(count < 1 for count in value):
            raise ValueError("each number is 1 or more")
        return value

    @model_validator(mode="after")
    def _fill(self) -> Self:
        check_model(self, MODELS)
        own = self.model not in MODELS
        drawn = self.num_neighbors or _NEIGHBORS.get(self.model, [10])
        object.__setattr__(self, "num_neighbors", drawn)  # frozen for everybody else
        if self.model in ("tgn", "graphmixer") and len(self.num_neighbors) != 1:
            raise ValueError(f"num_neighbors is one number for the model {self.model}: it looks one hop back")
        if len(self.destinations) == 1:
            raise ValueError("destinations are two numbers: the first node, and the last")
        for name in changed(self, *OF_MODEL):
            if self.model not in OF_MODEL[name] and not (own and name in OF_OWN):
                raise ValueError(f"{name} means nothing to the model {self.model}: leave it out")
        if self.hidden % self.heads and self.model in OF_MODEL["heads"]:
            raise ValueError(f"hidden = {self.hidden} is shared by {self.heads} heads: give a multiple")
        if self.val + self.test >= 1:
            raise ValueError("val and test are shares of the events, and leave some to train on")
        if self.negatives_file is not None and self.eval_ratio != 1:
            raise ValueError("eval_ratio means nothing where a file gives the negatives: leave it out")
        return self

    @property
    def negatives_file(self) -> Path | None:
        """Of the negatives to score, None where they are drawn."""
        return None if self.eval_negatives in ("random", "historical") else Path(self.eval_negatives)
