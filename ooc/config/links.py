"""Settings of `ooc train --task link`. Imports nothing heavy; see `ooc.config.nodes`."""

from typing import Literal, Self

from pydantic import Field, model_validator

from ooc.config.base import Fraction, Ratio, Words, changed
from ooc.config.fan_outs import fanout_text
from ooc.config.nodes import TrainConfig

PARTS = ("train", "val", "test")


class LinkConfig(TrainConfig):
    """Settings of training that predicts links: edges against pairs of nodes that are none.

    >>> LinkConfig(store="shop.ooc", out="runs/links", loss="bpr", fanout=[10, 10]).decoder
    'dot'
    """

    refused = ("label_smoothing", "class_weights", "huber_delta", "train_split", "val_split", "node_type")
    mode: Literal["sampled"] = Field(default="sampled", description="sampled neighborhoods of both ends of each link.")
    task: Literal["link"] = Field(default="link", description="link (edges against pairs that are none).")  # type: ignore[assignment]
    decoder: Literal["dot", "mlp", "distmult"] = Field(
        default="dot", description="What scores a pair by both embeddings: dot, mlp or distmult."
    )
    loss: Literal["bce", "bpr", "softmax"] = Field(  # type: ignore[assignment]
        default="bce",
        description="bce (against random pairs), bpr (against random destinations), or softmax (against random destinations "
        "that all links of a batch share).",
    )
    val: Fraction = Field(default=0.1, description="Share of the edges for validation.")
    test: Fraction = Field(default=0.1, description="Share of the edges for test.")
    ratio: Ratio = Field(default=1, description="Negatives per link in training.")
    eval_ratio: Ratio = Field(default=1, description="Negatives per link in evaluation; none is an edge.")
    exact_negatives: bool = Field(default=False, description="No negative of training is an edge either.")
    eval_splits: Words = Field(default=["val", "test"], description="Parts of the edges to score at the end: train, val, test.")
    monitor: Literal["auroc", "ap", "mrr", "hits@1", "hits@3", "hits@10"] | None = Field(
        default=None, description="Validation score that selects the best model; by default auroc (mrr with several negatives)."
    )

    @model_validator(mode="after")
    def _of_links(self) -> Self:
        unused = changed(self, *self.refused)
        if unused:
            raise ValueError(f"{unused[0]} does not apply to task = link: leave it out")
        if self.evaluate == "layerwise":
            raise ValueError("evaluate = layerwise computes all edges, those of validation too: leave it out with task = link")
        if self.val + self.test >= 1:
            raise ValueError(f"val = {self.val} and test = {self.test} leave no edges to train on: give less")
        unknown = [name for name in self.eval_splits if name not in PARTS]
        if unknown:
            raise ValueError(f"eval_splits: {unknown[0]!r} is no part of the edges: give {', '.join(PARTS)}")
        if self.patience is not None and self.val == 0:
            raise ValueError("patience needs validation edges, and val = 0: leave it out")
        return self

    @property
    def link_decoder(self) -> str | None:
        return self.decoder

    @property
    def leaves_mode_open(self) -> bool:
        return False

    @property
    def batches(self) -> str:
        return f"fan-out {fanout_text(self.fanout)}, batches of {self.batch_size:,} links"
