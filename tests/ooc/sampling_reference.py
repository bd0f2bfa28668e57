"""Neighbor sampling in plain Python: PyG's loop (a dict of local ids, hop by hop) over the documented random numbers."""

import math
from collections.abc import Callable, Collection, Sequence

import numpy as np

from ooc.graph.blocks import Subgraph
from ooc.runtime.keyed_random import mix
from ooc.stores.graph import Graph

GOLDEN = 0x9E3779B97F4A7C15
MASK = 2**64 - 1


class Stream:
    """Uniform numbers of one (key, node)."""

    def __init__(self, key: int, node: int) -> None:
        self.start = mix(key ^ mix(node))

    def __call__(self, counter: int) -> float:
        return (mix((self.start + counter * GOLDEN) & MASK) >> 11) * 2.0**-53


def distinct(stream: Stream, degree: int, count: int) -> list[int]:
    """`count` of range(degree): Knuth's algorithm S where there are few, else the first distinct ones of a sequence."""
    chosen: set[int] = set()
    counter = 0
    while len(chosen) < count:
        u = stream(counter)
        if degree > 4 * count:
            chosen.add(int(u * degree))
        elif u * (degree - counter) < count - len(chosen):
            chosen.add(counter)
        counter += 1
    return sorted(chosen)


def by_weight(stream: Stream, weight: list[float], count: int, replace: bool) -> list[int]:
    """Offsets drawn by weight: exponential keys, or a search in the cumulative sum."""
    if replace:
        total = np.cumsum(weight)
        if not len(weight) or total[-1] <= 0:
            return []
        return sorted(np.searchsorted(total, [stream(j) * total[-1] for j in range(count)], side="right").tolist())
    ranked = sorted((-math.log(1 - stream(i)) / w, i) for i, w in enumerate(weight) if w > 0)
    return sorted(i for _, i in ranked[:count])


def source_numbers(graph: Graph, node: int, keys: Sequence[int]) -> list[float]:
    """LABOR's number of each in-edge: its source's, and of further edges from one source their own. keys: of the quarters."""
    found, met, (first, last) = [], set(), graph.slots(node)
    for s in range(first, last):
        hashed = mix(int(graph.indices[s]))
        stream = keys[hashed % 4] ^ hashed
        if hashed in met:
            stream ^= mix(MASK - (s - first))
        met.add(hashed)
        found.append((mix(stream) >> 11) * 2.0**-53)
    return found


def by_source(
    graph: Graph, node: int, count: int, keys: Sequence[int], weight: np.ndarray | None, left: Collection[int] = ()
) -> tuple[list[int], list[float]]:
    """LABOR's slots at a node, but for the sources `left` out, and what each stands for."""
    first, last = graph.slots(node)
    kept = [s for s in range(first, last) if graph.indices[s] not in left]
    if count < 0:
        return kept, [1.0] * len(kept)
    number = source_numbers(graph, node, keys)
    if weight is None:
        kept = sorted(kept, key=lambda s: number[s - first])[:count]
        return sorted(kept), []
    ranked = sorted((-math.log(1 - number[s - first]) / weight[s], s) for s in kept if weight[s] > 0)
    chosen = sorted(s for _, s in ranked[:count])
    tau = ranked[count][0] if count < len(ranked) else math.inf
    return chosen, [-1 / math.expm1(-tau * float(weight[s])) for s in chosen]


def draw(graph: Graph, node: int, count: int, replace: bool, weight: np.ndarray | None, key: int) -> list[int]:
    """Slots drawn at a node."""
    first, last = graph.slots(node)
    degree, stream = last - first, Stream(key, node)
    if count < 0 or degree == 0:
        offsets = list(range(degree))
    elif weight is not None:
        offsets = by_weight(stream, weight[first:last].astype(float).tolist(), count, replace)
    elif replace:
        offsets = sorted(int(stream(j) * degree) for j in range(count))
    else:
        offsets = list(range(degree)) if degree <= count else distinct(stream, degree, count)
    return [first + offset for offset in offsets]


def reference(
    graph: Graph,
    fanout: Sequence[int],
    seeds: Sequence[int],
    key: int,
    replace: bool = False,
    weight: np.ndarray | None = None,
    labor: Callable[[int], Sequence[int]] | None = None,
    left: Sequence[Collection[int]] = (),
) -> Subgraph:
    """The subgraph `NeighborSampler` must give; labor: hop -> the keys of LABOR's quarters, left: what is left out at seeds."""
    node, local = list(seeds), {}
    for i, seed in enumerate(seeds):
        local.setdefault(seed, i)
    indptr, source, slot, num_nodes, num_edges = [0], [], [], [len(node)], []
    stands_for: list[float] = []
    for hop, count in enumerate(fanout):
        start, before = len(node) - num_nodes[-1], len(source)
        for i, v in enumerate(node[start:]):
            if labor is None:
                slots = draw(graph, v, count, replace, weight, key)
            else:
                slots, factors = by_source(graph, v, count, labor(hop), weight, left[i] if hop == 0 and left else ())
                stands_for += factors
            for s in slots:
                u = int(graph.indices[s])
                if u not in local:
                    local[u] = len(node)
                    node.append(u)
                source.append(local[u])
                slot.append(s)
            indptr.append(len(source))
        num_nodes.append(len(node) - start - num_nodes[-1])
        num_edges.append(len(source) - before)
    arrays = (np.array(values, np.int64) for values in (node, indptr, source, slot))
    factors = None if labor is None or weight is None else np.array(stands_for)
    return Subgraph(*arrays, tuple(num_nodes), tuple(num_edges), factors)
