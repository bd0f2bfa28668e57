"""The configuration of `ooc train --mode full`. Nothing heavy is imported here; see `ooc.config.nodes`."""

from typing import Literal

from pydantic import Field, field_validator

from ooc.config.nodes import NodeConfig
from stores.sizes import parse_bytes


class FullConfig(NodeConfig):
    """Everything that exact training on the whole graph depends on; a step is an epoch.

    >>> FullConfig(store="cora.ooc", out="runs/cora", model="gcn", memory="3GB").placement
    'planned'
    """

    mode: Literal["full"] = Field("full", description="the whole graph at once, exactly; what does not fit goes to disk.")
    placement: Literal["planned", "retained", "host", "disk", "recomputed"] = Field(
        "planned", description="Where every intermediate waits for the way back: planned, or all of them alike."
    )
    disk: str | None = Field(
        None, description="Disk space that values of a step may take, such as 50GB; by default what is free."
    )

    @field_validator("disk", mode="before")
    @classmethod
    def _disk_size(cls, value: object) -> object:
        if value is not None:
            parse_bytes(value if isinstance(value, int) else str(value))
            return str(value)
        return value

    @property
    def disk_bytes(self) -> int | None:
        """`disk` in bytes."""
        return None if self.disk is None else parse_bytes(self.disk)
