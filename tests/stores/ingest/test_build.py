"""Ingest against a brute-force reference; errors by file, row and value."""

import errno
import gzip
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError, ConfigError, InputError, StoreError
from ooc.stores.ingest import IngestSpec, ingest, nodes
from ooc.stores.ingest.edges import CscWriter, pack_bits
from ooc.stores.integrity import verify

FEW = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)


def reference(edges: Any, num_nodes: int, *, undirected: bool, drop_self_loops: bool, drop_duplicates: bool) -> dict[str, Any]:
    """The CSC by the definition: (dst, edge id) order, plain Python."""
    slots = []
    for edge_id, (src, dst, weight) in enumerate(edges):
        if src == dst and drop_self_loops:
            continue
        slots.append((dst, edge_id, src, weight))
        if undirected and src != dst:
            slots.append((src, edge_id, dst, weight))
    slots.sort()
    if drop_duplicates:
        seen: set[tuple[int, int]] = set()
        slots = [s for s in slots if (s[0], s[2]) not in seen and not seen.add((s[0], s[2]))]  # type: ignore[func-returns-value]
    sums = np.zeros(num_nodes)
    for dst, _, src, weight in slots:
        sums[dst] += weight if src != dst else 0.0
    counts = np.bincount([s[0] for s in slots], minlength=num_nodes)
    return {
        "indptr": np.concatenate([[0], np.cumsum(counts)]),
        "indices": [s[2] for s in slots],
        "edge_id": [s[1] for s in slots],
        "weight": np.array([s[3] for s in slots], np.float32),
        "weight_sum": sums.astype(np.float32),
        "self_loops": [s[0] for s in slots if s[0] == s[2]],
        "loop_weight": np.array([s[3] for s in slots if s[0] == s[2]], np.float32),
    }


def tree(path: Path) -> dict[str, bytes]:
    return {str(each.relative_to(path)): each.read_bytes() for each in sorted(path.rglob("*")) if each.is_file()}


def table(path: Path, **columns: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=7)
    return str(path)


def fresh(tmp_path: Path) -> Path:
    return tmp_path / f"s{len(list(tmp_path.iterdir()))}.ooc"


@FEW
@given(
    edges=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.floats(0, 8, width=32)), min_size=1, max_size=60),
    files=st.integers(1, 3),
    undirected=st.booleans(),
    drop_duplicates=st.booleans(),
    strings=st.booleans(),
)
def test_graph_is_the_reference(tmp_path, edges, files, undirected, drop_duplicates, strings):  # type: ignore[no-untyped-def]
    out = fresh(tmp_path)
    parts = np.array_split(np.arange(len(edges)), files)
    folder = out.with_suffix(".in")
    for i, part in enumerate(parts):
        rows = [edges[k] for k in part]
        kind: Any = (lambda v: f"n{v}") if strings else int
        table(
            folder / f"part_{i}.parquet",
            src=pa.array([kind(r[0]) for r in rows], pa.string() if strings else pa.int64()),
            dst=pa.array([kind(r[1]) for r in rows], pa.string() if strings else pa.int64()),
            w=pa.array([r[2] for r in rows], pa.float64()),
        )
    options: dict[str, Any] = {"undirected": undirected, "drop_duplicates": drop_duplicates}
    more: dict[str, Any] = {"nodes": table(folder / "nodes.parquet.x" / "n.parquet", id=[f"n{v}" for v in range(10)])}
    ingest(
        IngestSpec(out=out, edges=f"{folder}/part_*.parquet", weight="w", **options, **(more if strings else {"num_nodes": 10}))
    )
    group, want = zarr.open_group(out, mode="r"), reference(edges, 10, drop_self_loops=False, **options)
    for name, array in want.items():
        np.testing.assert_array_equal(np.asarray(group[f"graph/{name}"]), array, err_msg=name)
    assert group["graph/indices"].dtype == np.int32
    with Dataset.open(out) as ds:
        assert ds.manifest.has_self_loops == bool(len(want["self_loops"]))
        if strings:
            assert list(ds.external([3, 0])) == ["n3", "n0"]
            assert ds.row("n7") == 7


