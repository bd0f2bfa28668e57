"""Settings of training embedding tables (`ooc train --task link --mode table`). Imports nothing heavy."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from ooc.config.base import Counts, Fraction, Positive, Ratio, RunConfig, Size, Width, Words, changed, check_model, task_name
from ooc.config.divided_edges import DividedEdges
from ooc.stores.sizes import parse_bytes

MODELS = ("mf", "distmult", "complex", "transe", "rotate", "simple")
WITH_RELATIONS = MODELS[1:]
OF_PAIRS = ("complex", "rotate", "simple")
"""models whose rows have two numbers of each component"""
OF_MODEL = {
    "distance": ("transe", "rotate"),
    "reciprocal": WITH_RELATIONS,
    "relation_weight": WITH_RELATIONS,
    "weight_decay": WITH_RELATIONS,
    "eval_k": ("mf",),
}
"""settings that apply to these models only"""
OF_LOSS = {
    "margin": ("adversarial",),
    "temperature": ("adversarial",),
    "label_smoothing": ("all",),
    "correct_negatives": ("softmax",),
}
"""settings that apply to these losses only"""


class TableConfig(DividedEdges, RunConfig):
    """Settings of training a row for every node, and for every relation, without a GNN.

    >>> TableConfig(store="wn18rr.ooc", out="runs/wn", model="complex", hidden=128).optimizer
    'adagrad'
    """

    refused = ("dropout", "grad_clip", "model_args", "features", "in_memory")
    often = ("optimizer", "lr_schedule", "eval_every")
    mode: Literal["table"] = Field(default="table", description="embedding tables of any size.")
    task: Annotated[Literal["link"], BeforeValidator(task_name)] = Field(
        default="link", description="link (whether there is an edge)."
    )
    model: str = Field(default="complex", description="mf; of edges with relations distmult, complex, transe, rotate, simple.")
    hidden: Width = Field(default=128, description="Columns of a row.")
    distance: Literal["l1", "l2", "squared"] | None = Field(
        default=None, description="Distance (transe, rotate): l1, l2 or squared; by default l2."
    )
    reciprocal: bool = Field(default=False, description="A second row of each relation, that answers queries for heads.")
    edge_type: str | None = Field(
        default=None,
        description="Edge type of the links (heterogeneous), as user:likes:item; by default the one there is, or all of "
        "them, each a relation.",
    )
    dropout: Fraction = Field(default=0.0, description="Not supported by mode table.")
    # the loss
    loss: Literal["softmax", "bce", "bpr", "adversarial", "all"] = Field(
        default="softmax",
        description="softmax, bce, bpr, adversarial (self-adversarial) or all (1-vs-all).",
    )
    ratio: Ratio = Field(default=256, description="Random negatives, shared by the links of a batch.")
    correct_negatives: bool = Field(
        default=False,
        description="Each negative counts for as many nodes as it stands for (--loss softmax): a loss near that over all.",
    )
    chunk: Positive | None = Field(default=None, description="Links that share their negatives; by default all of a batch.")
    queries: Literal["auto", "both", "tails"] = Field(
        default="auto",
        description="Which ends to predict: tails only (default for mf) or heads and tails (default otherwise).",
    )
    margin: float = Field(default=0.0, description="Added to all scores (--loss adversarial); distances need about 10.")
    temperature: float = Field(default=1.0, ge=0, description="Of the negatives' weights (--loss adversarial).")
    label_smoothing: Fraction = Field(default=0.0, description="Label smoothing (--loss all).")
    regularizer: Literal["n3", "l2"] = Field(default="n3", description="Penalty on the rows of a batch's links: n3 or l2.")
    regularizer_weight: float = Field(default=0.0, ge=0, description="Weight of that penalty.")
    relation_weight: float = Field(default=0.0, ge=0, description="Weight of the prediction of relations, a second loss.")
    # optimization
    epochs: Positive = Field(default=100, description="Epochs: passes over the training data.")
    batch_size: Positive = Field(default=1024, description="Links per batch.")
    optimizer: Literal["adagrad", "rowwise_adagrad", "adam"] = Field(  # type: ignore[assignment]
        default="adagrad",
        description="adagrad, rowwise_adagrad (one sum of squares a row: half of the memory), or adam (SparseAdam).",
    )
    lr: float = Field(default=0.1, gt=0, description="Learning rate.")
    weight_decay: float = Field(default=0.0, ge=0, description="Weight decay of the relations' rows; nodes' rows have none.")
    init: float | None = Field(
        default=None, gt=0, description="Rows begin uniform in [-init, init); by default the model's own."
    )
    # buckets
    buckets: Annotated[int, Field(gt=0, le=1024)] | None = Field(
        default=None, description="Buckets that nodes are divided into; by default 1 where the table fits the memory."
    )
    resident: Annotated[int, Field(gt=0, le=1024)] | None = Field(
        default=None, description="Buckets that are trained at a time; by default as many as the memory has room for, up to 8."
    )
    disk: Size | None = Field(
        default=None, description="Disk space for the table, such as 50GB: with less of it there are more checkpoints."
    )
    # evaluation
    train_split: str = Field(default="train", description="Name of the split to train on.")
    val_split: str = Field(default="val", description="Name of the split that selects the best model.")
    eval_splits: Words = Field(default=["val", "test"], description='Splits to score at the end with the best model; none: "".')
    val: Fraction | None = Field(
        default=None,
        description="Share of the edges for validation, at random; by default the store's split of edges, else 0.1.",
    )
    test: Fraction | None = Field(
        default=None, description="Share of the edges for test, at random; by default the store's split of edges, else 0.1."
    )
    eval_candidates: Positive | None = Field(
        default=None, description="Rank among so many random candidates, an estimate; by default among all."
    )
    eval_every: Positive = Field(default=5, description="Epochs between evaluations on validation.")
    eval_k: Counts | None = Field(
        default=None,
        description="k of Recall@k and NDCG@k (mf), such as 10,20: all destinations are ranked for every source; by default "
        '20, and none with eval_candidates; none: "".',
    )
    monitor: str | None = Field(
        default=None,
        description="Score that selects the best rows: mrr, hits@k, of mf recall@k or ndcg@k; by default mrr.",
    )

    @model_validator(mode="after")
    def _of_the_others(self) -> Self:
        if unused := changed(self, *self.refused):
            raise ValueError(f"{unused[0]} does not apply to mode table: leave it out")
        if self.model == "lightgcn":
            raise ValueError("model lightgcn is trained by mode lightgcn: leave the model out, and give that mode")
        if self.model not in MODELS:
            raise ValueError(f"model {self.model!r} is unknown in mode table: use {', '.join(MODELS)}")
        check_model(self, MODELS, OF_MODEL)
        if self.model in OF_PAIRS and self.hidden % 2:
            near = " or ".join(str(width) for width in (self.hidden - 1, self.hidden + 1) if width)
            raise ValueError(f"hidden = {self.hidden}: {self.model} needs an even number: give {near}")
        for name in changed(self, *OF_LOSS):
            if self.loss not in OF_LOSS[name]:
                raise ValueError(f"{name} does not apply to loss = {self.loss}: leave it out")
        if self.loss == "all" and (unused := changed(self, "ratio", "chunk")):
            raise ValueError(f"{unused[0]} does not apply to loss = all, which has no negatives: leave it out")
        if not self.regularizer_weight and changed(self, "regularizer"):
            raise ValueError("regularizer applies with regularizer_weight above 0: set that too, or leave it out")
        if sum(self.shares) >= 1:
            raise ValueError("val = {} and test = {} leave no edges to train on: give less".format(*self.shares))
        if self.eval_k and self.eval_candidates is not None:
            raise ValueError("eval_k ranks all destinations, and eval_candidates a sample of them: leave one out")
        if self.monitor is not None and self.monitor not in (scores := self._scores):
            raise ValueError(f"monitor = {self.monitor!r} is no score of this run: use one of {', '.join(scores)}")
        self._check_buckets()
        return self

    def _check_buckets(self) -> None:
        if self.resident is not None and self.buckets is None:
            raise ValueError("resident is how many of `buckets` are trained at a time: give that too, or leave it out")
        if self.buckets is not None and self.resident is not None:
            if self.resident > self.buckets:
                raise ValueError(f"resident = {self.resident} is more than the {self.buckets} buckets there are: give less")
            if self.resident == 1 < self.buckets:
                raise ValueError("resident = 1: an edge between two buckets needs both: give 2 or more")
        if self.loss == "all" and self.buckets is not None and self.buckets > 1:
            raise ValueError(
                "loss = all scores all nodes in every step, which buckets of them do not have: use softmax, or buckets = 1"
            )

    @property
    def automatic(self) -> tuple[str, ...]:
        return "buckets", "resident"

    @property
    def ranked_k(self) -> list[int]:
        """The k of Recall@k and NDCG@k; none where sources have no lists."""
        if self.model != "mf" or self.eval_candidates is not None:
            return []
        return [20] if self.eval_k is None else self.eval_k

    @property
    def _scores(self) -> list[str]:
        """What may select the best model."""
        return [*("mrr", "hits@1", "hits@3", "hits@10"), *(f"{name}@{k}" for k in self.ranked_k for name in ("recall", "ndcg"))]

    @property
    def has_relations(self) -> bool:
        """Whether the model has rows of relations."""
        return self.model in WITH_RELATIONS

    @property
    def both_ways(self) -> bool:
        """Whether heads are asked for too."""
        return self.queries == "both" or (self.queries == "auto" and self.has_relations)

    @property
    def disk_bytes(self) -> int | None:
        """`disk` in bytes."""
        return None if self.disk is None else parse_bytes(self.disk)

    @property
    def batches(self) -> str:
        return f"batches of {self.batch_size:,} links"
