"""Settings of `ooc train --mode full`. Imports nothing heavy; see `ooc.config.nodes`."""

from typing import Literal

from pydantic import Field

from ooc.config.base import Size
from ooc.config.nodes import NodeConfig
from stores.sizes import parse_bytes


class FullConfig(NodeConfig):
    """Settings of exact training on the whole graph; a step is an epoch.

    >>> FullConfig(store="cora.ooc", out="runs/cora", model="gcn", memory="3GB").placement
    'planned'
    """

    mode: Literal["full"] = Field("full", description="the whole graph at once, exactly, with offloading to disk.")
    placement: Literal["planned", "retained", "host", "disk", "recomputed"] = Field(
        "planned", description="Where intermediates are kept for the backward pass: planned, or one placement for all."
    )
    disk: Size | None = Field(None, description="Disk space for intermediates, such as 50GB; by default what is free.")

    @property
    def disk_bytes(self) -> int | None:
        """`disk` in bytes."""
        return None if self.disk is None else parse_bytes(self.disk)
