"""What layers that run on one block make of its edges, made once for all of them.

The gradient of a sum over in-edges is a sum over out-edges, for which edges are sorted by source. The same layer after layer,
that order is kept where many layers share a block: 12 bytes an edge for the sums, and 12 for what the order is made of, no more
than each layer takes for itself while it makes them.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ooc.graph.blocks import sorted_by_source


class SharedEdges:
    """Of one block, for as long as its layers run: edges by source, and the values of edges.

    >>> block = block._replace(shared=SharedEdges())
    """

    def __init__(self) -> None:
        self._made: dict[Any, Any] = {}
        self._ordered: tuple[Tensor, Tensor] | None = None

    def once(self, name: Any, make: Callable[[], Any]) -> Any:
        """What `make` returns, called for the first one who asks for that name."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def ordered(self, value: Tensor, order: Tensor) -> Tensor:
        """value[order]; kept of the [e] asked for last, but not of attention's [e, heads], which differ in each layer."""
        if value.dim() > 1:
            return value[order]
        if self._ordered is None or self._ordered[0] is not value:
            self._ordered = value, value[order]
        return self._ordered[1]


def edges_by_source(
    edge_index: Tensor, num_src: int, value: Tensor | None, shared: SharedEdges | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(pointers int64[num_src + 1], target int64[e], value) of the edges by source, stably sorted.

    `edge_index` is int64[2, e], `value` [e], [e, heads] or None. shared: of the block, where it has one.
    """
    if shared is None:
        order, indptr, target = _sorted(edge_index, num_src)
        return indptr, target, None if value is None else value[order]
    order, indptr, target = shared.once("by source", lambda: _sorted(edge_index, num_src))
    return indptr, target, None if value is None else shared.ordered(value, order)


def _sorted(edge_index: Tensor, num_src: int) -> tuple[Tensor, Tensor, Tensor]:
    order, indptr = sorted_by_source(edge_index[0], num_src)
    return order, indptr, edge_index[1][order]
