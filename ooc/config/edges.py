"""Settings of training on labels of edges; see `ooc.config.nodes`."""

from typing import Literal, Self

from pydantic import Field, model_validator

from ooc.config.base import changed
from ooc.config.nodes import TrainConfig


class EdgeConfig(TrainConfig):
    """Settings of training on the labels of edges, by the sampled neighborhoods of their ends.

    >>> EdgeConfig(store="trades.ooc", out="runs/trades", fanout=[10, 10]).task
    'edge'
    """

    refused = ("compile", "node_type", "pack")
    task: Literal["edge"] = Field(default="edge", description="edge (their labels).")  # type: ignore[assignment]
    edge_type: str | None = Field(
        default=None, description="Edge type whose labels are learned (heterogeneous); by default the one with labels."
    )
    gives_hidden = True
    mode: Literal["sampled"] = Field(default="sampled", description="neighborhoods of both ends of edges.")

    @model_validator(mode="after")
    def _of_edges(self) -> Self:
        unused = changed(self, *self.refused)
        if unused:
            raise ValueError(f"{unused[0]} does not apply to task = edge: leave it out")
        if self.evaluate == "layerwise":
            raise ValueError("evaluate = layerwise computes nodes, not edges: leave it out with task = edge")
        return self

    @property
    def leaves_mode_open(self) -> bool:
        return False
