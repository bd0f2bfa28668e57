"""`ooc.stores.prefetch`: it changes nothing, wherever it points."""

import numba
import numpy as np
from numpy.typing import NDArray

from ooc.stores.jit import kernel
from ooc.stores.prefetch import prefetch


@kernel
def _total(values: NDArray[np.float32], order: NDArray[np.int64], ahead: int) -> float:
    total = 0.0
    for k in range(len(order)):
        prefetch(values, order[min(k + ahead, len(order) - 1)])
        total += values[order[k]]
    return total


def test_a_kernel_that_prefetches_computes_the_same() -> None:
    rng = np.random.default_rng(0)
    values, order = rng.random(10_000, np.float32), rng.permutation(10_000)
    assert _total(values, order, 8) == sum(float(values[i]) for i in order)


def test_an_address_outside_of_the_array_is_not_read() -> None:
    values = np.ones(4, np.float32)

    @kernel
    def wild(values: NDArray[np.float32], far: int) -> float:
        prefetch(values, far)
        prefetch(values, -far)
        return float(values[0])

    assert wild(values, 1 << 50) == 1.0


def test_the_instruction_is_in_the_code() -> None:
    compiled = numba.njit(_total.py_func)  # type: ignore[attr-defined]  # anew: of a kernel from its cache there is no code to see
    compiled(np.ones(1, np.float32), np.zeros(1, np.int64), 1)
    (code,) = compiled.inspect_llvm().values()
    assert "@llvm.prefetch" in code
