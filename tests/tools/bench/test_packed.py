"""The trial of packed epochs: rows come back as they are in the store, in groups that fit disk and memory."""

from pathlib import Path

import numpy as np
import pytest

from ooc.stores.arrays.zarr_rows import open_zarr_rows
from ooc.stores.arrays.zarr_write import write_array
from ooc.stores.io.pages import page_buffer
from tools.bench.sampled import packed
from tools.bench.sampled.packed import ENTRY_BYTES, PAGE_BYTES, PIECE_BYTES, Packer, groups_of, hot_rows, with_epochs


def test_packed_rows_are_those_of_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "PIECE_BYTES", 8192)
    monkeypatch.setattr(packed, "CHUNK_ROWS", 100)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3000, 32)).astype(np.float32)
    write_array(tmp_path / "g", "x", x)
    rows = open_zarr_rows(tmp_path / "g", "x")
    batches = [np.sort(rng.permutation(3000)[:count]) for count in (700, 1, 64, 1500)]
    packer, out = Packer(rows, tmp_path / "packed.bin", 2**20), page_buffer(2**20)
    for ids, at in zip(batches, packer.pack(batches).tolist(), strict=True):
        packer.read(at, len(ids), out)
        np.testing.assert_array_equal(out[: len(ids) * 128].view(np.float32).reshape(-1, 32), x[ids])
    pages = sum(-(-len(ids) * 128 // PAGE_BYTES) * PAGE_BYTES for ids in batches)
    assert (packer.bytes["write"], packer.bytes["read"]) == (pages, pages)
    packer.close()
    rows.close()
    assert not (tmp_path / "packed.bin").exists()


def test_groups_fit_the_disk_and_the_memory() -> None:
    assert list(groups_of([100] * 5, 512, 10**9, 10**9)) == [range(5)]
    assert list(groups_of([100] * 5, 512, 2 * (51_200 + PAGE_BYTES), 10**9)) == [range(2), range(2, 4), range(4, 5)]
    memory = 3 * (100 * ENTRY_BYTES + PIECE_BYTES)
    assert list(groups_of([100] * 5, 512, 10**9, memory)) == [range(3), range(3, 5)]
    assert list(groups_of([100, 100], 512, 1, 1)) == [range(1), range(1, 2)]


def test_rows_that_most_batches_need_stay_in_memory() -> None:
    hot = hot_rows([np.array([1, 2, 3]), np.array([2, 3]), np.array([3, 4])], 6, 2)
    assert np.flatnonzero(hot).tolist() == [2, 3]
    assert not hot_rows([np.array([1, 2]), np.array([3])], 6, 3).any()


def test_packing_once_is_divided_by_the_epochs() -> None:
    found = {
        "bytes_per_batch": {"pass": 10.0, "write": 6.0, "read": 6.0},
        "seconds_per_batch": {"pass and write": 2.0, "read": 1.0},
    }
    epochs = with_epochs(found, in_ram=1.5)["epochs"]
    assert epochs["1"] == {"bytes_per_batch": 22.0, "seconds_per_batch": 3.0, "with_training": 3.0}
    assert epochs["20"] == {"bytes_per_batch": 6.8, "seconds_per_batch": 1.1, "with_training": 1.5}
