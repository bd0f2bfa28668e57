"""An exact pass over all nodes by whichever way the model allows: layer by layer, or on batches of full neighborhoods."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from torch import nn

from ooc.layerwise.full_neighbor_pass import FullNeighborPass
from ooc.layerwise.io_stats import IoStats
from ooc.layerwise.layerwise_pass import LayerwisePass, Progress
from ooc.layerwise.shape import has_layers, layer_ends, own_way
from ooc.runtime.memory_plan import MemoryPlan
from ooc.runtime.ranks import ALONE, Ranks
from ooc.stores.arrays.rows import Rows
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError


class ExactPass(Protocol):
    """What `LayerwisePass` and `FullNeighborPass` have in common."""

    stats: IoStats

    @property
    def columns(self) -> int:
        """Numbers per row."""

    @property
    def method(self) -> str:
        """How rows are computed, for people; "" layer by layer."""

    def lock(self) -> None: ...
    def was_begun(self) -> bool: ...
    def run(self, progress: Progress = ...) -> Rows: ...
    def close(self) -> None: ...
    def discard(self) -> None: ...


def exact_pass(
    model: nn.Module,
    dataset: Dataset,
    folder: Path,
    *,
    layer: int | Literal["hidden"] | None = None,
    num_layers: int | None = None,
    node_type: str | None = None,
    tables: Mapping[str, Rows] | None = None,
    engine: str = "auto",
    memory: int | None = None,
    budget: MemoryPlan | None = None,
    ranks: Ranks = ALONE,
) -> ExactPass:
    """Return the pass for a model.

    Args:
        model, dataset, folder, engine, memory, budget, ranks: As of `LayerwisePass`.
        layer: Number of the layer whose rows are computed, from 1; "hidden" for the last but one; None for the model's outputs.
        num_layers, node_type, tables: As of `FullNeighborPass`, which computes all models of heterogeneous graphs.

    Raises:
        ConfigError: If the model has no such layer.

    >>> exact_pass(model, ds, Path("pass")).run()
    """
    number = ranks.together(lambda: _number_of(model, layer))
    common: dict[str, Any] = {"engine": engine, "budget": budget, "ranks": ranks}
    if dataset.is_hetero:
        types: dict[str, Any] = {"num_layers": num_layers, "node_type": node_type, "tables": tables}
        return ranks.together(lambda: FullNeighborPass(model, dataset, folder, layer=number, **types, **common))
    if not has_layers(model):
        return ranks.together(lambda: FullNeighborPass(model, dataset, folder, num_layers=num_layers, **common))
    return LayerwisePass(model, dataset, folder, upto=number, memory=memory, **common)


def _number_of(model: nn.Module, layer: int | Literal["hidden"] | None) -> int | None:
    """The layer's number; None for the model's outputs, which are all that there is of one with its own forward."""
    if not has_layers(model):
        if layer not in (None, "hidden"):
            raise ConfigError(
                f"`layer={layer!r}`: {type(model).__name__} {own_way(model)}, and only its result can be computed for all "
                "nodes: leave the layer out"
            )
        return None
    if layer is None:
        return None
    ends = layer_ends(model)
    layers = len(ends)
    number = max(1, layers - 1) if layer == "hidden" else layer
    if not isinstance(number, int | np.integer) or not 1 <= number <= layers:
        raise ConfigError(f"`layer={layer!r}`: the model has layers 1 to {layers}; without it, the last but one is taken")
    return ends[int(number) - 1]
