"""Integers arrive as they are, or are refused where float32 would round them."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import ooc
from ooc.stores.dataset import Dataset
from ooc.stores.errors import InputError
from ooc.stores.growth.append import append
from ooc.stores.growth.compact import compact
from ooc.stores.growth.spec import AppendSpec
from ooc.stores.ingest import IngestSpec, ingest

N = 8
BIG = 2**25 + 1  # 33554433, which float32 rounds to 33554432


def build(folder: Path, x: Any = None, **options: Any) -> Path:
    """A store of a ring; `x` is saved as npy first."""
    ring = np.arange(N)
    edges = folder / "e.parquet"
    if "weight" not in options and "edges" not in options:
        pq.write_table(pa.table({"src": ring, "dst": (ring + 1) % N}), edges)
    given: dict[str, Any] = {"edges": str(edges), "out": folder / "s.ooc", **options}
    if x is not None:
        np.save(folder / "x.npy", x)
        given["features"] = [f"x={folder}/x.npy"]
    return ingest(IngestSpec(**given)).path


def values(store: Path) -> Any:
    with Dataset.open(store) as ds:
        rows = ds.rows("x")
        out = np.empty(rows.shape, rows.dtype)
        rows.read(np.arange(ds.num_nodes), out)
        return out


@pytest.mark.parametrize(
    ("given", "kept"), [("i1", "i1"), ("u1", "u1"), ("<i8", "i8"), (">i4", "i4"), ("u2", "i4"), ("u4", "i8"), ("u8", "i8")]
)
def test_integer_arrays_keep_their_values_in_a_type_of_torch(tmp_path: Path, given: str, kept: str) -> None:
    x = np.array([[np.iinfo(given).max >> (given[-1] == "8" and given[-2:] == "u8"), i] for i in range(N)], given)
    found = values(build(tmp_path, x))
    assert found.dtype == np.dtype(kept)
    np.testing.assert_array_equal(found, x)


def test_integers_reach_batches_as_they_are(tmp_path: Path) -> None:
    with ooc.open(build(tmp_path, np.full((N, 1), BIG))) as ds:
        batch = next(iter(ooc.NeighborLoader(ds, [2], batch_size=4)))
    assert (batch.x.dtype.is_floating_point, batch.x[0].item()) == (False, BIG)


def test_integer_columns_of_a_table_stay_integers_and_gaps_make_them_floats(tmp_path: Path) -> None:
    nodes = {"id": range(N), "kind": pa.array(range(N), pa.int16()), "count": [BIG] * N, "gap": [None, *range(1, N)]}
    pq.write_table(pa.table(nodes), tmp_path / "n.parquet")
    found = values(build(tmp_path, nodes=str(tmp_path / "n.parquet"), x_cols="kind,count"))
    assert found.dtype == np.int64
    assert found[:, 1].tolist() == [BIG] * N
    (tmp_path / "b").mkdir()
    table: dict[str, Any] = {"nodes": str(tmp_path / "n.parquet"), "allow_nan": True}
    assert values(build(tmp_path / "b", **table, x_cols="kind,gap")).dtype == np.float32
    (tmp_path / "c").mkdir()
    with pytest.raises(InputError, match=r"n\.parquet row 0 column count is 33554433, which float32 would round; store whole"):
        build(tmp_path / "c", **table, x_cols="count,gap")
    assert values(build(tmp_path / "c", **table, x_cols="count,gap", dtype="float32"))[0, 0] == BIG - 1


def test_whole_numbers_in_text_are_refused_or_kept_as_asked(tmp_path: Path) -> None:
    (tmp_path / "n.csv").write_text("id,f\n" + "".join(f"{i},{BIG + i}\n" for i in range(N)))
    table: dict[str, Any] = {"nodes": str(tmp_path / "n.csv"), "x_cols": "f"}
    with pytest.raises(InputError, match=r"n\.csv line 2 column f is 33554433, which float32 would round"):
        build(tmp_path, **table)
    found = values(build(tmp_path, **table, dtype="int64"))
    assert (found.dtype, found[:, 0].tolist()) == (np.int64, [BIG + i for i in range(N)])


def test_fractions_are_no_whole_numbers(tmp_path: Path) -> None:
    x = np.arange(2.0 * N).reshape(N, 2)
    x[5, 1] = 0.5
    with pytest.raises(InputError, match=r"x\.npy row 5 column 1 is no whole number that int64 holds, the first of 1"):
        build(tmp_path, x, dtype="int64")


def test_weights_that_would_be_rounded_are_refused(tmp_path: Path) -> None:
    ring = np.arange(N)
    pq.write_table(pa.table({"src": ring, "dst": (ring + 1) % N, "w": [1] * 3 + [BIG] * (N - 3)}), tmp_path / "e.parquet")
    with pytest.raises(InputError, match=r"e\.parquet row 3: w is 33554433, which float32 would round"):
        build(tmp_path, weight="w")
    np.savez(tmp_path / "e.npz", edge_index=[ring, (ring + 1) % N], edge_weight=[BIG] * N)
    with pytest.raises(InputError, match="weight is 33554433, which float32 would round"):
        ingest(IngestSpec(out=tmp_path / "s.ooc", npz=tmp_path / "e.npz"))
    with Dataset.open(build(tmp_path, weight="w", dtype="float32")) as ds:
        assert np.asarray(ds.graph.columns["weight"]).max() == BIG - 1


def test_event_features_that_would_be_rounded_are_refused(tmp_path: Path) -> None:
    edges = {"src": [0, 1], "dst": [1, 2], "t": [1, 2], "m": [1, BIG]}
    pq.write_table(pa.table(edges), tmp_path / "e.parquet")
    with pytest.raises(InputError, match=r"e\.parquet row 1 column m is 33554433, which float32 would round"):
        build(tmp_path, edges=str(tmp_path / "e.parquet"), time="t", edge_features=["msg=m"])


def test_integers_are_appended_as_integers(tmp_path: Path) -> None:
    store = build(tmp_path, np.full((N, 1), BIG))
    np.save(tmp_path / "more.npy", np.array([[BIG + 2]]))
    given: dict[str, Any] = {"out": store, "edges": str(tmp_path / "new.parquet")}
    pq.write_table(pa.table({"src": [0], "dst": [N]}), tmp_path / "new.parquet")
    append(AppendSpec(**given, features=[f"x={tmp_path}/more.npy"]))
    compact(store)
    assert values(store)[:, 0].tolist() == [BIG] * N + [BIG + 2]
    np.save(tmp_path / "half.npy", np.array([[0.5]]))
    with pytest.raises(InputError, match="is no whole number that int64 holds"):
        append(AppendSpec(**{**given, "edges": None}, nodes=_one(tmp_path), features=[f"x={tmp_path}/half.npy"]))


def _one(folder: Path) -> str:
    pq.write_table(pa.table({"id": [0]}), folder / "one.parquet")
    return str(folder / "one.parquet")
