"""`Members` against numpy's own flatnonzero."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.stores.arrays.members import Members


@settings(deadline=None)  # the first example compiles
@given(
    size=st.integers(0, 3000),
    share=st.sampled_from([0.0, 0.001, 0.3, 0.99, 1.0]),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_positions_are_those_of_flatnonzero(size: int, share: float, seed: int, data: st.DataObject) -> None:
    random = np.random.default_rng(seed)
    mask = random.random(size) < share
    ids = np.flatnonzero(mask)
    members = Members.of(mask, block=data.draw(st.sampled_from([512, 1024, 2**22])))
    assert len(members) == len(ids)
    position = random.permutation(len(ids))
    np.testing.assert_array_equal(members[position], ids[position])


def test_a_code_is_chosen() -> None:
    codes = np.array([0, -1, 2, 0, 1], np.int8)
    np.testing.assert_array_equal(Members.of(codes, 0)[np.array([1, 0])], [3, 0])


def test_memory_is_as_said() -> None:
    members = Members.of(np.ones(1 << 20, bool))
    assert members._words.nbytes + members._before.nbytes <= Members.nbytes_for(1 << 20) + 8


@pytest.mark.parametrize("position", [-1, 2])
def test_a_position_out_of_range_is_refused(position: int) -> None:
    with pytest.raises(IndexError, match="out of range"):
        Members.of(np.array([True, True]))[np.array([position])]
