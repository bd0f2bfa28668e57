"""Scores of link prediction, in the way of the Temporal Graph Benchmark: a true destination against its negatives.

AP and ROC AUC treat every pair alike and are for one negative an event; the rank of the true destination among its own
negatives gives MRR and Hits@k, for any number of them. Ties count half, so a model that says the same of all gains nothing.
(Huang et al., "Temporal Graph Benchmark for Machine Learning on Temporal Graphs", NeurIPS 2023.)
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stores.errors import OocError
from stores.io.segments import forget

HITS = (1, 3, 10)
PAIR_BYTES = 2**24
"""of memory for the scores of pairs; more wait in a file"""
_EVENT_BYTES, _SORTED_BYTES = 8, 40
"""of an event's two scores that wait, and of a score that is compared"""
_END = 2**32
Keys = NDArray[np.uint32]


class LinkScores:
    """Collects scores batch by batch: logits or probabilities, but of one kind. hits: the k of Hits@k.

    Memory: AP and ROC AUC are exact and take `max_bytes`; 8 bytes an event wait, beyond half of that in sorted runs in an
    unnamed file in `folder` (None: where temporary files go). Ranks keep nothing. Scores are compared as float32.

    >>> scores = LinkScores()
    >>> scores.update(positive, negative)  # float[k], float[k, r]
    >>> scores.compute()["mrr"]
    0.5833
    """

    def __init__(self, hits: Sequence[int] = HITS, max_bytes: int = PAIR_BYTES, folder: Path | None = None) -> None:
        self._hits = tuple(hits)
        self._pairs = Pairs(max_bytes, folder)
        self._events = 0
        self._inverse = torch.zeros((), dtype=torch.float64)
        self._within = torch.zeros(len(self._hits), dtype=torch.float64)

    def update(self, positive: Tensor, negative: Tensor) -> None:
        """positive: [k], of the true destinations; negative: [k] or [k, r], of each one's negatives.

        Raises OocError for a score that is no number.
        """
        positive = positive.detach().cpu().float()
        negative = negative.detach().cpu().float().reshape(len(positive), -1)
        if positive.isnan().any() or negative.isnan().any():
            raise OocError("the model scores a link with NaN: lower --lr, or set --grad-clip")
        above, equal = (negative > positive[:, None]).sum(1), (negative == positive[:, None]).sum(1)
        rank = 1 + above.double() + equal.double() / 2
        self._events += len(positive)
        self._inverse += (1 / rank).sum()
        self._within += torch.stack([(rank <= k).sum() for k in self._hits])
        if negative.size(1) == 1:
            self._pairs.add(positive.numpy(), negative[:, 0].numpy())

    def compute(self) -> dict[str, float]:
        """mrr, hits@k, and with one negative an event ap and auroc; empty before the first event."""
        if not self._events:
            return {}
        found = dict(zip(("ap", "auroc"), self._pairs.compute(), strict=True)) if self._pairs.count else {}
        found["mrr"] = float(self._inverse / self._events)
        within = (self._within / self._events).tolist()
        return found | {f"hits@{k}": share for k, share in zip(self._hits, within, strict=True)}


class Pairs:
    """As many scores of true as of false links, and how well they are told apart: exact, in bounded memory.

    Kept are numbers in the order of the scores. Runs of them, sorted, are looked through from the highest on, as many at a
    time as fit the memory; of a score that more have than fit, how many have it is enough.

    >>> pairs = Pairs(2**24, None)
    >>> pairs.add(np.float32([0.9, 0.3]), np.float32([0.1, 0.3]))
    >>> pairs.compute()  # (average precision, area under the ROC curve)
    (0.8333, 0.875)
    """

    def __init__(self, max_bytes: int, folder: Path | None) -> None:
        self._room = max(1, max_bytes // 2 // _EVENT_BYTES)
        self._at_once = max(1, max_bytes // 2 // _SORTED_BYTES)
        self._folder = folder
        self._held: Keys = np.empty((2, 0), np.uint32)
        self._filled = self._spilled = 0
        self._file: Any = None

    @property
    def count(self) -> int:
        """Of each kind."""
        return self._spilled * self._room + self._filled

    def add(self, true: NDArray[np.float32], false: NDArray[np.float32]) -> None:
        """float32[k] each, without NaN."""
        for start in range(0, len(true), self._room):
            part = slice(start, start + self._room)
            self._put(np.stack([_ordered(true[part]), _ordered(false[part])]))

    def _put(self, keys: Keys) -> None:
        """uint32[2, k], k at most the room."""
        size = keys.shape[1]
        if not self._held.size:
            self._held = np.empty((2, self._room), np.uint32)  # pages are given as they are written to
        taken = min(size, self._room - self._filled)
        self._held[:, self._filled : self._filled + taken] = keys[:, :taken]
        self._filled += taken
        if self._filled == self._room:
            self._spill()
        if taken < size:
            self._put(keys[:, taken:])

    def _spill(self) -> None:
        """What waits becomes a run in the file."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - gone with its last reference
        self._held.sort(axis=1)
        self._file.write(self._held)
        self._file.flush()
        self._spilled, self._filled = self._spilled + 1, 0

    def compute(self) -> tuple[float, float]:
        """(AP, ROC AUC). AP: the precision at each true score, from the highest on; all of one score count together."""
        shape, count = (2, self._room), self.count
        runs: list[Keys] = [
            np.memmap(self._file, np.uint32, "r", number * 8 * self._room, shape) for number in range(self._spilled)
        ]
        runs.append(self._held[:, : self._filled])
        runs[-1].sort(axis=1)
        ap = auc = 0.0
        true, false, stop = 0, 0, _END
        while true < count:
            first = _cut(runs, stop, self._at_once)
            if stop - first == 1:
                many, equal = (np.array([_between(runs, kind, first, stop)]) for kind in (0, 1))
                passed = int(equal[0])
                higher = np.zeros(1, np.int64)
            else:
                own, others = (_sorted(runs, kind, first, stop) for kind in (0, 1))
                value, many = (each[::-1] for each in np.unique(own, return_counts=True))
                passed, behind = len(others), np.searchsorted(others, value, "right")
                higher, equal = passed - behind, behind - np.searchsorted(others, value)
            hits, missed = true + np.cumsum(many), false + higher + equal
            ap += float((many * (hits / (hits + missed))).sum())
            auc += float((many * (count - missed + equal / 2)).sum())
            true, false, stop = true + int(many.sum()), false + passed, first
        return ap / count, auc / count**2


def _ordered(scores: NDArray[np.float32]) -> Keys:
    """uint32[k] in the order of the scores, equal ones (0 and -0 are) equal."""
    bits = (scores + np.float32(0)).view(np.uint32)
    found: Keys = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    return found


def _place(run: Keys, kind: int, key: int) -> int:
    """How many of a run's keys of one kind are below."""
    return run.shape[1] if key >= _END else int(np.searchsorted(run[kind], np.uint32(key)))


def _between(runs: list[Keys], kind: int, first: int, stop: int) -> int:
    """How many keys of one kind are in first..stop-1."""
    return sum(_place(run, kind, stop) - _place(run, kind, first) for run in runs)


def _cut(runs: list[Keys], stop: int, most: int) -> int:
    """The least key from which on there are at most so many below `stop`; stop - 1 where that alone has more."""
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
    found = np.concatenate([run[kind, _place(run, kind, first) : _place(run, kind, stop)] for run in runs])
    for run in runs:
        forget(run)
    found.sort()
    return found