def test_a_store_without_ids_of_edges(tmp_path: Path) -> None:
    src, dst = np.random.default_rng(0).integers(0, 30, (2, 200))
    edges = {"edges": table(tmp_path / "e.parquet", src=src, dst=dst, w=np.arange(200.0), f=np.arange(200.0)), "num_nodes": 30}
    ingest(IngestSpec(out=tmp_path / "with.ooc", weight="w", **edges))
    ingest(IngestSpec(out=tmp_path / "without.ooc", weight="w", edge_ids=False, **edges))
    want, got = tree(tmp_path / "with.ooc"), tree(tmp_path / "without.ooc")
    lost = {name for name in want if name not in got}
    assert lost
    assert all("edge_id" in name for name in lost)
    assert all(want[name] == got[name] for name in got if "graph/" in name)
    with Dataset.open(tmp_path / "without.ooc") as ds:
        assert ds.manifest.columns == ["weight"]
        assert ds.graph.edge_ids(np.array([3, 7])).tolist() == [3, 7]
    assert verify(tmp_path / "without.ooc") == []
    for by_edge in ({"edge_features": ["f=f"]}, {"time": "w"}, {"edge_label": "f"}):
        with pytest.raises(ConfigError, match="needs the edges' ids: leave out `edge_ids=False`"):
            IngestSpec(out=tmp_path / "no.ooc", edge_ids=False, **edges, **by_edge)
    np.savez(tmp_path / "g.npz", edge_index=np.stack([src, dst]), edge_attr=np.ones((200, 2), np.float32))
    with pytest.raises(ConfigError, match=r"to store the edges' edge_attr, .* ids are needed: leave out `edge_ids=False`"):
        ingest(IngestSpec(out=tmp_path / "no.ooc", npz=tmp_path / "g.npz", edge_ids=False))


@pytest.mark.parametrize("form", ["csv", "csv.gz", "tsv", "headless", "npy", "npyT", "npz"])
def test_every_file_form_gives_the_same_store(tmp_path: Path, form: str) -> None:
    rng = np.random.default_rng(1)
    edges = rng.integers(0, 40, (2, 200))
    want = tmp_path / "want.ooc"
    ingest(IngestSpec(out=want, edges=table(tmp_path / "e.parquet", src=edges[0], dst=edges[1]), num_nodes=40))
    path = tmp_path / {"headless": "e.txt", "npyT": "e.npy"}.get(form, f"e.{form}")
    sign = {"tsv": "\t", "headless": " "}.get(form, ",")
    lines = "\n".join([*([] if form == "headless" else [f"src{sign}dst"]), *(f"{s}{sign}{d}" for s, d in edges.T)]) + "\n"
    if form in ("npy", "npyT"):
        np.save(path, edges if form == "npy" else edges.T)
    elif form == "npz":
        np.savez(path, edge_index=edges)
    else:
        path.write_bytes(gzip.compress(lines.encode()) if form.endswith("gz") else lines.encode())
    ingest(IngestSpec(out=tmp_path / "got.ooc", edges=str(path), num_nodes=40))
    assert tree(tmp_path / "got.ooc") == tree(want)


@pytest.mark.slow
def test_memory_and_threads_do_not_change_a_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    names = np.array([f"node-{i}" for i in range(5000)])
    edges = table(
        tmp_path / "e.parquet", src=names[rng.integers(0, 5000, 60_000)], dst=names[rng.integers(0, 5000, 60_000)],
        w=rng.random(60_000),
    )  # fmt: skip
    spec = {"edges": edges, "weight": "w", "undirected": True, "drop_duplicates": True}
    ingest(IngestSpec(out=tmp_path / "a.ooc", memory="2GB", **spec))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    ingest(IngestSpec(out=tmp_path / "b.ooc", memory="856MB", **spec))
    assert tree(tmp_path / "a.ooc") == tree(tmp_path / "b.ooc")
    with Dataset.open(tmp_path / "a.ooc") as ds:
        assert list(ds.external(np.arange(5000))) == sorted(names)


def test_sparse_integers_are_mapped_in_order(tmp_path: Path) -> None:
    edges = table(tmp_path / "e.parquet", src=[10**12, -5], dst=[7, 10**12])
    ingest(IngestSpec(out=tmp_path / "s.ooc", edges=edges))
    with Dataset.open(tmp_path / "s.ooc") as ds:
        assert ds.external([0, 1, 2]).tolist() == [-5, 7, 10**12]
        assert ds.row(10**12) == 2
        assert np.asarray(ds.graph.indices).tolist() == [2, 0]


def test_whole_numbers_with_sign_or_space_are_read(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text("src,dst\n +1,2 \n0, 1\n")
    ingest(IngestSpec(out=tmp_path / "s.ooc", edges=str(tmp_path / "e.csv"), id_type="int"))
    with Dataset.open(tmp_path / "s.ooc") as ds:
        assert np.asarray(ds.graph.indices).tolist() == [0, 1]


@pytest.mark.parametrize("values", [["b", "a"], [1, 0]])
def test_dictionary_encoded_ids_are_their_values(tmp_path: Path, values: list[Any]) -> None:
    encoded = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0], pa.int8()), pa.array(values))
    edges = table(tmp_path / "e.parquet", src=encoded, dst=pa.array([values[1], values[0], values[0]]))
    ingest(IngestSpec(out=tmp_path / "s.ooc", edges=edges))
    with Dataset.open(tmp_path / "s.ooc") as ds:
        assert np.asarray(ds.graph.indices).tolist() == [1, 0, 1]


