"""Atomic operations of several threads: none is lost, and what was stored before is seen."""

import threading
from typing import Any

import numpy as np
import pytest
from numba.core.errors import TypingError
from numpy.typing import NDArray

from ooc.stores.atomics import compare_and_swap, fetch_add, load_acquire, store_release
from ooc.stores.jit import kernel


@kernel
def add_ones(array: NDArray[np.int64], index: int, times: int) -> int:
    """Add one so often; returns the sum of what was there before each."""
    total = 0
    for _ in range(times):
        total += fetch_add(array, index, 1)
    return total


@kernel
def swap_ones(array: NDArray[np.int64], index: int, times: int) -> None:
    for _ in range(times):
        while True:
            before = load_acquire(array, index)
            if compare_and_swap(array, index, before, before + 1):
                break


@kernel
def write(data: NDArray[np.int64], flag: NDArray[np.uint32], times: int) -> None:
    for number in range(1, times + 1):
        while load_acquire(flag, 1) != number - 1:
            pass
        data[0] = number
        store_release(flag, 0, np.uint32(number))


@kernel
def read(data: NDArray[np.int64], flag: NDArray[np.uint32], times: int) -> int:
    """How often the data were not those of the flag."""
    wrong = 0
    for number in range(1, times + 1):
        while load_acquire(flag, 0) != number:
            pass
        wrong += data[0] != number
        store_release(flag, 1, np.uint32(number))
    return wrong


def at_once(*work: Any) -> list[Any]:
    """Call all of them in threads of their own; what each returned."""
    found: list[Any] = [None] * len(work)

    def call(number: int) -> None:
        found[number] = work[number]()

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(work))]
    for each in threads:
        each.start()
    for each in threads:
        each.join(120)
    return found


@pytest.mark.parametrize("index", [0, 3])
def test_no_addition_is_lost(index: int) -> None:
    array, times = np.zeros(5, np.int64), 200_000
    before = at_once(*[lambda: add_ones(array, index, times)] * 3)
    assert array[index] == array.sum() == 3 * times
    assert sum(before) == 3 * times * (3 * times - 1) // 2


def test_no_swap_is_lost() -> None:
    array, times = np.zeros(5, np.int64), 100_000
    at_once(*[lambda: swap_ones(array, 2, times)] * 3)
    assert array.tolist() == [0, 0, 3 * times, 0, 0]


def test_a_swap_needs_what_is_expected() -> None:
    @kernel
    def swap(array: NDArray[np.int64], expected: int, value: int) -> bool:
        return bool(compare_and_swap(array, 0, expected, value))

    array = np.array([7])
    assert not swap(array, 6, 1)
    assert array[0] == 7
    assert swap(array, 7, 1)
    assert array[0] == 1


@kernel
def add_to_first(array: NDArray[Any]) -> Any:
    return fetch_add(array, 0, 1)


@pytest.mark.parametrize("array", [np.zeros((2, 2), np.int64), np.zeros(4, np.int64)[::2], np.zeros(2)])
def test_other_arrays_are_refused(array: NDArray[Any]) -> None:
    with pytest.raises(TypingError, match="fetch_add"):
        add_to_first(array)


def test_what_was_stored_before_a_flag_is_seen() -> None:
    data, flag = np.zeros(1, np.int64), np.zeros(2, np.uint32)
    assert at_once(lambda: write(data, flag, 300), lambda: read(data, flag, 300))[1] == 0
