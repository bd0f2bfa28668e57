"""Settings of training on whole graphs; see `ooc.config.nodes`."""

from typing import Literal

from pydantic import Field

from ooc.config.base import Positive, Size
from ooc.config.gradients import SharedGradients
from ooc.config.models import ModelConfig


class GraphConfig(ModelConfig, SharedGradients):
    """Settings of training on the labels of whole graphs.

    >>> GraphConfig(store="molecules.ooc", out="runs/1", model="gin", layers=3, pooling="sum").batches
    'batches of 128 graphs'
    """

    task: Literal["graph"] = Field(default="graph", description="graph (labels of whole graphs).")
    gives_hidden = True
    mode: Literal["graphs"] = Field(default="graphs", description="batches of whole graphs.")
    pooling: Literal["mean", "sum", "max", "attention"] = Field(
        default="mean", description="How the rows of a graph's nodes become one: mean, sum, max or attention."
    )
    virtual_node: bool = Field(default=False, description="A virtual node joins all nodes of a graph between layers.")
    batch_size: Positive = Field(default=128, description="Graphs per batch.")
    shuffle_block: Size = Field(default="128MB", description="Bytes of consecutive graphs that are mixed with one another.")
    eval_batch_size: Positive | None = Field(default=None, description="Graphs per evaluation batch; by default --batch-size.")
    accumulate: Positive = Field(default=1, description="Batches whose gradients are accumulated per optimizer step.")
    precision: Literal["fp32", "bf16", "fp16"] = Field(default="fp32", description="Autocast: fp32 (none), bf16 or fp16.")

    @property
    def of_a_rank(self) -> tuple[str, ...]:
        return "batch_size", "eval_batch_size"

    @property
    def batches(self) -> str:
        return f"batches of {self.batch_size:,} graphs"
