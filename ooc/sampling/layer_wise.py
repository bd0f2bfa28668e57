"""Layer-wise importance sampling: all nodes that a hop expands share one budget of sources.

Every source of a hop has an importance: by LADIES (Zou et al., 2019, "Layer-Dependent Importance Sampling") the squared norm
of its column of the row-normalized adjacency, cut to the nodes that the hop expands; by FastGCN (Chen et al., 2018) that of its
column of the whole matrix, whatever the batch; or its out-degree. The `budget` sources with the smallest ratios of their random
numbers to their importance are drawn, and with them all of their edges to the nodes that the hop expands. Both papers draw with
replacement, FastGCN from all nodes of the graph; here no source is drawn twice, and none that is no neighbor.

Given the numbers of the others a source is drawn with probability min(1, tau * importance), tau being the smallest ratio that
was not drawn, and each of its edges stands for the inverse of it (priority sampling: Duffield et al., 2007). So the sum over a
destination's drawn in-edges, times what they stand for, is an unbiased estimate of the sum over all of them, and divided by the
number of its in-edges of their mean. `normalize` scales the weights of a destination to add up to that number, as LADIES does:
the estimate is a ratio of two then, which is biased and varies less.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ooc.runtime.keyed_random import mix64
from ooc.runtime.memory_plan import SCANNED_BYTES
from ooc.sampling.importance import Floats
from ooc.sampling.kernels import Factors, Ranks, keep_smallest, push, uniform
from ooc.sampling.learned import NODE_BYTES, Policy
from ooc.stores.arrays.rows import AnyArray, Ids
from ooc.stores.errors import ConfigError
from ooc.stores.io.segments import forget
from ooc.stores.jit import kernel

LayerImportance = Literal["ladies", "fastgcn", "degree"]
LAYER_WISE = get_args(LayerImportance)
"""the names of what sources are drawn by, and of the samplers"""
BYTES_A_DRAWN = 16
"""of a source that is drawn: its ratio, and which it is"""


@dataclass(frozen=True, eq=False)
class NodeImportance:
    """An importance that does not depend on the batch. name: as `--sampler` has it; values: float32[N], above 0, which change
    between epochs at most."""

    name: str
    values: NDArray[np.float32]


@dataclass(frozen=True)
class LayerWise:
    """Layer-wise importance sampling: a budget of nodes for each layer, which all nodes of the layer above share.

    The value of `sampler` in `NeighborLoader` and `LinkNeighborLoader`, whose `num_neighbors` are then the nodes drawn in each
    hop, -1 for all; the texts "ladies", "fastgcn" and "degree" stand for `LayerWise("ladies")` and so on. A node is expanded
    once, in the hop after it is first reached, and has the same edges in all layers.

    Args:
        importance: What sources are drawn in proportion to: "ladies", the sum over a source's edges to the nodes that the hop
            expands of 1 / in-degree squared (LADIES, Zou et al., 2019); "fastgcn", the same over all of its edges (FastGCN,
            Chen et al., 2018); "degree", the number of its edges. Runs have others: `--sampler gradient` and `learned`.
        normalize: Whether the weights of a node's drawn in-edges are scaled to add up to all of its in-edges, as LADIES does.
            Estimates vary less, and are biased. Without it sums over in-edges, and means over them, are unbiased: the edges
            that were drawn stand for the inverse of the probability of that.

    Raises:
        ConfigError: An argument does not fit.

    >>> ladies = ooc.LayerWise("ladies", normalize=False)
    >>> loader = ooc.NeighborLoader(ds, [512, 512], "train", batch_size=512, shuffle=True, sampler=ladies)
    >>> next(iter(loader)).num_sampled_nodes  # seeds, and at most 512 new nodes a hop
    """

    importance: LayerImportance | NodeImportance | Policy = "ladies"
    normalize: bool = True

    batch_dependency: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if not isinstance(self.importance, NodeImportance | Policy) and self.importance not in LAYER_WISE:
            raise ConfigError(f"importance must be one of {', '.join(LAYER_WISE)}, not {self.importance!r}")
        if not isinstance(self.normalize, bool | np.bool_):
            raise ConfigError(f"normalize must be True or False, not {self.normalize!r}")

    @property
    def name(self) -> str:
        """As `--sampler` has it."""
        return self.importance if isinstance(self.importance, str) else self.importance.name

    @property
    def node_bytes(self) -> int:
        """Bytes in memory for each node of the graph."""
        if isinstance(self.importance, Policy):
            return NODE_BYTES
        return 0 if self.importance == "ladies" else 4

    @property
    def identity(self) -> dict[str, Any]:
        """All of it that batches depend on, for the state of a loader."""
        return {"normalize": bool(self.normalize)}


def importance_of_nodes(kind: LayerImportance, indptr: Ids, indices: AnyArray, num_sources: int) -> NDArray[np.float32]:
    """The importance of all nodes where it does not depend on the batch, float32[num_sources]: one pass over the edges, a piece
    at a time. Raises IndexError with the slot that has no valid source."""
    found, at, most = np.zeros(num_sources, np.float32), 0, max(1, SCANNED_BYTES // indices.itemsize)
    while at < len(indptr) - 1:
        stop = max(at + 1, int(np.searchsorted(indptr, indptr[at] + most, side="right")) - 1)
        bad = int(add_importance(indptr, indices, at, min(stop, len(indptr) - 1), kind == "degree", found))
        if bad >= 0:
            raise IndexError(bad)
        forget(indices)
        at = stop
    return found


@kernel
def add_importance(indptr: Ids, indices: AnyArray, start: int, stop: int, by_degree: bool, found: NDArray[np.float32]) -> int:
    """Add what the in-edges of nodes start:stop add to the importance of their sources; returns -1, or a damaged slot."""
    for v in range(start, stop):
        first, last = indptr[v], indptr[v + 1]
        if first < 0 or last > indices.shape[0]:
            return indices.shape[0]
        own = np.float32(1.0)
        if not by_degree and last > first:
            own = np.float32(1.0 / (last - first) ** 2)
        for s in range(first, last):
            u = int(indices[s])
            if u < 0 or u >= len(found):
                return s
            found[u] += own
    return -1


@kernel
def ladies_importance(indptr: Ids, source: Ids, found: Floats) -> None:
    """Fill LADIES's importance of the sources of these in-edges (`InEdges`), float64[u]."""
    found[:] = 0
    for i in range(len(indptr) - 1):
        degree = indptr[i + 1] - indptr[i]
        for e in range(indptr[i], indptr[i + 1]):
            found[source[e]] += 1.0 / (np.float64(degree) * np.float64(degree))


