"""PURE: in which order pairs of buckets are trained, so that the few buckets in memory are exchanged seldom.

An edge needs the buckets of both its ends in memory, of which there is room for some. The order is BETA (Mohoney et al.,
"Marius: Learning Massive Graph Embeddings on a Single Machine", OSDI 2021): all resident buckets but the last stay, while all
that are on disk take the last place in turn; then those that stayed have met all others, and are replaced by as many new ones.

An even epoch begins with the same buckets whatever its number, in an order of its own; the odd epoch after it has the same
resident buckets in reverse. So an epoch begins with those that the one before it ended with, and is a function of its number.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ooc.runtime.keyed_random import KeyedPermutation, Purpose, key, numbered

Ints = NDArray[np.int64]
Swap = tuple[int, int]
"""(the bucket that leaves, the one that comes)"""


class Visit(NamedTuple):
    """What is trained while the same buckets are resident."""

    swap: Swap | None
    """before it; None at the beginning"""
    resident: tuple[int, ...]
    """ascending"""
    pairs: Ints
    """int64[k, 2]: the (bucket of the source, bucket of the destination) of edges to train, in this order"""


def bucket_visits(buckets: int, resident: int, seed: int, epoch: int) -> list[Visit]:
    """Return an epoch's visits, in which every pair of buckets, in both directions, is trained once.

    Args:
        buckets: Number of buckets, p.
        resident: How many are resident at once, c: all of them, or 2 or more.
        seed, epoch: Which order.

    >>> [visit.swap for visit in bucket_visits(4, 3, seed=0, epoch=0)]
    [None, (3, 1), (0, 3)]
    """
    states = list(_states(buckets, resident, seed, epoch - epoch % 2))
    if epoch % 2:
        states.reverse()
    met, visits = np.zeros((buckets, buckets), bool), list[Visit]()
    before: frozenset[int] | None = None
    for number, state in enumerate(states):
        own = np.array(sorted(state))
        new = np.argwhere(~met[np.ix_(own, own)])
        met[np.ix_(own, own)] = True
        pairs = own[new]
        shuffled = pairs[KeyedPermutation(len(pairs), numbered(key(seed, Purpose.BUCKETS, epoch), number + 1))[:]]
        swap = None if before is None else (min(before - state), min(state - before))
        visits.append(Visit(swap, tuple(own.tolist()), shuffled))
        before = state
    return visits


def _states(buckets: int, resident: int, seed: int, epoch: int) -> Iterator[frozenset[int]]:
    """The sets of resident buckets of an even epoch."""
    assert resident >= buckets or resident >= 2, "a pair needs two buckets"
    order = KeyedPermutation(buckets, key(seed, Purpose.BUCKETS))[:].tolist()
    here, away = order[:resident], order[resident:]
    yield frozenset(here)
    turn, stream = 0, key(seed, Purpose.BUCKETS, epoch)
    while away:
        turn += 1
        shuffle = KeyedPermutation(len(away), numbered(stream, buckets * buckets + turn))[:]
        away = [away[i] for i in shuffle]
        for i in range(len(away)):
            here[-1], away[i] = away[i], here[-1]
            yield frozenset(here)
        few = min(resident - 1, len(away))
        for i in range(few):
            here[i] = away[i]
            yield frozenset(here)
        away = away[few:]


def beta_swaps(buckets: int, resident: int) -> int:
    """Return how many swaps an epoch has: BETA's (p - c) + (x + 1) ((p - c) - x (c - 1) / 2), where x = (p - c) // (c - 1).

    >>> beta_swaps(4, 3), beta_swaps(64, 6)
    (2, 424)
    """
    away = max(0, buckets - resident)
    if not away:
        return 0
    rounds = away // (resident - 1)
    return away + (rounds + 1) * away - rounds * (rounds + 1) * (resident - 1) // 2


def least_swaps(buckets: int, resident: int) -> int:
    """Return how many any order has at least: a swap brings c - 1 new pairs together, of the p (p - 1) / 2 there are.

    >>> least_swaps(4, 3), least_swaps(64, 6)
    (2, 401)
    """
    if buckets <= resident:
        return 0
    return -(-(buckets * (buckets - 1) - resident * (resident - 1)) // (2 * (resident - 1)))
