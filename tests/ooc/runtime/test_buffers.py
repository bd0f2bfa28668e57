"""Memory comes back when nobody refers to it any more, and not before."""

import gc
from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.runtime.buffers import LEAST_BYTES, PAGE_BYTES, Buffers, own_pages
from tests.forked import in_child
from tests.waiting import in_threads

F32 = np.dtype(np.float32)
ROWS = LEAST_BYTES // 4 // 16


def address(array):
    return array.__array_interface__["data"][0]


def test_memory_is_used_again_once_the_last_reference_is_gone():
    buffers = Buffers(kept=2)
    array = buffers.empty((ROWS, 16), F32)
    assert array.shape == (ROWS, 16)
    assert array.dtype == F32
    array[:] = 7
    first, tensor = address(array), torch.from_numpy(array)[5:9]
    del array
    gc.collect()
    other = buffers.empty((ROWS, 16), F32)
    other[:] = 8
    assert address(other) != first
    assert (tensor == 7).all()
    del tensor
    gc.collect()
    assert address(buffers.empty((ROWS, 16), F32)) == first


def test_a_little_more_fits_and_much_more_does_not():
    buffers = Buffers(kept=2)
    array = buffers.empty((ROWS * 16,), F32)
    first = address(array)
    del array
    assert address(buffers.empty((ROWS * 17,), F32)) == first
    big = buffers.empty((ROWS * 40,), F32)
    assert len(big) == ROWS * 40
    assert len(buffers._free) == 0  # the one that waited was too small
    assert buffers.out_bytes == buffers.nbytes >= big.nbytes


def test_no_more_is_kept_than_was_said():
    buffers = Buffers(kept=2)
    held = [buffers.empty((ROWS * 16,), F32) for _ in range(4)]
    del held
    assert len(buffers._free) == 2


def test_memory_comes_back_in_the_middle_of_anything():
    """Of arrays in reference cycles: a collection may come while another array is being given."""
    buffers, thresholds = Buffers(kept=2), gc.get_threshold()
    gc.set_threshold(20, 2, 2)
    try:
        for _ in range(3000):
            cycle = {"x": buffers.empty((ROWS * 16,), F32)}
            cycle["self"] = cycle
    finally:
        gc.set_threshold(*thresholds)


def test_small_arrays_are_the_allocators():
    buffers = Buffers(kept=2)
    assert buffers.empty((3, 2), F32).shape == (3, 2)
    assert buffers.empty((0, 2), F32).shape == (0, 2)
    assert not buffers._free


def test_buffers_are_whole_pages_from_the_beginning_of_one():
    buffers = Buffers(kept=2, least_bytes=1)
    held = [buffers.empty((n,), np.dtype(np.uint8)) for n in (1, 5000, 3 * LEAST_BYTES + 1)]
    assert all(address(array) % PAGE_BYTES == 0 for array in held)
    assert buffers.out_bytes % PAGE_BYTES == 0


def test_what_goes_beyond_the_bound_is_ordinary_memory():
    buffers = Buffers(kept=4, max_bytes=4 * LEAST_BYTES)
    held = [buffers.empty((ROWS * 16,), F32) for _ in range(5)]
    leased = [buffers.holds(address(array)) for array in held]
    assert leased == [True, True, True, False, False]
    assert buffers.refused == 2
    assert buffers.nbytes <= 4 * LEAST_BYTES
    for array in held:
        array[:] = 3
    first = address(held[0])
    del array, held[0]
    again = buffers.empty((ROWS * 16,), F32)
    assert address(again) == first
    assert buffers.holds(first)


def test_smaller_ones_that_wait_make_room_within_the_bound():
    buffers = Buffers(kept=4, max_bytes=4 * LEAST_BYTES)
    held = [buffers.empty((ROWS * 16,), F32) for _ in range(3)]
    del held
    assert buffers.out_bytes == 0
    large = buffers.empty((ROWS * 16 * 4,), F32)  # all of the bound, without the room for a larger one
    assert buffers.holds(address(large))
    assert buffers.nbytes == 4 * LEAST_BYTES


