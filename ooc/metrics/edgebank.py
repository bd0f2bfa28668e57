"""EdgeBank, the memorization baseline: predicts that pairs that were linked before link again.

(Poursafaei et al., "Towards Better Evaluation for Dynamic Link Prediction", NeurIPS 2022.)
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ooc.graph.relabel import RelabelTable
from stores.arrays.rows import AnyArray, Ids
from stores.errors import ConfigError


class EdgeBank:
    """Remembers the pairs of all events, or those of the last `window` (in the events' time). About 25 bytes per pair.

    Raises ConfigError for more than 2**31 nodes, whose pairs do not fit one number.

    >>> bank = EdgeBank(ds.num_nodes)
    >>> bank.update(src, dst, time)
    >>> bank.score(src, negative, now)  # 1.0 for known pairs
    """

    def __init__(self, num_nodes: int, window: Any = None) -> None:
        if num_nodes > 2**31:
            raise ConfigError(f"EdgeBank supports at most {2**31} nodes, not {num_nodes}: leave it out")
        self._num_nodes, self._window = num_nodes, window
        self._pairs = RelabelTable()
        self._last = np.empty(0, np.float64)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._pairs.nbytes + self._last.nbytes

    def _pair(self, src: Ids, dst: Ids) -> Ids:
        return np.asarray(src, np.int64) * self._num_nodes + np.asarray(dst, np.int64)

    def update(self, src: Ids, dst: Ids, time: AnyArray) -> None:
        """Record events (each [k], in time order)."""
        number = self._pairs.add(self._pair(src, dst))
        if self._window is None:
            return
        if self._pairs.size > len(self._last):
            grown = np.empty(self._pairs.size * 5 // 4, np.float64)
            grown[: len(self._last)] = self._last
            self._last = grown
        self._last[number] = time  # the last event of a pair wins

    def score(self, src: Ids, dst: Ids, time: AnyArray) -> NDArray[np.float32]:
        """Return 1 for remembered pairs, else 0, float32[k]; time [k] is the current time."""
        number = self._pairs.find(self._pair(src, dst))
        known = number >= 0
        if self._window is not None:
            known[known] = np.asarray(time, np.float64)[known] - self._last[number[known]] <= self._window
        return known.astype(np.float32)
