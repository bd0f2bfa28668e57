"""How many edges of the whole graph each edge of a weighted sample stands for, so that sums over samples are unbiased."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.batch import Subgraph
from ooc.sampling.kernels import stream_of, uniform
from stores.jit import kernel

Ids = NDArray[np.int64]


@kernel
def _with_replacement(weight: NDArray[Any], first: int, last: int, drawn: Ids, out: NDArray[np.float32]) -> None:
    """A slot is expected len(drawn) * w / W times in the sample (Hansen and Hurwitz, 1943)."""
    total = 0.0
    for s in range(first, last):
        total += np.float64(weight[s])
    for j in range(len(drawn)):
        out[j] = total / (len(drawn) * np.float64(weight[drawn[j]]))


@kernel
def _without_replacement(
    weight: NDArray[Any], stream: np.uint64, first: int, last: int, drawn: Ids, out: NDArray[np.float32]
) -> None:
    """Given the least key t that lost, a slot won with probability 1 - exp(-w t): bottom-k (Cohen and Kaplan, 2007)."""
    threshold, j = np.inf, 0
    for s in range(first, last):
        if j < len(drawn) and drawn[j] == s:  # both ascend
            j += 1
        elif weight[s] > 0:
            threshold = min(threshold, -np.log(1.0 - uniform(stream, s - first)) / np.float64(weight[s]))
    for j in range(len(drawn)):
        out[j] = -1.0 / np.expm1(-threshold * np.float64(weight[drawn[j]]))


@kernel
def _expand(
    indptr: Ids, weight: NDArray[Any], node: Ids, drawn: Ids, bounds: Ids, begin: int, end: int, replace: bool,
    key: np.uint64, out: NDArray[np.float32],
) -> None:  # fmt: skip
    for i in range(begin, end):
        low, high = bounds[i], bounds[i + 1]
        first, last = indptr[node[i]], indptr[node[i] + 1]
        if replace:
            _with_replacement(weight, first, last, drawn[low:high], out[low:high])
        elif high - low < last - first:
            _without_replacement(weight, stream_of(key, node[i]), first, last, drawn[low:high], out[low:high])


def stands_for(
    indptr: Ids, weight: NDArray[Any], subgraph: Subgraph, fanout: tuple[int, ...], replace: bool, key: int
) -> NDArray[np.float32]:
    """float32[e]: for each edge that `NeighborSampler(graph, fanout, replace, weight)` drew with `key`, 1 / (how often it
    was expected in the sample); ones where a whole neighborhood was taken.

    indptr: int64[N+1]; weight: float[E] by slot. The mean over keys of sum(stands_for * f) is the whole neighborhood's
    sum of f over edges of positive weight.

    >>> stands_for(graph.indptr, weight, sampler.sample(seeds, key), (10, 10), False, key)
    """
    out = np.ones(len(subgraph.slot), np.float32)
    begin = 0
    for hop, k in enumerate(fanout):
        end = begin + subgraph.num_nodes[hop]
        if k >= 0:
            arrays = (np.asarray(indptr), np.asarray(weight), subgraph.node, subgraph.slot, subgraph.indptr)
            _expand(*arrays, begin, end, replace, np.uint64(key & (2**64 - 1)), out)
        begin = end
    return out
