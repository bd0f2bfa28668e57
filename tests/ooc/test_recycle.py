"""Memory comes back when nobody refers to it any more, and not before."""

import gc

import numpy as np
import torch

from ooc.recycle import LEAST_BYTES, Recycler

F32 = np.dtype(np.float32)
ROWS = LEAST_BYTES // 4 // 16


def address(array):
    return array.__array_interface__["data"][0]


def test_memory_is_used_again_once_the_last_reference_is_gone():
    recycler = Recycler(kept=2)
    array = recycler.empty((ROWS, 16), F32)
    assert array.shape == (ROWS, 16)
    assert array.dtype == F32
    array[:] = 7
    first, tensor = address(array), torch.from_numpy(array)[5:9]
    del array
    gc.collect()
    other = recycler.empty((ROWS, 16), F32)
    other[:] = 8
    assert address(other) != first
    assert (tensor == 7).all()
    del tensor
    gc.collect()
    assert address(recycler.empty((ROWS, 16), F32)) == first


def test_a_little_more_fits_and_much_more_does_not():
    recycler = Recycler(kept=2)
    array = recycler.empty((ROWS * 16,), F32)
    first = address(array)
    del array
    assert address(recycler.empty((ROWS * 17,), F32)) == first
    big = recycler.empty((ROWS * 40,), F32)
    assert address(big) != first
    assert len(big) == ROWS * 40


def test_no_more_is_kept_than_was_said():
    recycler = Recycler(kept=2)
    held = [recycler.empty((ROWS * 16,), F32) for _ in range(4)]
    del held
    assert len(recycler._free) == 2


def test_memory_comes_back_in_the_middle_of_anything():
    """Of arrays in reference cycles: a collection may come while another array is being given."""
    recycler, thresholds = Recycler(kept=2), gc.get_threshold()
    gc.set_threshold(20, 2, 2)
    try:
        for _ in range(3000):
            cycle = {"x": recycler.empty((ROWS * 16,), F32)}
            cycle["self"] = cycle
    finally:
        gc.set_threshold(*thresholds)


def test_small_arrays_are_the_allocators():
    recycler = Recycler(kept=2)
    assert recycler.empty((3, 2), F32).shape == (3, 2)
    assert recycler.empty((0, 2), F32).shape == (0, 2)
    assert not recycler._free
