"""Edges that come in order are packed without sorting: the same store; what is out of order is refused by its row."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ooc.stores.errors import ConfigError, InputError
from ooc.stores.ingest import IngestSpec, edges, ingest, spec_of
from ooc.stores.ingest.duck import Duck

FEW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
TYPED = "a:to:b"


def tree(path: Path) -> dict[str, bytes]:
    return {str(each.relative_to(path)): each.read_bytes() for each in sorted(path.rglob("*")) if each.is_file()}


def tables(folder: Path, files: int, **columns: Any) -> str:
    """A table in several files, in order of their names."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, rows in enumerate(np.array_split(np.arange(len(next(iter(columns.values())))), files)):
        pq.write_table(pa.table({name: column[rows] for name, column in columns.items()}), folder / f"part-{i}.parquet", 7)
    return f"{folder}/part-*.parquet"


@FEW
@given(
    seed=st.integers(0, 2**31),
    count=st.integers(1, 80),
    files=st.integers(1, 3),
    weight=st.booleans(),
    drop_self_loops=st.booleans(),
    edge_ids=st.booleans(),
)
def test_packed_edges_are_sorted_edges(tmp_path, seed, count, files, weight, drop_self_loops, edge_ids):  # type: ignore[no-untyped-def]
    folder, rng = tmp_path / f"{len(list(tmp_path.iterdir()))}", np.random.default_rng(seed)
    dst = np.sort(rng.integers(0, 10, count))
    src = np.where(np.arange(count) == 0, 11, rng.integers(0, 12, count))  # one edge at least is no loop
    table = tables(folder, files, src=src, dst=dst, w=rng.random(count), f=rng.random(count))
    options: dict[str, Any] = {"edges": table, "num_nodes": 12, "drop_self_loops": drop_self_loops, "edge_ids": edge_ids}
    options |= {"weight": "w"} if weight else {}
    options |= {"edge_features": ["m=f"]} if edge_ids else {}
    ingest(IngestSpec(out=folder / "want.ooc", **options))
    ingest(IngestSpec(out=folder / "got.ooc", sorted=True, **options))
    assert tree(folder / "got.ooc") == tree(folder / "want.ooc")


def test_csv_and_dropped_edges_keep_their_order(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text("src,dst\n3,0\n,1\n2,1\n9,2\n1,4\n")
    options: dict[str, Any] = {"edges": str(tmp_path / "e.csv"), "num_nodes": 5, "drop_missing": True}
    ingest(IngestSpec(out=tmp_path / "want.ooc", **options))
    assert ingest(IngestSpec(out=tmp_path / "got.ooc", sorted=True, **options)).dropped == {"missing": 2}
    assert tree(tmp_path / "got.ooc") == tree(tmp_path / "want.ooc")


def test_types_with_times_are_in_order_of_destination_and_time(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    dst, time = rng.integers(0, 9, 60), rng.random(60)
    order = np.lexsort((time, dst))
    table = tables(tmp_path, 2, src=rng.integers(0, 5, 60), dst=dst[order], t=time[order])
    fields: dict[str, Any] = {"edges": {TYPED: table}, "num_nodes": {"a": 5, "b": 9}, "time": {TYPED: "t"}}
    ingest(spec_of({"out": tmp_path / "want.ooc", **fields}))
    ingest(spec_of({"out": tmp_path / "got.ooc", "sorted": True, **fields}))
    assert tree(tmp_path / "got.ooc") == tree(tmp_path / "want.ooc")
    table = tables(tmp_path / "late", 1, src=np.arange(4), dst=np.array([0, 1, 1, 2]), t=np.array([9, 5, 4, 0]))
    with pytest.raises(InputError, match=r"row 2: \(destination, time\) 1, 4 stands behind 1, 5: sort the edges by it"):
        ingest(spec_of({"out": tmp_path / "no.ooc", "sorted": True, **fields, "edges": {TYPED: table}}))


@FEW
@given(dst=st.lists(st.integers(0, 9), min_size=1, max_size=40), files=st.integers(1, 3))
def test_the_first_row_out_of_order_is_named(tmp_path, dst, files):  # type: ignore[no-untyped-def]
    folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
    spec = IngestSpec(
        out=folder / "s.ooc",
        edges=tables(folder, files, src=np.zeros(len(dst), int), dst=np.array(dst)),
        num_nodes=10,
        sorted=True,
    )
    wrong = next((i for i in range(1, len(dst)) if dst[i] < dst[i - 1]), None)
    if wrong is None:
        assert ingest(spec).num_edges == len(dst)
        return
    with pytest.raises(InputError) as caught:
        ingest(spec)
    rows = np.array_split(np.arange(len(dst)), files)
    file = next(i for i, each in enumerate(rows) if wrong in each)
    where = f"part-{file}.parquet row {wrong - rows[file][0]}: destination {dst[wrong]} stands behind {dst[wrong - 1]}: sort"
    assert where in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(folder.glob("s.ooc*"))


def test_order_is_checked_from_batch_to_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each place in turn the first of a batch's rows, or another."""
    dst = np.arange(40) // 2 + 1
    for wrong in range(2, 40, 3):
        table = tables(
            tmp_path / f"{wrong}", 1, src=np.zeros(40, int), dst=np.where(np.arange(40) == wrong, dst[wrong] - 2, dst)
        )
        stream = Duck.stream
        with monkeypatch.context() as patch:
            patch.setattr(Duck, "stream", lambda duck, sql, ordered=True, batch_rows=0, of=stream: of(duck, sql, ordered, 4))
            with pytest.raises(InputError, match=f"row {wrong}: destination"):
                ingest(IngestSpec(out=tmp_path / "s.ooc", edges=table, num_nodes=21, sorted=True))


def test_keys_are_compared_one_after_the_other() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        keys = rng.integers(0, 3, (2, rng.integers(1, 6)))
        rows = [tuple(row) for row in keys.T.tolist()]
        want = next((i for i in range(len(rows) - 1) if rows[i + 1] < rows[i]), -1)
        assert edges._descends(list(keys)) == want


def test_ids_that_are_not_rows_are_refused(tmp_path: Path) -> None:
    table = tables(tmp_path, 1, src=np.array(["a", "b"]), dst=np.array(["b", "c"]))
    with pytest.raises(
        InputError, match=r"ids of nodes are not their rows 0\.\.2, .*: number the nodes before you sort"
    ) as caught:
        ingest(IngestSpec(out=tmp_path / "s.ooc", edges=table, sorted=True))
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("s.ooc*"))


@pytest.mark.parametrize(
    "more",
    [
        {"undirected": True},
        {"drop_duplicates": True},
        {"time": "t"},
        {"parts": 3},
        {"order": "degree"},
        {"nodes": "n.parquet", "graph_id": "g"},
        {"edges": None, "npz": "g.npz"},
    ],
)
def test_what_sorts_edges_again_does_not_go_with_it(tmp_path: Path, more: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="`sorted`"):
        IngestSpec(**{"out": tmp_path / "s.ooc", "edges": "e.parquet", "sorted": True, **more})


@pytest.mark.parametrize("more", [{"reverse": True}, {"drop_duplicates": True}])
def test_nor_with_it_by_type(tmp_path: Path, more: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="`sorted`"):
        spec_of(
            {"out": tmp_path / "s.ooc", "edges": {TYPED: "e.parquet"}, "num_nodes": {"a": 1, "b": 1}, "sorted": True, **more}
        )
