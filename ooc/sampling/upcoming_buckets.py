"""PURE: the visits of buckets that come next, and by them which bucket is read ahead and which one leaves memory for it."""

import math
from bisect import bisect_right
from collections.abc import Collection, Sequence

from ooc.sampling.bucket_order import Visit


class UpcomingBuckets:
    """The visits of an epoch, of which number `at` is trained, and those behind them, as far as known.

    Args:
        visits: Those of the epoch, as `bucket_visits` returns them.
        later: Those behind them.

    >>> ahead = UpcomingBuckets(bucket_visits(4, 2, seed=0, epoch=0))
    >>> ahead.at = 0
    >>> ahead.next_missing(here={1, 2})
    (1, 3)
    """

    def __init__(self, visits: Sequence[Visit] = (), later: Sequence[Visit] = ()) -> None:
        self.visits, self.at = visits, -1
        self._uses: dict[int, list[int]] = {}
        for number, visit in enumerate([*visits, *later]):
            for bucket in visit.resident if number == 0 else visit.swap[1:] if visit.swap else ():
                self._uses.setdefault(bucket, []).append(number)

    @property
    def resident(self) -> tuple[int, ...]:
        """The buckets of the visit that is trained."""
        return self.visits[self.at].resident

    def next_missing(self, here: Collection[int]) -> tuple[int, int] | None:
        """(the next visit that needs a bucket that is not `here`, the bucket); None if there is none."""
        for number in range(self.at + 1, len(self.visits)):
            swap = self.visits[number].swap
            if swap is not None and swap[1] not in here:
                return number, swap[1]
        return None

    def leaving(self, here: Collection[int], before: int | None) -> int | None:
        """The bucket of `here`, but for those of this visit, whose next use is farthest.

        Args:
            here: The buckets in memory.
            before: The visit that its place is for; None where there is no bucket that is not used before it.
        """
        uses = {bucket: self._next_use(bucket) for bucket in sorted(set(here) - set(self.resident))}
        found = max(uses, key=lambda bucket: uses[bucket], default=None)
        return None if found is None or (before is not None and uses[found] <= before) else found

    def _next_use(self, bucket: int) -> float:
        own = self._uses.get(bucket, [])
        at = bisect_right(own, self.at)
        return own[at] if at < len(own) else math.inf
