"""Whether nodes can be scored on their full neighborhoods in the memory that there is, before the first step.

A loader of scores halves a batch that does not fit, down to one node; of a deep model one node's neighborhood can be the whole
graph. A few of them are drawn here, and nothing is read of their features.
"""

from contextlib import closing
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import nn

from ooc.layerwise.layerwise_pass import LayerwisePass
from ooc.loading.neighbor_loader import NeighborLoader
from ooc.runtime.memory_plan import words_for
from ooc.stores.arrays.rows import Ids
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError, ConfigError

CLOSE, FULL = 0.8, 0.95
"""of a batch: from where on other ways to score are better, and none fits, as other nodes' neighborhoods may be larger"""
_DRAWN = 4
"""nodes with the most in-edges, and as many with the fewest, which are far from all others"""
_LOOKED_AT = 2**18
"""nodes of a split whose in-edges are compared, evenly spread"""


def full_neighborhoods(loader: NeighborLoader) -> bool:
    """Whether a loader takes all in-edges, over all hops."""
    fanout = loader.num_neighbors
    return isinstance(fanout, list) and all(count == -1 for count in fanout)


def share_of_batch(loader: NeighborLoader, indptr: NDArray[np.int64]) -> tuple[float, BudgetError | None]:
    """Return how much of what a batch may take the full neighborhood of one node takes, and the error where it does not fit.

    Args:
        loader: Of the nodes, of a homogeneous graph.
        indptr: Of its in-edges, int64[N + 1].

    Returns:
        The largest share of those looked at, infinite where the draw itself fails.

    >>> share_of_batch(loader, ds.graph.indptr)
    (0.31, None)
    """
    sample, share = loader.strategy.apart().stages.sample, 0.0
    spread = np.linspace(0, loader.num_seeds - 1, min(_LOOKED_AT, loader.num_seeds))
    position: Ids = np.unique(spread.astype(np.int64))
    node = cast(Ids, sample.order.seeds(0, position).node)
    by_degree = np.argsort(indptr[node] - indptr[node + 1], kind="stable")
    for each in np.unique(np.concatenate([by_degree[:_DRAWN], by_degree[-_DRAWN:]])):
        try:
            drawn = sample.sample_at(position[each : each + 1], 0)
        except BudgetError as error:
            return np.inf, error
        need, most = sample.limit.need(drawn, sample.drawing_bytes(drawn.subgraph.nbytes)), sample.limit.max_bytes
        share = max(share, need / most)
        if share > (1 if len(drawn.subgraph.node) == len(indptr) - 1 else FULL):  # of all nodes none is larger
            words = words_for(round(need / FULL), most)
            return share, BudgetError(f"the neighborhood of a node may need {words}; use fewer layers or more memory")
    return share, None


def pass_fits(model: nn.Module, dataset: Dataset, folder: Path, **settings: Any) -> bool:
    """Whether a layer-wise pass computes the model in the memory; the arguments are those of `LayerwisePass`."""
    try:
        with closing(LayerwisePass(model, dataset, folder, **settings)):
            return True
    except (BudgetError, ConfigError):
        return False