def test_words_with_leading_zeros_stay_words(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text("src,dst\n007,010\n7,007\n")
    ingest(IngestSpec(out=tmp_path / "s.ooc", edges=str(tmp_path / "e.csv")))
    with Dataset.open(tmp_path / "s.ooc") as ds:
        assert list(ds.external([0, 1, 2])) == ["007", "010", "7"]


def test_packing_arithmetic_beyond_2_to_31() -> None:
    assert pack_bits(2**31, 2**32) == 32
    assert pack_bits(2**31 + 1, 2**32) is None
    assert pack_bits(1, 1) == 0
    assert pack_bits(8_000_000, 3 * 2**31) == 33


def test_writer_offsets_and_sums_go_on_across_batches(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    dst = np.sort(rng.integers(0, 50, 1000))
    src = rng.integers(0, 50, 1000).astype(np.int32)
    weight = rng.random(1000).astype(np.float32)
    for name, cuts in (("one", [1000]), ("many", sorted({*rng.integers(1, 1000, 60).tolist(), 1000}))):
        first = 0
        with CscWriter(tmp_path / name, 60, {"weight": np.float32}) as writer:
            for cut in cuts:
                writer.add(dst[first:cut], src[first:cut], np.arange(first, cut), {"weight": weight[first:cut]})
                first = cut
    assert tree(tmp_path / "one") == tree(tmp_path / "many")
    sums = np.bincount(dst, np.where(dst == src, 0, weight.astype(np.float64)), minlength=60).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(zarr.open_group(tmp_path / "one")["graph/weight_sum"]), sums)


def test_a_weight_that_is_nan_among_equal_ones_is_named(tmp_path: Path) -> None:
    """A Parquet file's statistics leave NaN out: by them all weights are 1."""
    edges = table(tmp_path / "e.parquet", src=[0, 1, 2], dst=[1, 2, 0], w=[1.0, 1.0, float("nan")])
    with pytest.raises(InputError, match=r"e\.parquet row 2: w is nan, not a finite number; 1 weights"):
        ingest(IngestSpec(out=tmp_path / "s.ooc", edges=edges, weight="w"))


def test_missing_endpoints_are_dropped_and_counted(tmp_path: Path) -> None:
    edges = table(tmp_path / "e.parquet", src=["a", "b", "zz"], dst=["b", "q", "a"])
    nodes = table(tmp_path / "n.parquet", id=["b", "a"])
    spec = {"edges": edges, "nodes": nodes}
    with pytest.raises(InputError, match=r"parquet row 1: dst 'q' is not in .*n\.parquet; fix it or pass `drop_missing=True`"):
        ingest(IngestSpec(out=tmp_path / "s.ooc", **spec))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e.parquet", "n.parquet"]
    result = ingest(IngestSpec(out=tmp_path / "s.ooc", **spec, drop_missing=True))
    assert (result.num_edges, result.dropped) == (1, {"missing": 2})
    result = ingest(
        IngestSpec(
            out=tmp_path / "t.ooc", edges=table(tmp_path / "f.parquet", src=[0, 5], dst=[1, 0]), num_nodes=2, drop_missing=True
        )
    )
    assert result.dropped == {"missing": 1}


BAD_EDGES = {
    "out of range": ("src,dst\n0,1\n1,9\n", {"num_nodes": 3}, r"e\.csv line 3: dst 9 is out of range 0\.\.2"),
    "a word": ("src,dst\n" + "0,1\n" * 30 + "1,foo\n", {}, r"e\.csv line 32: dst 'foo' is not a whole number"),
    "a word among rows": ("src,dst\n0,1\n1,foo\n", {"num_nodes": 3}, r"line 3: dst 'foo' is not a whole number"),
    "a fraction": ("src,dst\n0,1\n1,1.5\n", {"num_nodes": 3}, r"line 3: dst '1.5' is not a whole number"),
    "an exponent": ("src,dst\n0,1\n1,1e1\n", {"num_nodes": 30}, r"line 3: dst '1e1' is not a whole number"),
    "an underscore": ("src,dst\n0,1\n1_0,1\n", {"num_nodes": 30}, r"line 3: src '1_0' is not a whole number"),
    "an underscore in a weight": ("src,dst,w\n0,1,1_0\n", {"weight": "w"}, r"line 2: w is '1_0', not a finite number"),
    "an empty end": ("src,dst\n0,1\n1,\n", {"num_nodes": 3}, r"line 3: dst is empty"),
    "a word as weight": ("src,dst,w\n0,1,1\n1,0,x\n", {"weight": "w"}, r"line 3: w is 'x', not a finite number"),
    "NaN weight": ("src,dst,w\n0,1,1\n1,0,nan\n", {"weight": "w"}, r"line 3: w is 'nan'.*`allow_nan=True`"),
    "no column": ("from,to\n0,1\n", {}, r"no column 'src' for sources: it has from, to"),
    "no edges": ("src,dst\n", {}, r"no edges"),
    "ragged": ("src,dst\n0,1\n1,0,5\n", {}, r"e\.csv line 3"),
}


@pytest.mark.parametrize("case", BAD_EDGES)
def test_bad_edges_name_file_row_and_value(tmp_path: Path, case: str) -> None:
    content, options, message = BAD_EDGES[case]
    (tmp_path / "e.csv").write_text(content)
    with pytest.raises(InputError, match=message) as caught:
        ingest(IngestSpec(out=tmp_path / "s.ooc", edges=str(tmp_path / "e.csv"), **options))
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["e.csv"]


def test_too_little_memory_is_refused(tmp_path: Path) -> None:
    edges = table(tmp_path / "e.parquet", src=[0], dst=[1])
    with pytest.raises(BudgetError, match="at least 856 MB, not 300 MB: give `memory='856MB'`"):
        ingest(IngestSpec(out=tmp_path / "s.ooc", edges=edges, memory="300MB"))
    assert [path.name for path in tmp_path.iterdir()] == ["e.parquet"]


@pytest.mark.cases(1)
@pytest.mark.parametrize("at", [2, 4, 6])
def test_a_failed_ingest_leaves_no_descriptor_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    rng = np.random.default_rng(6)
    src, dst = rng.integers(0, 50, (2, 300_000))
    pq.write_table(pa.table({"src": src, "dst": dst, "w": rng.random(300_000)}), tmp_path / "e.parquet")
    spec: dict[str, Any] = {"edges": str(tmp_path / "e.parquet"), "weight": "w", "num_nodes": 50}
    ingest(IngestSpec(out=tmp_path / "whole.ooc", **spec))  # what a process opens once and for all is open now
    before, write, calls, opened = open_files(), os.write, 0, 0

    def full(fd: int, data: Any) -> int:
        nonlocal calls, opened
        calls += data.nbytes >= 2**17 if isinstance(data, memoryview) else 0  # chunks; LMDB and the journal go on
        if calls == at:
            opened = len(open_files() - before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StoreError, match="No space left on device; free some space"):
        ingest(IngestSpec(out=tmp_path / "s.ooc", **spec))
    assert opened >= 2  # there was something to close
    assert open_files() == before
    assert not list(tmp_path.glob("s.ooc*"))


def open_files() -> set[str]:
    """The files this process holds open, with their descriptors."""
    found = set()
    for each in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own
            found.add(f"{each} {os.readlink(f'/proc/self/fd/{each}')}")
    return found


def test_an_existing_out_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "s.ooc").mkdir()
    with pytest.raises(StoreError, match="exists already"):
        ingest(IngestSpec(out=tmp_path / "s.ooc", edges=table(tmp_path / "e.parquet", src=[0], dst=[1])))


