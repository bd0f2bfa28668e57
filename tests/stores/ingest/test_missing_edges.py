"""Edges with an empty end, and graphs without edges."""

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
from ooc.stores.integrity import verify

FORMS: dict[str, tuple[list[Any], list[Any]]] = {
    "integers": ([0, None, 2, 1, None], [1, 2, None, 2, None]),
    "words": (["a", "", "c", "b", None], ["b", "c", None, "c", None]),
    "numbers far apart": ([10**9, None, 3 * 10**9, 2 * 10**9, None], [2 * 10**9, 3 * 10**9, None, 3 * 10**9, None]),
}


@pytest.mark.parametrize("ending", ["parquet", "csv"])
@pytest.mark.parametrize("form", FORMS)
def test_edges_with_an_empty_end_are_refused_or_dropped_and_counted(tmp_path: Path, form: str, ending: str) -> None:
    src, dst = FORMS[form]
    path = tmp_path / f"e.{ending}"
    if ending == "parquet":
        pq.write_table(pa.table({"src": src, "dst": dst}), path)
    else:
        lines = [f"{'' if a is None else a},{'' if b is None else b}" for a, b in zip(src, dst, strict=True)]
        path.write_text("\n".join(["src,dst", *lines]) + "\n")
    row = "row 1" if ending == "parquet" else "line 3"
    with pytest.raises(InputError, match=rf"e\.{ending} {row}: src is empty; correct it, or pass `drop_missing=True`"):
        ingest(IngestSpec(out=tmp_path / "s.ooc", edges=str(path)))
    result = ingest(IngestSpec(out=tmp_path / "s.ooc", edges=str(path), drop_missing=True))
    assert (result.num_nodes, result.num_edges, result.dropped) == (3, 2, {"missing": 3})
    with Dataset.open(tmp_path / "s.ooc") as ds:
        assert np.asarray(ds.graph.indices).tolist() == [0, 1]
        assert np.asarray(ds.graph.columns["edge_id"]).tolist() == [0, 3]


def test_words_among_numbers_are_not_empty(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text("src,dst\n0,1\n" + "1,2\n" * 20 + ",1\nx,0\n")
    with pytest.raises(InputError, match=r"e\.csv line 24: src 'x' is not a whole number"):
        ingest(IngestSpec(out=tmp_path / "s.ooc", edges=str(tmp_path / "e.csv"), drop_missing=True))


@pytest.mark.cases(1)
@pytest.mark.parametrize("form", ["words", "numbers far apart"])
def test_edges_with_an_empty_end_are_not_appended(tmp_path: Path, form: str) -> None:
    src, dst = FORMS[form]
    pq.write_table(pa.table({"src": [src[0], src[2]], "dst": [dst[0], dst[3]]}), tmp_path / "e.parquet")
    pq.write_table(pa.table({"src": src, "dst": dst}), tmp_path / "more.parquet")
    ingest(IngestSpec(out=tmp_path / "s.ooc", edges=str(tmp_path / "e.parquet")))
    given: dict[str, Any] = {"out": tmp_path / "s.ooc", "edges": str(tmp_path / "more.parquet")}
    with pytest.raises(InputError, match="row 1: src is empty"):
        append(AppendSpec(**given))
    assert append(AppendSpec(**given, drop_missing=True)).appended.missing == 3
    compact(tmp_path / "s.ooc")
    with Dataset.open(tmp_path / "s.ooc") as ds:
        assert ds.num_edges == 4


@pytest.mark.parametrize(
    "more", [{}, {"order": "degree"}, {"undirected": True, "drop_duplicates": True}, {"drop_missing": True}]
)
def test_a_graph_without_edges_is_a_graph(tmp_path: Path, more: dict[str, Any]) -> None:
    empty, x = np.empty((2, 0), np.int64), np.arange(8.0).reshape(4, 2)
    ooc.ingest(tmp_path / "s.ooc", edges=empty, features={"x": x}, train=np.array([1, 2]), **more)
    with ooc.open(tmp_path / "s.ooc") as ds:
        assert (ds.num_nodes, ds.num_edges) == (4, 0)
        batch = next(iter(ooc.NeighborLoader(ds, [2, 2], input_nodes="train", batch_size=2)))
        assert batch.x.tolist() == x[[1, 2]].tolist() if not more.get("order") else len(batch.x) == 2
        assert batch.edge_index.shape == (2, 0)
    assert verify(tmp_path / "s.ooc") == []


def test_a_graph_without_edges_of_named_nodes(tmp_path: Path) -> None:
    edges = pa.table({"src": pa.array([], pa.string()), "dst": pa.array([], pa.string())})
    ooc.ingest(tmp_path / "s.ooc", edges=edges, nodes=pa.table({"id": ["b", "a"]}))
    with ooc.open(tmp_path / "s.ooc") as ds:
        assert ds.rows_of(["a", "b"]).tolist() == [1, 0]


def test_neither_nodes_nor_edges_are_no_graph(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"has no edges, which give the nodes: give these by `num_nodes`, `nodes` or `features`"
    ):
        ooc.ingest(tmp_path / "s.ooc", edges=np.empty((2, 0), np.int64))
    edges = pa.table({"src": pa.array([], pa.int64()), "dst": pa.array([], pa.int64()), "t": pa.array([], pa.int64())})
    with pytest.raises(InputError, match="a temporal graph needs at least one"):
        ooc.ingest(tmp_path / "s.ooc", edges=edges, num_nodes=3, time="t")
