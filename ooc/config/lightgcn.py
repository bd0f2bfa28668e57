"""Settings of LightGCN (`ooc train --task link --mode lightgcn`). Imports nothing heavy; see `ooc.config.nodes`."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from ooc.config.base import Counts, Fraction, Positive, Ratio, RunConfig, Width, Words, changed, task_name
from ooc.config.divided_edges import DividedEdges
from ooc.config.fan_outs import HELP as FANOUT_HELP
from ooc.config.fan_outs import FanOuts, fanout_text, parsed
from ooc.config.tables import MODELS as OF_TABLES


class LightGCNConfig(DividedEdges, RunConfig):
    """Settings of LightGCN with the propagation over the whole graph in every step, or over sampled links.

    >>> LightGCNConfig(store="gowalla.ooc", out="runs/gowalla", layers=3).loss
    'bpr'
    """

    refused = ("dropout", "optimizer", "weight_decay", "grad_clip", "model_args", "features", "in_memory", "tf32", "device")
    mode: Literal["lightgcn"] = Field(default="lightgcn", description="LightGCN by all links, or by --fanout.")
    task: Annotated[Literal["link"], BeforeValidator(task_name)] = Field(
        default="link", description="link (whether there is an edge)."
    )
    model: Literal["lightgcn"] = Field(default="lightgcn", description="lightgcn.")
    hidden: Width = Field(default=64, description="Columns of a row.")
    layers: Positive = Field(default=3, description="Layers.")
    fanout: FanOuts = Field(default_factory=list, description=FANOUT_HELP)
    edge_type: str | None = Field(
        default=None, description="Edge type of the links (heterogeneous), as user:likes:item; by default the one there is."
    )
    dropout: Fraction = Field(default=0.0, description="Not supported by mode lightgcn.")
    # the loss
    loss: Literal["bpr", "softmax"] = Field(
        default="bpr",
        description="bpr (as published) or softmax.",
    )
    ratio: Ratio = Field(default=1, description="Negatives: per link (bpr), or of a batch (softmax, some hundreds).")
    similarity: Literal["dot", "cosine"] = Field(
        default="dot", description="What scores a pair in training (softmax): dot, or cosine of the two rows."
    )
    temperature: float = Field(default=1.0, gt=0, description="Scores are divided by it (softmax); of cosines about 0.15.")
    l2: float = Field(default=1e-4, ge=0, description="L2 penalty on the rows of a batch's links and negatives, a link's mean.")
    init: float = Field(default=0.17, gt=0, description="Rows begin uniform in [-init, init).")
    # optimization
    epochs: Positive = Field(default=100, description="Epochs: passes over the training data.")
    batch_size: Positive = Field(default=2048, description="Links per batch.")
    lr: float = Field(default=0.001, gt=0, description="Learning rate.")
    # evaluation
    norm_power: float = Field(
        default=1.0, ge=0, le=1, description="Norms of rows count to this power in lists: 1 is the dot product, 0 the cosine."
    )
    train_split: str = Field(default="train", description="Name of the split to train on.")
    val_split: str = Field(default="val", description="Name of the split that selects the best rows.")
    eval_splits: Words = Field(default=["val", "test"], description='Splits to score at the end with the best rows; none: "".')
    val: Fraction | None = Field(
        default=None,
        description="Share of the edges for validation, at random; by default the store's split of edges, else 0.1.",
    )
    test: Fraction | None = Field(
        default=None, description="Share of the edges for test, at random; by default the store's split of edges, else 0.1."
    )
    eval_k: Counts = Field(
        default=[20], description="k of Recall@k and NDCG@k, such as 10,20: all destinations are ranked for every source."
    )
    eval_every: Positive = Field(default=10, description="Epochs between evaluations on validation.")
    monitor: str | None = Field(
        default=None,
        description="Score that selects the best rows: recall@k or ndcg@k; by default recall.",
    )

    @model_validator(mode="before")
    @classmethod
    def _not_of_tables(cls, values: Any) -> Any:
        """Name the mode of a model that is trained without propagation."""
        if isinstance(values, dict) and values.get("model") in OF_TABLES:
            raise ValueError(f"model {values['model']} is trained by mode table: give that mode, or leave the model out")
        return values

    @model_validator(mode="before")
    @classmethod
    def _layers_of_fanout(cls, values: Any) -> Any:
        """Derive `layers` from the fan-out if only the latter is given."""
        if not isinstance(values, dict) or values.get("layers") is not None:
            return values
        found = parsed(values.get("fanout") or [])
        return {**values, "layers": len(found)} if isinstance(found, list) and found else values

    @model_validator(mode="after")
    def _one_number_per_layer(self) -> Self:
        if isinstance(self.fanout, dict):
            raise ValueError("fanout by edge type does not apply to mode lightgcn, whose links are of one type: give 10,10,10")
        if self.fanout and len(self.fanout) != self.layers:
            text, count = ",".join(map(str, self.fanout)), len(self.fanout)
            raise ValueError(
                f"fanout {text} has {count} number{'s' * (count != 1)} for {self.layers} layers: give one per layer"
            )
        return self

    @model_validator(mode="after")
    def _of_the_others(self) -> Self:
        if unused := changed(self, *self.refused):
            raise ValueError(f"{unused[0]} does not apply to mode lightgcn: leave it out")
        if self.loss == "bpr" and (unused := changed(self, "similarity", "temperature")):
            raise ValueError(f"{unused[0]} does not apply to loss = bpr: leave it out, or use softmax")
        if sum(self.shares) >= 1:
            raise ValueError("val = {} and test = {} leave no edges to train on: give less".format(*self.shares))
        if not self.eval_k:
            raise ValueError("eval_k must name at least one k, such as 20: recall@k selects the best rows")
        known = [f"{score}@{k}" for k in self.eval_k for score in ("recall", "ndcg")]
        if self.monitor is not None and self.monitor not in known:
            raise ValueError(f"monitor = {self.monitor!r} is no score of eval_k: use one of {', '.join(known)}")
        return self

    @property
    def hops(self) -> list[int]:
        """The fan-out by layer; none where every step goes over the whole graph."""
        assert isinstance(self.fanout, list), "by edge type it is refused"
        return self.fanout

    @property
    def ranked_k(self) -> list[int]:
        """The k of Recall@k and NDCG@k."""
        return self.eval_k

    @property
    def monitored(self) -> str:
        """The score that selects the best rows."""
        return self.monitor or f"recall@{self.eval_k[0]}"

    @property
    def batches(self) -> str:
        drawn = f"sampled links, fan-out {fanout_text(self.fanout)}" if self.fanout else "the whole graph"
        return f"propagation over {drawn}, batches of {self.batch_size:,} links"