@kernel
def draw_sources(
    node: Ids, importance: Floats, stream: np.uint64, budget: int, rank: Ranks, drawn: Ids, factor: Floats
) -> tuple[float, float]:
    """Draw up to `budget` of the sources `node` (int64[u]); returns the largest ratio that was drawn, and tau.

    Fills `factor` (float64[u]): what the edges of a source stand for, 0 where it is not drawn. rank, drawn: scratch, [budget].
    """
    size, tau = 0, np.inf
    factor[:] = 0
    for u in range(len(node)):
        value = uniform(stream ^ mix64(np.uint64(node[u])), 0) / importance[u]
        if size < budget:
            push(rank, drawn, 0, size, value, u)
            size += 1
        elif value < rank[0]:
            tau = rank[0]
            keep_smallest(rank, drawn, 0, size, value, u)
        else:
            tau = min(tau, value)
    for j in range(size):
        factor[drawn[j]] = 1.0 / min(1.0, tau * importance[drawn[j]])
    return rank[0], tau


@kernel
def keep_drawn(
    indptr: Ids, slot: Ids, source: Ids, factor: Floats, normalize: bool, out_slot: Ids, out_indptr: Ids, stands_for: Factors
) -> None:
    """Of the in-edges of a hop (`InEdges`) keep those whose source was drawn, and fill what each stands for."""
    at = out_indptr[0]
    for i in range(len(indptr) - 1):
        begin, total = at, 0.0
        for e in range(indptr[i], indptr[i + 1]):
            own = factor[source[e]]
            if own > 0:
                out_slot[at], stands_for[at] = slot[e], own
                total += own
                at += 1
        if normalize:
            for j in range(begin, at):
                stands_for[j] = np.float32(stands_for[j] * ((indptr[i + 1] - indptr[i]) / total))
        out_indptr[i + 1] = at
