"""Bytes of the tensors that are alive, counted op by op: what a step keeps, without what the allocator and libraries do."""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Within it, `peak` is the most bytes that tensors made there had at a time. without: others, such as parameters.

    >>> with LiveBytes(model.parameters()) as live:
    ...     model(x, blocks).sum().backward()
    >>> live.peak
    """

    def __init__(self, without: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._known = [each.untyped_storage() for each in without]
        self._others = {each._cdata for each in self._known}
        self.peak = 0
        self._alive: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._others:
                    self._alive[storage._cdata] = weakref.ref(storage)
        self.peak = max(self.peak, self.now())
        return out

    def now(self) -> int:
        """Bytes of what is alive."""
        sizes = {key: each().nbytes() for key, each in self._alive.items() if each() is not None}
        self._alive = {key: self._alive[key] for key in sizes}
        return sum(sizes.values())
