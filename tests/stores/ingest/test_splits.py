"""Splits against sets of node ids in RAM, in windows and blocks smaller than they are; memory that does not grow with them."""

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ooc.stores.array_names import SPLIT_CODES
from ooc.stores.errors import InputError
from ooc.stores.ingest import sources, splits
from ooc.stores.ingest.duck import Duck

FEW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
FORMS = ("ids", "int32 ids", "mask", "uint8 mask", "int64 mask", "masks [S, N]", "masks [N, S]", "masks by columns")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits, "WINDOW_NODES", 7)
    monkeypatch.setattr(splits, "READ_ITEMS", 3)


def save(path: Path, mask: Any, form: str) -> int | None:
    """Save `mask` in one of FORMS; the --split-index that chooses it."""
    if "ids" in form:
        ids = np.flatnonzero(mask)[::-1]
        np.save(path, np.r_[ids, ids[:1]].astype(np.int32 if "32" in form else np.int64))
        return None
    if form.endswith("mask"):
        np.save(path, mask.astype(form.partition(" ")[0] if " " in form else bool))
        return None
    masks = np.stack([~mask, mask, mask ^ (np.arange(len(mask)) % 2 == 0)])
    np.save(path, {"[S, N]": masks, "[N, S]": np.ascontiguousarray(masks.T)}.get(form[6:], np.asfortranarray(masks)))
    return 1


def written(folder: Path, mapped: dict[str, splits.Split], num_nodes: int) -> dict[str, Any]:
    return splits.write_splits(folder / "store", splits.bits_of(mapped, num_nodes), folder / "bits", mapped)


@FEW
@given(data=st.data(), num_nodes=st.integers(4, 40), overlapping=st.booleans())
def test_splits_are_the_sets_they_were_given_as(
    tmp_path_factory: pytest.TempPathFactory, data: Any, num_nodes: int, overlapping: bool
) -> None:
    folder = tmp_path_factory.mktemp("splits")
    names = data.draw(st.lists(st.sampled_from(list(SPLIT_CODES)), min_size=1, unique=True))
    codes = np.array(data.draw(st.lists(st.integers(0, 7), min_size=num_nodes, max_size=num_nodes)))
    masks, opened = {}, {}
    for bit, name in enumerate(names):
        mask = codes >> bit & 1 == 1 if overlapping else codes == bit
        mask[bit] = True
        if not overlapping:
            mask[: len(names)] = np.arange(len(names)) == bit
        masks[name] = mask
        index = save(folder / f"{name}.npy", mask, data.draw(st.sampled_from(FORMS)))
        opened[name] = splits.open_split(str(folder / f"{name}.npy"), name, num_nodes, index)
    found = written(folder, opened, num_nodes)
    assert found["sizes"] == {name: int(mask.sum()) for name, mask in masks.items()}
    assert not (folder / "bits").exists()
    shared = {frozenset((a, b)) for a in names for b in names if a < b and (masks[a] & masks[b]).any()}
    assert {frozenset((note.split()[2], note.split()[4])) for note in found["notes"]} == shared
    assert (found["arrays"] == ["split"]) == (not shared)
    group: Any = zarr.open_group(folder / "store", mode="r")["node/node"]
    for name, mask in masks.items():
        stored = group[f"split_{name}"][:] if shared else group["split"][:] == SPLIT_CODES[name]
        np.testing.assert_array_equal(stored, mask, err_msg=name)
    if "train" in masks:
        rows = splits.training_rows(folder / "store", found["arrays"])
        np.testing.assert_array_equal(np.concatenate([rows(0, 3), rows(3, num_nodes)]), masks["train"])


def test_an_id_out_of_range_is_found_in_any_block(tmp_path: Path) -> None:
    np.save(tmp_path / "train.npy", np.array([0, 1, 2, 3, 4, 20]))
    opened = splits.open_split(str(tmp_path / "train.npy"), "train.npy", 20, None)
    with pytest.raises(InputError, match=r"train\.npy entry 5: node 20 is out of range 0\.\.19"):
        written(tmp_path, {"train": opened}, 20)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits, "WINDOW_NODES", 1 << 18)
    monkeypatch.setattr(splits, "READ_ITEMS", 1 << 15)
    peaks = []
    for num_nodes in (1 << 20, 1 << 23):
        folder = tmp_path / str(num_nodes)
        folder.mkdir()
        np.save(folder / "train.npy", np.arange(0, num_nodes, 2))
        np.save(folder / "val.npy", np.arange(num_nodes) % 5 == 0)
        tracemalloc.start()
        opened = {name: splits.open_split(str(folder / f"{name}.npy"), name, num_nodes, None) for name in ("train", "val")}
        written(folder, opened, num_nodes)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + (1 << 18)
    assert peaks[1] < 1 << 22


def test_words_of_a_table(tmp_path: Path) -> None:
    words = ["train", " Train ", "TESTING", "dev", "0", "1", "2", "", None, "none", "-1", "unlabeled", "valid"]
    pq.write_table(pa.table({"split": words}), tmp_path / "n.parquet")
    with Duck(10**9, tmp_path / "spill") as duck:
        table = sources.open_table(duck, str(tmp_path / "n.parquet"), tmp_path / "stage")
        bits = np.concatenate(list(splits.bits_of_table(duck, table, "split")))
    assert bits.tolist() == [1, 1, 4, 2, 1, 2, 4, 0, 0, 0, 0, 0, 2]


def test_a_strange_word_is_found_among_many(tmp_path: Path) -> None:
    words = ["train"] * 300 + [f"fold {i}" for i in range(200)]
    pq.write_table(pa.table({"split": words}), tmp_path / "n.parquet")
    with Duck(10**9, tmp_path / "spill") as duck:
        table = sources.open_table(duck, str(tmp_path / "n.parquet"), tmp_path / "stage")
        with pytest.raises(InputError, match=r"n\.parquet row 300: split is 'fold 0': a split is train, val or test"):
            list(splits.bits_of_table(duck, table, "split"))


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<f4", ">i8"])
def test_rows_and_columns_are_read_in_either_order(tmp_path: Path, order: Any, dtype: str) -> None:
    array = np.asarray(np.arange(60).reshape(20, 3), dtype, order=order)
    np.save(tmp_path / "a.npy", array)
    mapped = sources.open_array(tmp_path / "a.npy")
    np.testing.assert_array_equal(sources.read_rows(mapped, 4, 11), array[4:15])
    np.testing.assert_array_equal(sources.read_column(mapped, 2, 4, 11), array[4:15, 2])
