"""Budget sampling of the Heterogeneous Graph Transformer (Hu et al., WWW 2020), with the semantics of PyG's HGTLoader.

It keeps the numbers of nodes of all types alike and the sampled subgraph dense. Each node type has a budget: the nodes that
point at sampled ones and are not sampled yet. A node's budget grows by 1 / in-degree for every edge to a newly sampled node.
Per iteration and type, a number of nodes is drawn without replacement in proportion to their squared budgets. A batch has all
edges between its nodes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.graph.hetero import EdgeKey, HeteroSubgraph
from ooc.runtime.keyed_random import numbered
from ooc.runtime.memory_plan import words_for
from ooc.sampling.induced import induced
from ooc.sampling.kernels import stream_of, uniform
from ooc.sampling.neighbor import checked_seeds, damaged_slot
from ooc.stores.arrays.rows import Ids
from ooc.stores.errors import BudgetError, ConfigError, InputError
from ooc.stores.graph import Graph
from ooc.stores.jit import kernel

Floats = NDArray[np.float64]
_EDGE_BYTES = 56
"""that an in-edge of a newly sampled node takes while budgets grow: its slot, source and share, and sorting them by node"""


@dataclass
class Budget:
    """The budgets of the nodes of one type."""

    node: Ids
    """int64[k], ascending"""
    value: Floats
    """float64[k], above 0"""

    def add(self, node: Ids, share: Floats, sampled: Ids) -> None:
        """Add float64[n] to the budgets of `node` (int64[n], duplicates allowed), in order, but for those in `sampled`."""
        merged, at = np.unique(np.concatenate([self.node, node]), return_inverse=True)
        value: Floats = np.bincount(at, np.concatenate([self.value, share]), minlength=len(merged)).astype(np.float64)
        kept = ~np.isin(merged, sampled)
        self.node, self.value = merged[kept], value[kept]

    def draw(self, count: int, key: int) -> Ids:
        """Take out `count` nodes, or all if there are fewer: int64[k], in the order they are drawn."""
        rank = ranks(np.uint64(key & (2**64 - 1)), self.node, self.value)
        order = np.lexsort((self.node, rank))[:count]
        drawn = self.node[order]
        rest = np.ones(len(self.node), bool)
        rest[order] = False
        self.node, self.value = self.node[rest], self.value[rest]
        return drawn


class HGTSampler:
    """Samples a number of nodes of each type per iteration, by budgets, and all edges between them. Stateless.

    The draw at a node depends on (key, iteration, number of its type, node, budget).

    Args:
        graphs: The topology of each edge type.
        num_nodes: Nodes of each node type; batches have the types in this order.
        num_samples: Nodes to sample per iteration, for all node types or for each.
        max_bytes: Limit of a batch's arrays and features; None: no limit.
        row_bytes: Bytes of a node's features and labels, by node type.

    Raises:
        ConfigError: The numbers are invalid, or a node type is unknown or missing.

    >>> sampler = HGTSampler(graphs, {"author": 400, "paper": 900}, {"author": [64, 64], "paper": [128, 128]})
    >>> sampler.sample({"paper": np.array([4, 7])}, key).num_nodes["author"]
    (0, 64, 64)
    """

    def __init__(
        self,
        graphs: Mapping[EdgeKey, Graph],
        num_nodes: Mapping[str, int],
        num_samples: Sequence[int] | Mapping[str, Sequence[int]],
        max_bytes: int | None = None,
        row_bytes: Mapping[str, int] | None = None,
    ) -> None:
        self.graphs, self.num_nodes = dict(graphs), dict(num_nodes)
        self.num_samples = samples_of(num_samples, list(num_nodes))
        self.hops = len(next(iter(self.num_samples.values()), []))
        self.max_bytes, self.row_bytes = max_bytes, dict(row_bytes or {})

    def sample(self, seeds: Mapping[str, Ids], key: int) -> HeteroSubgraph:
        """Sample around `seeds`.

        Args:
            seeds: int64[b] by node type, distinct; types without seeds may be left out.
            key: Of the draws; see `ooc.runtime.keyed_random`.

        Returns:
            The subgraph: nodes in the order they were sampled, seeds first, and all edges between them.

        Raises:
            InputError: A seed is not a node or stands there twice, or its type is unknown.
            BudgetError: The batch may exceed `max_bytes`.
            StoreError: The topology is damaged.
        """
        hops = {name: [each] for name, each in self._checked(seeds).items()}
        budgets = {name: Budget(np.empty(0, np.int64), np.empty(0)) for name in self.num_nodes}
        for hop in range(self.hops):
            self._grow(budgets, hops)
            for number, (name, budget) in enumerate(budgets.items()):
                own = numbered(key, 1 + hop * len(budgets) + number)
                hops[name].append(budget.draw(self.num_samples[name][hop], own))
        node = {name: np.concatenate(each) for name, each in hops.items()}
        self._check(sum(8 * len(each) + self.row_bytes.get(name, 0) * len(each) for name, each in node.items()))
        counts = {name: tuple(len(each) for each in own) for name, own in hops.items()}
        return induced(self.graphs, HeteroSubgraph(node, {}, counts, {}), self.max_bytes)

    def _grow(self, budgets: Mapping[str, Budget], hops: Mapping[str, list[Ids]]) -> None:
        """Add the in-neighbors of the nodes sampled last to the budgets."""
        found: dict[str, list[tuple[Ids, Floats]]] = {name: [] for name in budgets}
        total = 0
        for (source, _, target), graph in self.graphs.items():
            new, indptr = hops[target][-1], np.asarray(graph.indptr)
            first, degree = indptr[new], indptr[new + 1] - indptr[new]
            total += int(degree.sum())
            self._check(_EDGE_BYTES * total)
            begin = np.cumsum(degree) - degree
            slot = np.arange(int(degree.sum())) + np.repeat(first - begin, degree)
            node = np.asarray(graph.indices)[slot].astype(np.int64)
            wrong = (node < 0) | (node >= self.num_nodes[source])
            if wrong.any():
                raise damaged_slot(int(slot[wrong][0]))
            found[source].append((node, np.repeat(1.0 / np.maximum(degree, 1), degree)))
        for name, parts in found.items():
            if parts:
                node, share = (np.concatenate(each) for each in zip(*parts, strict=True))
                budgets[name].add(node, share, np.concatenate(hops[name]))

    def _checked(self, seeds: Mapping[str, Ids]) -> dict[str, Ids]:
        unknown = [name for name in seeds if name not in self.num_nodes]
        if unknown:
            raise InputError(f"there are no {unknown[0]!r} nodes: the graph has {', '.join(self.num_nodes)}")
        none = np.empty(0, np.int64)
        checked = {name: checked_seeds(seeds.get(name, none), count, name) for name, count in self.num_nodes.items()}
        for name, own in checked.items():
            if len(np.unique(own)) < len(own):
                raise InputError(f"seeds of HGT's sampler must be distinct, but a {name!r} node is given twice")
        return checked

    def _check(self, need: int) -> None:
        if self.max_bytes is not None and need > self.max_bytes:
            raise BudgetError(
                f"a batch of HGT's sampler needs {words_for(need, self.max_bytes)}; "
                "take a smaller batch size, fewer samples or more memory"
            )


def samples_of(num_samples: Sequence[int] | Mapping[str, Sequence[int]], node_types: Sequence[str]) -> dict[str, list[int]]:
    """Nodes to sample per iteration of every node type. Raises ConfigError where they do not fit."""
    there = ", ".join(node_types)
    given = dict(num_samples) if isinstance(num_samples, Mapping) else dict.fromkeys(node_types, num_samples)
    unknown, missing = [name for name in given if name not in node_types], [name for name in node_types if name not in given]
    if unknown:
        raise ConfigError(f"num_samples are given for the node type {unknown[0]!r}, which the graph has not: it has {there}")
    if missing:
        raise ConfigError(f"no num_samples are given for the node type {missing[0]!r}: give some for each of {there}, or zeros")
    for name, own in given.items():
        if isinstance(own, str) or not isinstance(own, Sequence) or not own or not all(map(_is_count, own)):
            raise ConfigError(
                f"num_samples of {name!r} must be numbers of nodes per iteration, such as [512, 512], not {own!r}"
            )
    if len({len(own) for own in given.values()}) > 1:
        raise ConfigError(f"num_samples must have as many iterations for all node types, not {given}")
    return {name: [int(k) for k in given[name]] for name in node_types}


def _is_count(given: Any) -> bool:
    """Whether it is a whole number of 0 or more, of whatever type."""
    return isinstance(given, Real) and float(given) >= 0 and float(given).is_integer()


@kernel
def ranks(key: np.uint64, node: Ids, budget: Floats) -> Floats:
    """Exponential keys of nodes: the smallest are a sample without replacement in proportion to squared budgets (Efraimidis and
    Spirakis, 2006). node: int64[n], budget: float64[n]; returns float64[n]."""
    rank = np.empty(len(node))
    for i in range(len(node)):
        rank[i] = -np.log(1.0 - uniform(stream_of(key, node[i]), 0)) / (budget[i] * budget[i])
    return rank