def test_contradicting_settings_are_refused(tmp_path: Path) -> None:
    for options in ({}, {"edges": "e", "npz": "n"}, {"edges": "e", "label": "y"}, {"edges": "e", "features": ["y=a.npy"]}):
        with pytest.raises(ConfigError):
            IngestSpec(out=tmp_path / "s.ooc", **options)  # type: ignore[arg-type]


def test_a_directory_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    edges = table(tmp_path / "e.parquet", src=[0], dst=[1])
    with pytest.raises(StoreError, match=r"cannot write .*: Not a directory; check the path and the disk"):
        ingest(IngestSpec(out=tmp_path / "file" / "s.ooc", edges=edges))


def test_an_input_that_goes_away_is_said_to_be_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "BLOCK_BYTES", 8)
    edges = table(tmp_path / "e.parquet", src=[0], dst=[1])
    np.save(tmp_path / "x.npy", np.ones((20, 1)))

    def remove(step: str, *_: object) -> None:
        if step == "features x":
            (tmp_path / "x.npy").unlink(missing_ok=True)

    with pytest.raises(StoreError, match=r"x\.npy cannot be read: No such file or directory; check the file"):
        ingest(IngestSpec(out=tmp_path / "s.ooc", edges=edges, num_nodes=20, features=[f"x={tmp_path}/x.npy"]), remove)
    assert not list(tmp_path.glob("s.ooc*"))
