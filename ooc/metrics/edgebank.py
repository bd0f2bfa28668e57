"""EdgeBank: a pair that was linked before will be linked again. What a model must beat to have learned anything.

(Poursafaei et al., "Towards Better Evaluation for Dynamic Link Prediction", NeurIPS 2022.)
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.graph.relabel import RelabelTable
from stores.errors import ConfigError

Ids = NDArray[np.int64]


class EdgeBank:
    """Remembers every pair of an event. window: for so long after it, in the events' time; None: for ever.

    Memory: some 25 bytes a pair. Raises ConfigError for more nodes than a pair of them can be one number.

    >>> bank = EdgeBank(ds.num_nodes)
    >>> bank.update(src, dst, time)
    >>> bank.score(src, negative, now)  # 1.0 for a pair that it knows
    """

    def __init__(self, num_nodes: int, window: Any = None) -> None:
        if num_nodes > 2**31:
            raise ConfigError(f"EdgeBank numbers pairs of at most {2**31} nodes, not of {num_nodes}: leave it out")
        self._num_nodes, self._window = num_nodes, window
        self._pairs = RelabelTable()
        self._last = np.empty(0, np.float64)

    @property
    def nbytes(self) -> int:
        """Bytes of memory it holds."""
        return self._pairs.nbytes + self._last.nbytes

    def _pair(self, src: Ids, dst: Ids) -> Ids:
        return np.asarray(src, np.int64) * self._num_nodes + np.asarray(dst, np.int64)

    def update(self, src: Ids, dst: Ids, time: NDArray[Any]) -> None:
        """Remember events (each [k], in time order)."""
        number = self._pairs.add(self._pair(src, dst))
        if self._window is None:
            return
        if self._pairs.size > len(self._last):
            grown = np.empty(self._pairs.size * 5 // 4, np.float64)
            grown[: len(self._last)] = self._last
            self._last = grown
        self._last[number] = time  # of a pair that comes twice the later one stays

    def score(self, src: Ids, dst: Ids, time: NDArray[Any]) -> NDArray[np.float32]:
        """float32[k]: 1 for each pair that is remembered, else 0; time: [k], now."""
        number = self._pairs.find(self._pair(src, dst))
        known = number >= 0
        if self._window is not None:
            known[known] = np.asarray(time, np.float64)[known] - self._last[number[known]] <= self._window
        return known.astype(np.float32)
