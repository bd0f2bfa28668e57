"""The order of pairs of buckets: its laws, by hypothesis."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.sampling.bucket_order import beta_swaps, bucket_visits, least_swaps

shapes = st.tuples(st.integers(1, 24), st.integers(2, 12)).map(lambda pair: (pair[0], min(pair)))


@given(shapes, st.integers(0, 2**62), st.integers(0, 5))
@settings(max_examples=200, deadline=None)
def test_every_pair_is_trained_once_while_both_buckets_are_resident(shape: tuple[int, int], seed: int, epoch: int) -> None:
    buckets, resident = shape
    visits = bucket_visits(buckets, resident, seed, epoch)
    for visit in visits:
        assert len(visit.resident) == resident == len(set(visit.resident))
        assert set(visit.pairs.ravel().tolist()) <= set(visit.resident)
    pairs = np.concatenate([visit.pairs for visit in visits])
    assert len(pairs) == buckets**2 == len(np.unique(pairs, axis=0))
    assert not np.any((pairs < 0) | (pairs >= buckets))


@given(shapes, st.integers(0, 2**62), st.integers(0, 5))
@settings(max_examples=200, deadline=None)
def test_swaps_are_those_of_the_published_formula(shape: tuple[int, int], seed: int, epoch: int) -> None:
    buckets, resident = shape
    visits = bucket_visits(buckets, resident, seed, epoch)
    now = set(visits[0].resident)
    assert visits[0].swap is None
    for visit in visits[1:]:
        assert visit.swap is not None
        leaves, comes = visit.swap
        assert leaves in now
        assert comes not in now
        now = (now - {leaves}) | {comes}
        assert now == set(visit.resident)
    assert least_swaps(buckets, resident) <= len(visits) - 1 == beta_swaps(buckets, resident)


def test_beta_is_close_to_the_least_swaps() -> None:
    assert beta_swaps(6, 3) == 7
    for buckets, resident in ((32, 8), (64, 8), (128, 16)):
        assert beta_swaps(buckets, resident) <= 1.2 * least_swaps(buckets, resident)
    assert least_swaps(4, 4) == beta_swaps(4, 4) == 0


@given(shapes, st.integers(0, 2**62), st.integers(0, 5))
@settings(max_examples=100, deadline=None)
def test_an_epoch_begins_where_the_one_before_it_ended(shape: tuple[int, int], seed: int, epoch: int) -> None:
    before, after = bucket_visits(*shape, seed, epoch), bucket_visits(*shape, seed, epoch + 1)
    assert before[-1].resident == after[0].resident


def test_seed_and_epoch_decide_and_nothing_else() -> None:
    def shown(seed: int, epoch: int) -> list[object]:
        return [(visit.swap, visit.resident, visit.pairs.tolist()) for visit in bucket_visits(12, 4, seed, epoch)]

    assert shown(3, 2) == shown(3, 2)
    assert len({str(shown(seed, epoch)) for seed in (0, 1) for epoch in range(4)}) == 8
