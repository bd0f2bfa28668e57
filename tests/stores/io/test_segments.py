"""Maps over shard files: warming and forgetting change no byte, and what is not mapped is left alone."""

from pathlib import Path

import numpy as np
import pytest

from ooc.stores.arrays.zarr_rows import ShardedRows, open_zarr_rows
from ooc.stores.arrays.zarr_write import Appender
from ooc.stores.errors import StoreError
from ooc.stores.io.segments import Segments, forget, mapping_of, warm


def mapped(folder: Path, array: np.ndarray) -> np.ndarray:
    with Appender(folder, "a", array.shape[1:], array.dtype, chunk_bytes=8192, shard_bytes=65536) as appender:
        appender.append(array)
    rows = open_zarr_rows(folder, "a", engine="mmap")
    assert isinstance(rows, ShardedRows)
    try:
        return rows.map()
    finally:
        rows.close()


def resident_pages(address: int, nbytes: int) -> int:
    """Pages of the range that this process has mapped, from its smaps."""
    inside = False
    total = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            low, high = (int(part, 16) for part in head.split("-"))
            inside = low >= address and high <= address + nbytes
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total // 4096


def test_warm_and_forget_keep_the_bytes(tmp_path: Path) -> None:
    wanted = np.random.default_rng(0).integers(0, 1 << 40, 40000)
    array = mapped(tmp_path, wanted)
    holder = mapping_of(array[5:9].view(np.uint8))
    assert holder is not None
    assert warm(array) >= wanted.nbytes
    np.testing.assert_array_equal(array, wanted)
    assert resident_pages(holder.address, holder.nbytes) >= wanted.nbytes // 4096
    forget(array)
    assert resident_pages(holder.address, holder.nbytes) == 0
    np.testing.assert_array_equal(array, wanted)


def test_blocks_are_the_bytes_of_files_one_after_the_other(tmp_path: Path) -> None:
    wanted = np.random.default_rng(1).integers(0, 256, 3 * 2**20 + 5000).astype(np.uint8)
    payload = np.array([2**20 + 4096, 0, 2**21 + 904])
    segments = Segments(tuple(tmp_path / name for name in "abc"), payload)
    for path, first, nbytes in zip(segments.paths, segments.start, payload, strict=False):
        path.write_bytes(wanted[first : first + nbytes].tobytes() + bytes(7))  # what follows the payload is not the array's
    got = [(begin, block.copy()) for begin, block in segments.blocks()]
    assert [begin for begin, _ in got] == [0, 2**20, 2**20 + 4096, 2**21 + 4096, 3 * 2**20 + 4096]
    np.testing.assert_array_equal(np.concatenate([block for _, block in got]), wanted)


def test_a_file_that_is_too_short_is_named_before_any_block_of_it(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(3 * 2**20))
    with pytest.raises(StoreError, match=f"{3 * 2**20} bytes where {2**23} belong"):
        next(Segments((tmp_path / "a",), np.array([2**23])).blocks())


def test_pages_of_a_warm_map_are_not_the_first_to_be_given_up(tmp_path: Path) -> None:
    array = mapped(tmp_path, np.arange(40000))
    holder = mapping_of(array)
    assert holder is not None
    assert "rr" in flags_at(holder.address)
    warm(array)
    assert "rr" not in flags_at(holder.address)


def flags_at(address: int) -> list[str]:
    """VmFlags of the mapping that begins there; rr is MADV_RANDOM."""
    smaps = Path("/proc/self/smaps").read_text()
    return smaps[smaps.index(f"{address:x}-") :].split("VmFlags:")[1].splitlines()[0].split()


def test_memory_is_left_alone() -> None:
    array = np.arange(100000)
    assert mapping_of(array) is None
    assert warm(array) == 0
    forget(array)
    np.testing.assert_array_equal(array, np.arange(100000))
