"""GCN's symmetric normalisation by the whole graph: the one rule for degrees that have no inverse root.

A node's factor is 1 / sqrt(degree), its degree the sum of its in-weights with a self-loop. Where the degree is zero, negative,
infinite or not a number, the factor is 0: the node neither gives nor takes anything. (PyG says so for zero and gives NaN for
the others.) A weight that is infinite or not a number makes its destination's degree so; such an edge counts for 0 too.
"""

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from stores.graph import Graph


def gcn_factors(graph: Graph, ids: NDArray[np.int64], dtype: DTypeLike = np.float32) -> NDArray[Any]:
    """The factors of some nodes in the whole graph.

    Args:
        graph: where degrees and weights come from.
        ids: int64[n], the nodes.
        dtype: of the factors, float32 or float64.

    Returns:
        [n] of `dtype`.
    """
    dtype = np.dtype(dtype)
    loop: Any = graph.last_loop_weight(ids)
    loop = dtype.type(1) if loop is None else loop
    if graph.weight_sum is not None:
        degree = np.asarray(graph.weight_sum[ids], dtype) + loop
    else:
        degree = (graph.degree(ids) - (graph.loops(ids) if len(graph.self_loops) else 0)).astype(dtype) + loop
    with np.errstate(divide="ignore", invalid="ignore"):
        return finite_or_zero((1 / np.sqrt(degree)).astype(dtype))


def finite_or_zero(values: NDArray[Any]) -> NDArray[Any]:
    """In place: 0 for what is infinite or not a number."""
    values[~np.isfinite(values)] = 0
    return values


def gcn_factors_of(degree: Tensor) -> Tensor:
    """The same of degrees in memory, self-loops counted in: [n] of a floating dtype."""
    inverse = degree.rsqrt()
    return inverse.masked_fill(~inverse.isfinite(), 0.0)
