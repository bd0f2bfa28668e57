"""Link prediction scores as in the Temporal Graph Benchmark, each true destination against its negatives, and EdgeBank.

AP and ROC AUC compare single pairs and need one negative per event; MRR and Hits@k use the rank of the true destination among
any number of its own negatives. Ties count half, so constant scores gain nothing. (Huang et al., "Temporal Graph Benchmark for
Machine Learning on Temporal Graphs", NeurIPS 2023.)
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ooc.graph.relabel import RelabelTable
from ooc.runtime.messages import Pace
from ooc.runtime.ranks import Ranks
from ooc.stores.arrays.rows import AnyArray
from ooc.stores.errors import ConfigError, OocError
from ooc.stores.events import Events
from ooc.stores.io.segments import forget

HITS = (1, 3, 10)
"""values of k for Hits@k"""
PAIR_BYTES = 2**24
"""memory for the scores of pairs; more are spilled to a file"""
_EVENT_BYTES, _SORTED_BYTES = 8, 40
"""for an event's two buffered scores, and for a score being compared"""
_END = 2**32
_BLOCK = 2**16
"""events read at a time"""
Keys = NDArray[np.uint32]


class LinkScores:
    """Collects scores batch by batch: logits or probabilities, but not both. Scores are compared as float32.

    AP and ROC AUC are exact and need `max_bytes`: 8 bytes per event are buffered, and beyond half of it spilled as sorted runs
    to an unnamed file in `folder`. Ranks need no memory.
    """

    def __init__(self, max_bytes: int = PAIR_BYTES, folder: Path | None = None) -> None:
        self._pairs = Pairs(max_bytes, folder)
        self._events = 0
        self._of_pairs: tuple[float, float] | None = None
        self._inverse = torch.zeros((), dtype=torch.float64)
        self._within = torch.zeros(len(HITS), dtype=torch.float64)

    def update(self, positive: Tensor, negative: Tensor) -> None:
        """Add a batch: positive [k], scores of the true destinations; negative [k] or [k, r], of their negatives.

        Raises OocError for a NaN score.
        """
        positive = positive.detach().cpu().float()
        negative = negative.detach().cpu().float().reshape(len(positive), -1)
        if positive.isnan().any() or negative.isnan().any():
            raise OocError("the model scored a link with NaN: lower `lr`, or set `grad_clip`")
        above, equal = (negative > positive[:, None]).sum(1), (negative == positive[:, None]).sum(1)
        self.add_ranks(1 + above.double() + equal.double() / 2)
        if negative.size(1) == 1:
            self._pairs.add(positive.numpy(), negative[:, 0].numpy())

    def add_ranks(self, rank: Tensor) -> None:
        """Add events by the ranks of their true destinations, from 1 on, float64[k]."""
        self._events += len(rank)
        self._inverse += (1 / rank).sum()
        self._within += torch.stack([(rank <= k).sum() for k in HITS])

    def merge(self, ranks: Ranks) -> None:
        """Add what the other ranks have collected; the pairs go to rank 0, which computes what depends on them for all."""
        if ranks.alone:
            return
        self._events = sum(ranks.gather(self._events))
        ranks.sum(self._inverse)
        ranks.sum(self._within)
        self._pairs.merge(ranks)
        self._of_pairs = ranks.decided(lambda: self._pairs.compute() if self._pairs.count else None)

    def compute(self) -> dict[str, float]:
        """Return mrr, hits@k and, with one negative per event, ap and auroc; empty without events."""
        if not self._events:
            return {}
        if self._of_pairs is None and self._pairs.count:
            self._of_pairs = self._pairs.compute()
        scores = {} if self._of_pairs is None else dict(zip(("ap", "auroc"), self._of_pairs, strict=True))
        scores["mrr"] = float(self._inverse / self._events)
        within = (self._within / self._events).tolist()
        return scores | {f"hits@{k}": share for k, share in zip(HITS, within, strict=True)}


