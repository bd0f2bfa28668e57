"""Settings of `ooc train --task link`. Imports nothing heavy; see `ooc.config.nodes`."""

from typing import Literal, Self

from pydantic import Field, model_validator

from ooc.config.base import Counts, Fraction, Ratio, Words, changed
from ooc.config.divided_edges import DividedEdges
from ooc.config.fan_outs import fanout_text
from ooc.config.nodes import TrainConfig


class LinkConfig(DividedEdges, TrainConfig):
    """Settings of training that predicts links: edges against pairs of nodes that are none.

    >>> LinkConfig(store="shop.ooc", out="runs/links", loss="bpr", fanout=[10, 10]).decoder
    'dot'
    """

    refused = ("label_smoothing", "class_weights", "huber_delta", "node_type", "pack")
    gives_hidden = True
    mode: Literal["sampled"] = Field(default="sampled", description="sampled neighborhoods of both ends of each link.")
    task: Literal["link"] = Field(default="link", description="link (whether there is an edge).")  # type: ignore[assignment]
    edge_type: str | None = Field(
        default=None, description="Edge type of the links (heterogeneous), as user:likes:item; by default the one there is."
    )
    decoder: Literal["dot", "mlp", "distmult"] = Field(
        default="dot", description="What scores a pair by both embeddings: dot, mlp or distmult."
    )
    loss: Literal["bce", "bpr", "softmax"] = Field(  # type: ignore[assignment]
        default="bce",
        description="bce (against random pairs), bpr (against random destinations), or softmax (against random destinations "
        "that all links of a batch share).",
    )
    val: Fraction | None = Field(
        default=None,
        description="Share of the edges for validation, at random; by default the store's split of edges, else 0.1.",
    )
    test: Fraction | None = Field(
        default=None, description="Share of the edges for test, at random; by default the store's split of edges, else 0.1."
    )
    ratio: Ratio = Field(default=1, description="Negatives per link in training.")
    eval_ratio: Ratio = Field(default=1, description="Negatives per link in evaluation; none is an edge, if there is another.")
    exact_negatives: bool = Field(default=False, description="No negative of training is an edge either.")
    eval_splits: Words = Field(
        default=["val", "test"],
        description="Parts of the edges to score at the end with the best model: train, val, test; of a store's split by their "
        'names; none: "". Validation is scored after epochs in any case, as it selects the best model.',
    )
    eval_k: Counts = Field(
        default=[],
        description="k of Recall@k and NDCG@k at the end, such as 10,20: all destinations are ranked for every source that has "
        "links in the part, without those known before; by default none are.",
    )
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
        if sum(self.shares) >= 1:
            raise ValueError("val = {} and test = {} leave no edges to train on: give less".format(*self.shares))
        if self.monitor and self.monitor.startswith("hits@") and self.eval_ratio < int(self.monitor.removeprefix("hits@")):
            raise ValueError(
                f"monitor = {self.monitor} is 1 for every model with eval_ratio = {self.eval_ratio}: give more negatives, or "
                "another monitor"
            )
        if self.needs_scores and self.val == 0:
            raise ValueError(f"{self.needs_scores} needs validation edges, and val = 0: leave it out")
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
