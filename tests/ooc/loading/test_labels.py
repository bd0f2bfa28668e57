"""Labels of a batch's nodes against numpy's indexing."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.loading.load_stage import Labels


@settings(deadline=None)  # the first example of a dtype compiles a kernel
@given(
    dtype=st.sampled_from([np.int8, np.int32, np.int64, np.uint16, np.float32]),
    shape=st.sampled_from([(50,), (50, 3)]),
    gaps=st.booleans(),
    floats=st.booleans(),
    node=st.lists(st.integers(0, 49), max_size=80),
)
def test_they_are_those_that_numpy_finds(dtype: Any, shape: tuple[int, ...], gaps: bool, floats: bool, node: list[int]) -> None:
    y = np.random.default_rng(0).integers(0, 100, (2 * shape[0], *shape[1:])).astype(dtype)
    y = y[::2] if gaps else y[: shape[0]]
    found = Labels(y, floats=floats).of_nodes(np.array(node, np.int64))
    assert found.dtype == (np.float32 if floats or dtype == np.float32 else np.int64)
    np.testing.assert_array_equal(found, y[np.array(node, np.int64)])


@pytest.mark.parametrize("dtype", [np.int8, np.float32])
def test_a_node_without_a_label_is_refused(dtype: Any) -> None:
    with pytest.raises(IndexError):
        Labels(np.zeros(50, dtype)).of_nodes(np.array([3, 50]))