class Pairs:
    """Exact AP and ROC AUC of equally many true and false links, in bounded memory.

    Scores are stored as integers of the same order. Their sorted runs are merged from the highest score on, as many at a time
    as fit the memory; of a score with more occurrences than fit, counts suffice.
    """

    def __init__(self, max_bytes: int, folder: Path | None) -> None:
        self._capacity = max(1, max_bytes // 2 // _EVENT_BYTES)
        self._at_once = max(1, max_bytes // 2 // _SORTED_BYTES)
        self._folder = folder
        self._buffer: Keys = np.empty((2, 0), np.uint32)
        self._filled = self._spilled = 0
        self._file: Any = None

    @property
    def count(self) -> int:
        return self._spilled * self._capacity + self._filled

    def add(self, true: NDArray[np.float32], false: NDArray[np.float32]) -> None:
        """Add scores, float32[k] each, without NaN."""
        for start in range(0, len(true), self._capacity):
            part = slice(start, start + self._capacity)
            self._add(np.stack([_ordered(true[part]), _ordered(false[part])]))

    def _add(self, given: Keys) -> None:
        if not self._buffer.size:
            self._buffer = np.empty((2, self._capacity), np.uint32)  # pages are allocated when written
        start = 0
        while start < given.shape[1]:
            keys = given[:, start : start + self._capacity - self._filled]
            start, end = start + keys.shape[1], self._filled + keys.shape[1]
            self._buffer[:, self._filled : end] = keys
            self._filled = end
            if self._filled == self._capacity:
                self._spill()

    def merge(self, ranks: Ranks) -> None:
        """Give rank 0 the scores of all ranks, a run of each at a time."""
        for number in range(max(ranks.gather(self._spilled + 1))):
            there = self._run(number) if number <= self._spilled else self._buffer[:, :0]
            for rank, keys in enumerate(ranks.gather(there)):
                if ranks.first and rank:
                    self._add(keys)

    def _run(self, number: int) -> Keys:
        """The keys of a spilled run, or of the buffer behind the last one."""
        if number == self._spilled:
            return self._buffer[:, : self._filled].copy()
        return np.array(np.memmap(self._file, np.uint32, "r", number * 8 * self._capacity, (2, self._capacity)))

    def _spill(self) -> None:
        """Write the buffered keys to the file as a sorted run."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - gone with its last reference
        self._buffer.sort(axis=1)
        self._file.write(self._buffer)
        self._file.flush()
        self._spilled, self._filled = self._spilled + 1, 0

    def compute(self) -> tuple[float, float]:
        """Return (AP, ROC AUC). AP averages the precision at each true score, with tied scores counted together."""
        shape, count = (2, self._capacity), self.count
        runs: list[Keys] = [
            np.memmap(self._file, np.uint32, "r", number * 8 * self._capacity, shape) for number in range(self._spilled)
        ]
        runs.append(self._buffer[:, : self._filled])
        runs[-1].sort(axis=1)
        ap = auc = 0.0
        true, false, stop = 0, 0, _END
        while true < count:
            first = _cut(runs, stop, self._at_once)
            if stop - first == 1:
                counts, equal = (np.array([_between(runs, kind, first, stop)]) for kind in (0, 1))
                visited = int(equal[0])
                higher = np.zeros(1, np.int64)
            else:
                own, others = (_sorted(runs, kind, first, stop) for kind in (0, 1))
                value, counts = (each[::-1] for each in np.unique(own, return_counts=True))
                visited, not_higher = len(others), np.searchsorted(others, value, "right")
                higher, equal = visited - not_higher, not_higher - np.searchsorted(others, value)
            hits, missed = true + np.cumsum(counts), false + higher + equal
            ap += float((counts * (hits / (hits + missed))).sum())
            auc += float((counts * (count - missed + equal / 2)).sum())
            true, false, stop = true + int(counts.sum()), false + visited, first
        return ap / count, auc / count**2


def _ordered(scores: NDArray[np.float32]) -> Keys:
    """Map scores to uint32[k] of the same order; 0 and -0 are equal."""
    bits = (scores + np.float32(0)).view(np.uint32)
    keys: Keys = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    return keys


def _place(run: Keys, kind: int, key: int) -> int:
    """How many keys of one kind in a run are below `key`."""
    return run.shape[1] if key >= _END else int(np.searchsorted(run[kind], np.uint32(key)))


def _between(runs: list[Keys], kind: int, first: int, stop: int) -> int:
    """How many keys of one kind are in first..stop-1."""
    return sum(_place(run, kind, stop) - _place(run, kind, first) for run in runs)


def _cut(runs: list[Keys], stop: int, most: int) -> int:
    """Smallest key with at most `most` keys from it up to `stop`; stop - 1 if that key alone has more."""
    low, high = 0, stop - 1
    while low < high:
        middle = (low + high) // 2
        if sum(_between(runs, kind, middle, stop) for kind in (0, 1)) <= most:
            high = middle
        else:
            low = middle + 1
    return low


def _sorted(runs: list[Keys], kind: int, first: int, stop: int) -> Keys:
    """The keys of one kind in first..stop-1, ascending."""
    keys = np.concatenate([run[kind, _place(run, kind, first) : _place(run, kind, stop)] for run in runs])
    for run in runs:
        forget(run)
    keys.sort()
    return keys


class EdgeBank:
    """The memorization baseline: predicts that pairs that were linked before link again. About 25 bytes per pair.

    (Poursafaei et al., "Towards Better Evaluation for Dynamic Link Prediction", NeurIPS 2022, with unlimited memory.) Raises
    ConfigError for more than 2**31 nodes, whose pairs do not fit one number.

    >>> bank = EdgeBank(ds.num_nodes)
    >>> bank.update(src, dst)
    >>> bank.score(src[:, None], negative)  # 1.0 for known pairs
    """

    def __init__(self, num_nodes: int) -> None:
        if num_nodes > 2**31:
            raise ConfigError(f"EdgeBank supports at most {2**31} nodes, not {num_nodes}: leave it out")
        self._num_nodes, self._pairs = num_nodes, RelabelTable()

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._pairs.nbytes

    def update(self, src: AnyArray, dst: AnyArray) -> None:
        """Record events, [k] each."""
        self._pairs.add(self._pair(src, dst))

    def read(self, events: Events, first: int, last: int, max_bytes: int, progress: Pace) -> bool:
        """Record events first..last-1; stops and returns False when the pairs take more than `max_bytes`."""
        for start in range(first, last, _BLOCK):
            block = events.read(start, min(start + _BLOCK, last), [])
            self.update(block.src, block.dst)
            progress("EdgeBank", block.last, len(events), "events")
            if self.nbytes > max_bytes:
                return False
        return True

    def score(self, src: AnyArray, dst: AnyArray) -> Tensor:
        """Return 1 for recorded pairs, else 0, in float32 of the shape that `src` and `dst` broadcast to."""
        pair = self._pair(src, dst)
        return torch.from_numpy(self._pairs.find(pair.reshape(-1)).reshape(pair.shape) >= 0).float()

    def _pair(self, src: AnyArray, dst: AnyArray) -> AnyArray:
        return src.astype(np.int64) * self._num_nodes + dst.astype(np.int64)
