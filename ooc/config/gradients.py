"""Settings of how several processes exchange gradients. Imports nothing heavy; see `ooc.config.nodes`."""

from typing import Literal, Self

from pydantic import Field, model_validator

from ooc.config.base import Positive, RunConfig, changed


class SharedGradients(RunConfig):
    """Settings of runs whose processes add up gradients."""

    compress_gradients: Literal["none", "fp16", "bf16", "powersgd"] = Field(
        default="none", description="What processes send of gradients: all (none), fp16, bf16 (GPUs), or powersgd (low rank)."
    )
    powersgd_rank: Positive = Field(default=2, description="Rank of what powersgd sends of a matrix.")

    @model_validator(mode="after")
    def _of_powersgd(self) -> Self:
        if changed(self, "powersgd_rank") and self.compress_gradients != "powersgd":
            raise ValueError("powersgd_rank applies to compress_gradients = powersgd: leave it out")
        return self
