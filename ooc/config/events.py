"""Settings of `ooc train --mode events`. Imports nothing heavy; see `ooc.config.nodes`."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from ooc.config.base import Fraction, Numbers, Positive, Ratio, TimeConfig, Width, check_model

MODELS = ("tgn", "tgat", "graphmixer")
OF_MODEL = {"memory_dim": ("tgn",), "past": ("tgn",), "strategy": ("tgn", "tgat"), "heads": ("tgn", "tgat"), "raw": MODELS}
"""settings that apply to these models only"""
OF_OWN = ("strategy", "heads")
"""those that also apply to user-defined classes"""
_NEIGHBORS = {"tgn": [10], "tgat": [10, 10], "graphmixer": [20]}
"""defaults of the papers, or of PyG's example"""
_SAMPLED = ("destinations", "random", "historical", "tgb")
"""evaluation negatives that come from no file"""
_TGB_RATIO = 100
"""TGB's default"""


class EventsConfig(TimeConfig):
    """Settings of training on a stream of events: predicting each event's destination.

    >>> EventsConfig(store="messages.ooc", out="runs/tgn").num_neighbors
    [10]
    """

    mode: Literal["events"] = Field(default="events", description="the event stream, predicting each event's destination.")
    task: Literal["link"] = Field(default="link", description="link (the destination of each event).")
    model: str = Field(
        default="tgn",
        description="tgn (node memory and attention), tgat (attention per hop), graphmixer (latest events), or "
        "package.module:Class for your own.",
    )
    hidden: Width = Field(default=100, description="Width of the hidden layers.")
    memory_dim: Width = Field(default=100, description="Width of a node's memory (tgn).")
    time_dim: Width = Field(default=100, description="Width of the time encoding.")
    heads: Positive = Field(default=2, description="Attention heads (tgn, tgat); --hidden is their total width.")
    past: Literal["event", "batch"] = Field(
        default="event",
        description="Past an event is predicted from (tgn): its own, or its batch's as in PyG's example (faster).",
    )
    dropout: Fraction = Field(default=0.1, description="Dropout of the attention (tgn, tgat) or the mixer (graphmixer).")
    num_neighbors: Numbers = Field(
        default_factory=list, description="Past events sampled per node, one number per hop: tgn 10, tgat 10,10, graphmixer 20."
    )
    strategy: Literal["last", "uniform"] = Field(
        default="last", description="Which past events of a node to sample: last or uniform."
    )
    raw: bool = Field(default=False, description="Use the columns' values unchanged instead of their asinh.")
    batch_size: Positive = Field(default=200, description="Events per batch; events of equal time stay together.")
    eval_negatives: str = Field(
        default="destinations",
        description="Evaluation negatives: destinations, random, historical, tgb (one of destinations and, beside it, as many "
        "as eval_ratio as in the Temporal Graph Benchmark: tgb_mrr), or an npy file (a row per event from validation on).",
    )
    eval_ratio: Ratio = Field(
        default=1, description="Evaluation negatives per event (100 by default with tgb; a file has its own number)."
    )
    epochs: Positive = Field(default=50, description="Epochs: passes over the training data.")
    lr: float = Field(default=0.0005, gt=0, description="Learning rate.")
    monitor: Literal["ap", "auroc", "mrr", "tgb_mrr"] | None = Field(
        default=None, description="Validation score that selects the best model; by default ap (mrr with several negatives)."
    )

    @field_validator("num_neighbors")
    @classmethod
    def _counts(cls, value: list[int]) -> list[int]:
        if any(count < 1 for count in value):
            raise ValueError("each number must be at least 1")
        return value

    @model_validator(mode="after")
    def _fill(self) -> Self:
        check_model(self, MODELS, OF_MODEL, OF_OWN)
        counts = self.num_neighbors or _NEIGHBORS.get(self.model, [10])
        object.__setattr__(self, "num_neighbors", counts)  # the model is frozen otherwise
        if self.model in ("tgn", "graphmixer") and len(self.num_neighbors) != 1:
            raise ValueError(f"num_neighbors must be one number for model {self.model}, which uses one hop")
        if self.hidden % self.heads and self.model in OF_MODEL["heads"]:
            raise ValueError(f"hidden = {self.hidden} is divided among {self.heads} heads: give a multiple")
        if self.eval_negatives == "tgb" and "eval_ratio" not in self.model_fields_set:
            object.__setattr__(self, "eval_ratio", _TGB_RATIO)
        if self.monitor == "tgb_mrr" and self.eval_negatives != "tgb":
            raise ValueError("monitor = tgb_mrr is a score of eval_negatives = tgb: give both, or another monitor")
        if self.negatives_file is not None and self.eval_ratio != 1:
            raise ValueError("eval_ratio does not apply to negatives from a file: leave it out")
        return self

    @property
    def batches(self) -> str:
        counts = ", ".join(map(str, self.num_neighbors))
        return f"batches of {self.batch_size:,} events, {counts} past events sampled per node"

    @property
    def negatives_file(self) -> Path | None:
        """File of the evaluation negatives; None if they are sampled."""
        return None if self.eval_negatives in _SAMPLED else Path(self.eval_negatives)
