"""What every implementation of Rows must do, against ArrayRows, the perfect double.

A test module subclasses `RowsContract`, gives a fixture `make(array) -> Rows`, and inherits the tests.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from ooc.loading.feature_cache import CachedRows
from ooc.stores.arrays.rows import ArrayRows, Rows
from ooc.stores.errors import StoreError
from tests.scale import few

Make = Callable[[np.ndarray[Any, Any]], Rows]
SHAPES_AND_DTYPES = [((), "int64"), ((33,), "float32"), ((7,), "uint8"), ((2, 3), "float16"), ((1500,), "float32")]


def array_of(count: int, shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray[Any, Any]:
    """Every value random, so that no two rows are alike."""
    return np.random.default_rng(seed).integers(0, 2**11, (count, *shape)).astype(dtype)


class RowsContract:
    @pytest.fixture
    def make(self) -> Make:
        raise NotImplementedError

    @pytest.mark.parametrize(("shape", "dtype"), SHAPES_AND_DTYPES)
    def test_rows_in_any_order_with_duplicates(self, make: Make, shape: tuple[int, ...], dtype: str) -> None:
        array = array_of(3000, shape, dtype)
        rows, double = make(array), ArrayRows(array)
        assert (rows.shape, rows.dtype, rows.row_bytes) == (double.shape, double.dtype, double.row_bytes)
        rng = np.random.default_rng(1)
        requests = [rng.integers(0, 3000, n) for n in (1, 10, 4000)]
        requests += [np.arange(3000), np.array([2999, 0, 2999, 0]), np.zeros(0, np.int64)]
        for ids in requests:
            out = np.full((len(ids), *shape), 1, dtype)
            wanted = np.empty_like(out)
            double.read(ids, wanted)
            assert rows.read(ids, out) >= 0
            np.testing.assert_array_equal(out, wanted)
        rows.close()

    def test_rows_scattered_into_a_larger_buffer(self, make: Make) -> None:
        array = array_of(3000, (33,), "float32")
        rows, rng = make(array), np.random.default_rng(3)
        for n in (0, 1, 700):
            ids, at = rng.integers(0, 3000, n), rng.permutation(1000)[:n]
            out = np.full((1000, 33), -7, np.float32)
            wanted = out.copy()
            wanted[at] = array[ids]
            rows.read(ids, out, at)
            np.testing.assert_array_equal(out, wanted)
        rows.close()

    def test_places_that_do_not_fit_are_refused(self, make: Make) -> None:
        rows = make(array_of(100, (4,), "float32"))
        out = np.zeros((5, 4), np.float32)
        for at in (np.array([0, 5]), np.array([-1, 0]), np.array([0]), np.array([0, 1], np.int32)):
            with pytest.raises(ValueError, match="at must be"):
                rows.read(np.array([1, 2]), out, at)
        rows.close()

    @pytest.mark.parametrize("bad", [-1, 100, 2**40])
    def test_an_id_out_of_range_is_an_error_before_anything_is_read(self, make: Make, bad: int) -> None:
        rows = make(array_of(100, (4,), "float32"))
        out = np.full((2, 4), -7, np.float32)
        with pytest.raises(IndexError, match=f"row {bad} is out of range"):
            rows.read(np.array([3, bad]), out)
        assert (out == -7).all()
        rows.close()

    def test_a_buffer_that_does_not_fit_is_refused(self, make: Make) -> None:
        rows = make(array_of(100, (4,), "float32"))
        ids = np.array([1, 2])
        for out in (np.empty((2, 5), "f4"), np.empty((2, 4), "f8"), np.empty((4, 2), "f4").T, np.empty((3, 4), "f4")):
            with pytest.raises(ValueError, match="out must be"):
                rows.read(ids, out)
        with pytest.raises(ValueError, match="ids must be"):
            rows.read(ids.astype(np.int32), np.empty((2, 4), "f4"))
        rows.close()

    def test_many_requests_at_once(self, make: Make) -> None:
        array = array_of(5000, (33,), "float32")
        rows = make(array)
        rng = np.random.default_rng(2)
        count = few(4, 12)
        requests = [rng.integers(0, 5000, 700) for _ in range(2 * count)]
        outs = [np.empty((700, 33), np.float32) for _ in requests]
        futures = [rows.submit(ids, out) for ids, out in zip(requests[:count], outs[:count], strict=True)]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(rows.read, requests[count:], outs[count:]))
        for future in futures:
            assert future.result(timeout=60) >= 0
        for ids, out in zip(requests, outs, strict=True):
            np.testing.assert_array_equal(out, array[ids])
        rows.close()

    def test_close_is_idempotent(self, make: Make) -> None:
        rows = make(array_of(10, (4,), "float32"))
        rows.submit(np.array([1]), np.empty((1, 4), np.float32)).result(timeout=60)
        rows.close()
        rows.close()
        with pytest.raises(StoreError, match="closed") if not isinstance(rows, ArrayRows | CachedRows) else nullcontext():
            rows.read(np.array([1]), np.empty((1, 4), np.float32))