@given(st.lists(st.one_of(st.integers(1, 40), st.just(0)), max_size=40), st.integers(0, 3), st.integers(1, 60))
@settings(deadline=None)
def test_no_two_leases_overlap_and_the_bound_holds(orders, kept, pages):
    """Orders: so many pages, or give the oldest back."""
    buffers = Buffers(kept, max_bytes=pages * PAGE_BYTES, least_bytes=1)
    held = []
    for number, order in enumerate(orders):
        if order == 0:
            held = held[1:]
            continue
        array = buffers.empty((order * PAGE_BYTES,), np.dtype(np.uint8))
        array[:] = number % 251
        held.append((array, number % 251))
        assert buffers.nbytes <= pages * PAGE_BYTES
        assert len(buffers._free) <= kept
        del array
    array = None
    assert all((array == value).all() for array, value in held)
    assert buffers.out_bytes >= sum(array.nbytes for array, _ in held if buffers.holds(address(array)))
    del array, held
    assert buffers.out_bytes == 0


def test_leases_from_many_threads():
    buffers, wrong = Buffers(kept=3, max_bytes=32 * LEAST_BYTES), []

    def work(number):
        for step in range(100):
            array = buffers.empty((ROWS * 16 + step,), F32)
            array[:] = number
            if not (array == number).all():
                wrong.append(number)

    in_threads(6, work)
    assert not wrong
    assert buffers.out_bytes == 0


def test_memory_is_held_from_the_first_byte_of_a_lease_to_the_last():
    buffers = Buffers(kept=0)
    sums = buffers.empty((2, ROWS, 16), F32)  # two tensors over one lease, as the sums of a batch
    assert all(buffers.holds(torch.from_numpy(part).untyped_storage().data_ptr()) for part in sums)
    assert not buffers.holds(address(sums) - 1)
    assert not buffers.holds(address(sums) + buffers.out_bytes)
    own = address(sums)
    del sums
    gc.collect()
    assert not buffers.holds(own)


def test_memory_for_direct_reads_is_page_aligned_and_stays_out_of_forked_processes():
    buffers = Buffers(kept=1, direct=True, least_bytes=1)
    array = buffers.empty((300, 7), F32)
    array[:] = 1
    assert address(array) % PAGE_BYTES == 0
    assert "wf" in flags_of(address(array))
    assert "wf" not in flags_of(address(Buffers(kept=1).empty((ROWS, 16), F32)))
    first = address(array)
    del array
    gc.collect()
    assert address(buffers.empty((200, 7), F32)) == first


def test_memory_for_direct_reads_that_ends_in_a_forked_process_takes_none_of_its_own_with_it():
    """Of a process that no longer had these addresses, they were soon those of other memory, which was unmapped."""
    arrays = [Buffers(kept=0, direct=True, least_bytes=1).empty((ROWS, 64), F32) for _ in range(20)]
    for array in arrays:
        array[:] = 1

    def work():
        assert not any(array.any() for array in arrays)
        own = [own_pages(ROWS * 64, F32) for _ in range(100)]
        for array in own:
            array[:] = 2
        arrays.clear()
        gc.collect()
        assert all((array == 2).all() for array in own)

    assert in_child(work) == 0
    assert all((array == 1).all() for array in arrays)


def flags_of(memory):
    """VmFlags of the mapping that holds an address; "wf" says that a fork has zeros in its place."""
    within = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if "-" in name and not name.endswith(":"):
            first, last = (int(each, 16) for each in name.split("-"))
            within = first <= memory < last
        elif within and name == "VmFlags:":
            return rest.split()
    raise AssertionError("no such mapping")


def test_pages_of_an_array_go_back_to_the_system_with_its_last_view():
    array = own_pages(2**22, np.int32)
    assert not array.any()
    array[:] = 3
    view, middle = array[5:9], address(array) + array.nbytes // 2  # where nothing that is read meanwhile is put
    del array
    assert view.tolist() == [3, 3, 3, 3]
    assert is_mapped(middle)
    del view
    assert not is_mapped(middle)
    assert own_pages(0, np.float32).shape == (0,)


def is_mapped(at):
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(begin, 16) <= at < int(end, 16) for begin, end in ranges)
