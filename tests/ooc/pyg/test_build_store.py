"""`ooc.ingest` and `ooc.from_data`: every kind of tensor and array, and what is said of the rest."""

import inspect
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import scipy.sparse
import torch
from torch_geometric.data import Data, HeteroData, TemporalData

import ooc
from ooc.cli.main import main
from ooc.pyg.dataset_source import ingest as from_pyg
from ooc.stores.arrays.rows import Rows
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError, InputError
from ooc.stores.growth.append import append
from ooc.stores.growth.spec import AppendSpec
from ooc.stores.ingest import IngestSpec
from ooc.stores.integrity import verify

N, E = 30, 90
GENERATOR = torch.Generator().manual_seed(0)
EDGES = torch.randint(0, N, (2, E), generator=GENERATOR)
X = torch.rand(N, 4, generator=GENERATOR)


def data(**more: Any) -> Data:
    return Data(**{"x": X, "edge_index": EDGES, "y": torch.arange(N) % 3, **more})


def read(rows: Rows) -> Any:
    out = np.empty(rows.shape, rows.dtype)
    rows.read(np.arange(rows.shape[0]), out)
    return out


def edges_of(ds: Dataset) -> Any:
    """[2, E] in the input's order."""
    target = np.repeat(np.arange(ds.num_nodes), np.diff(ds.graph.indptr))
    found = np.empty((2, ds.num_edges), np.int64)
    found[:, np.asarray(ds.graph.columns["edge_id"])] = np.stack([np.asarray(ds.graph.indices), target])
    return found


@pytest.mark.filterwarnings("error")
def test_a_data_becomes_a_data_set_of_the_same_graph(tmp_path: Path) -> None:
    at = torch.arange(N)
    masks = {"train_mask": at < 10, "val_mask": (at >= 10) & (at < 15), "test_mask": at > 20}
    with ooc.from_data(data(edge_weight=torch.rand(E), **masks), tmp_path / "s.ooc") as ds:
        np.testing.assert_array_equal(edges_of(ds), EDGES)
        np.testing.assert_array_equal(read(ds.rows("x")), X)
        np.testing.assert_array_equal(np.asarray(ds.labels), at % 3)
        assert {name: len(ds.split(name)) for name in ds.splits} == {"train": 10, "val": 5, "test": 9}
        batch = next(iter(ooc.NeighborLoader(ds, [2, 2], input_nodes="train", batch_size=10)))
        assert torch.equal(batch.x, X[batch.n_id])
    assert verify(tmp_path / "s.ooc") == []


@pytest.mark.parametrize(
    ("x", "want"),
    [
        (X.numpy(), X),
        (X.bfloat16(), X.bfloat16().float()),
        (X.double().T.contiguous().T, X),
        (torch.where(X > 0.7, X, 0).to_sparse(), torch.where(X > 0.7, X, 0)),
        (torch.where(X > 0.7, X, 0).to_sparse_csr(), torch.where(X > 0.7, X, 0)),
        (scipy.sparse.csr_matrix(np.where(X > 0.7, X, 0)), torch.where(X > 0.7, X, 0)),
        (X.clone().requires_grad_(), X),
        ((X * 100).long(), (X * 100).long()),
        (X > 0.5, (X > 0.5).float()),
    ],
    ids=["numpy", "bfloat16", "float64 by columns", "coo", "csr", "scipy", "with gradient", "int64", "bool"],
)
def test_features_of_any_kind_are_taken(tmp_path: Path, x: Any, want: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ooc.pyg.data_arrays._STEP_BYTES", 100)
    with ooc.from_data(data(x=x), tmp_path / "s.ooc") as ds:
        found = torch.from_numpy(read(ds.rows("x")))
        assert found.dtype == want.dtype
        assert torch.equal(found, want)


def test_memory_maps_are_taken(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X.numpy())
    with ooc.from_data(data(x=np.load(tmp_path / "x.npy", mmap_mode="r")), tmp_path / "s.ooc") as ds:
        np.testing.assert_array_equal(read(ds.rows("x")), X)


def test_all_tensors_are_stored_and_what_is_not_is_said(tmp_path: Path) -> None:
    more = {
        "pos": torch.rand(N, 3),
        "year": torch.arange(N) + 2000,
        "edge_attr": torch.rand(E, 2),
        "edge_time": torch.arange(E),
    }
    rest = {"name": "tiny", "u": torch.rand(1, 5), "cube": torch.rand(N, 2, 2)}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ds = ooc.from_data(data(**more, **rest), tmp_path / "s.ooc", dtype="float16", order="degree")
    texts = [str(each.message) for each in said]
    assert any("left out: name (str)" in text for text in texts)
    assert any("u (float32 [1, 5]), cube (float32 [30, 2, 2])" in text for text in texts)
    assert any("stored, but not in batches: pos, year (of nodes: ds.rows(NAME)" in text for text in texts)
    assert any("stored, in batches on request: edge_time (of edges: edge_features=[NAME]" in text for text in texts)
    with ds:
        own = np.asarray(ds.external(np.arange(N)))
        assert read(ds.rows("year"))[:, 0].tolist() == (more["year"][own]).tolist()
        np.testing.assert_array_equal(read(ds.rows("pos")), more["pos"][own])
        np.testing.assert_array_equal(read(ds.edge_features("edge_attr")), more["edge_attr"])
        batch = next(iter(ooc.NeighborLoader(ds, [2], batch_size=4)))
        out = np.empty((len(batch.e_id), 1), np.int64)
        ds.edge_features("edge_time").read(batch.e_id.numpy(), out)
        ends = np.asarray(ds.external(batch.n_id))[batch.edge_index]
        np.testing.assert_array_equal(EDGES[:, out[:, 0]], ends)
        with pytest.raises(InputError, match="no edge feature 'weight': there are edge_attr, edge_time"):
            ds.edge_features("weight")


def test_edge_features_without_times_are_not_appended_to(tmp_path: Path) -> None:
    ooc.from_data(data(edge_attr=torch.rand(E, 2)), tmp_path / "s.ooc").close()
    with pytest.raises(ConfigError, match=r"it has edge features \(edge_attr\) and no times; ingest everything anew"):
        append(AppendSpec(out=tmp_path / "s.ooc", edges="e.csv"))


def test_adjacency_in_place_of_edges(tmp_path: Path) -> None:
    kept = EDGES[:, np.unique(EDGES[0] * N + EDGES[1], return_index=True)[1]]
    weight = torch.arange(kept.shape[1]) + 2.0
    adj_t = torch.sparse_coo_tensor(kept.flip(0), weight, (N, N)).to_sparse_csr()
    with ooc.from_data(Data(x=X, adj_t=adj_t), tmp_path / "s.ooc") as ds:
        found = np.c_[edges_of(ds).T, np.asarray(ds.graph.columns["weight"])[np.argsort(ds.graph.columns["edge_id"])]]
    assert sorted(map(tuple, found.tolist())) == sorted(map(tuple, np.c_[kept.T, weight].tolist()))


def test_adjacency_beside_edges_is_no_feature(tmp_path: Path) -> None:
    adj_t = torch.sparse_coo_tensor(EDGES.flip(0), torch.ones(E), (N, N)).coalesce()
    with pytest.warns(UserWarning, match=r"left out: adj_t \(edge_index has the edges\)"):
        ds = ooc.from_data(data(adj_t=adj_t), tmp_path / "s.ooc")
    with ds:
        assert "adj_t" not in ds.names


def test_data_that_are_none_are_refused(tmp_path: Path) -> None:
    for given, message in (
        (HeteroData(), "data has no edge types"),
        (Data(x=X), "data has no edge_index"),
        (data(y=torch.where(torch.arange(N) == 4, torch.inf, torch.rand(N))), r"data\[y\] row 4: target inf is infinite"),
    ):
        with pytest.raises(InputError, match=message):
            ooc.from_data(given, tmp_path / "s.ooc")
    assert not list(tmp_path.iterdir())


@pytest.mark.cases(1)
@pytest.mark.parametrize("shape", [(N,), (N, 1), (N, 2)])
def test_numbers_to_predict_keep_their_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    y = torch.rand(shape, dtype=torch.float64)
    y[3] = torch.nan
    with ooc.from_data(data(y=y), tmp_path / "s.ooc", random_split=(0.5, 0.25, 0.25)) as ds:
        assert (ds.task, ds.num_classes, ds.class_names) == ("regression", shape[-1] if len(shape) == 2 else 1, None)
        batch = next(iter(ooc.NeighborLoader(ds, [2], batch_size=N)))
        assert batch.y.dtype == torch.float32
        torch.testing.assert_close(batch.y, y.float()[batch.n_id], rtol=0, atol=0, equal_nan=True)
        assert 3 not in np.concatenate([ds.split(name) for name in ds.splits])
    with ooc.from_data(data(y=torch.arange(N) % 3), tmp_path / "t.ooc", task="regression") as ds:
        assert (ds.task, ds.y.dtype) == ("regression", np.float32)


def test_data_sets_say_what_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.Whole", lambda: [data(pos=torch.rand(N, 3), title="a graph")], raising=False)
    notes = from_pyg(IngestSpec(out=tmp_path / "s.ooc", pyg=f"{__name__}:Whole")).notes
    assert notes[0] == "left out: title (str)"
    assert notes[1].startswith("stored, but not in batches: pos (of nodes")


def test_ingest_has_the_fields_of_its_specification() -> None:
    parameters = inspect.signature(ooc.ingest).parameters
    fields = IngestSpec.model_fields
    assert set(parameters) == {*fields, "cache_dir", "progress"}
    others = ("out", "cache_dir", "progress")
    defaults = {name: parameter.default for name, parameter in parameters.items() if name not in others}
    assert defaults == {
        name: () if (own := fields[name].get_default(call_default_factory=True)) == [] else own for name in defaults
    }
    assert all(f"        {name}: " in str(ooc.ingest.__doc__) for name in parameters)


def test_ingest_of_arrays_and_data_frames(tmp_path: Path) -> None:
    y, train = np.arange(N) % 3, np.arange(N) < 9
    given: dict[str, Any] = {"features": {"x": X}, "labels": y, "train": train}
    assert ooc.ingest(tmp_path / "a.ooc", edges=EDGES, **given).num_edges == E
    edges = pd.DataFrame({"a": EDGES[0], "b": EDGES[1]}, index=range(5, E + 5))
    nodes = pa.table({"id": range(N), "f": X[:, 0].numpy(), "g": X[:, 1].numpy(), "y": y})
    table: dict[str, Any] = {"nodes": nodes, "x_cols": ["f", "g"], "label": "y", "random_split": (0.5, 0.25, 0.25)}
    ooc.ingest(tmp_path / "b.ooc", edges=edges, src="a", dst="b", **table)
    with ooc.open(tmp_path / "a.ooc") as one, ooc.open(tmp_path / "b.ooc") as other:
        np.testing.assert_array_equal(read(one.rows("x"))[:, :2], read(other.rows("x")))
        np.testing.assert_array_equal(edges_of(one), edges_of(other))
        assert [len(other.split(name)) for name in other.splits] == [15, 7, 8]


@pytest.mark.parametrize(
    "x", [X.clone().requires_grad_(), X.bfloat16().float().bfloat16(), X.to_sparse(), pd.DataFrame(X.numpy()), X.tolist()]
)
def test_ingest_takes_arrays_of_any_kind(tmp_path: Path, x: Any) -> None:
    y, train = np.arange(N) % 3, np.arange(N) < 9
    given: dict[str, Any] = {"labels": pd.Series(y), "train": train.tolist(), "features": {"x": x}}
    ooc.ingest(tmp_path / "s.ooc", edges=EDGES.tolist(), num_nodes=N, **given)
    with ooc.open(tmp_path / "s.ooc") as ds:
        wanted = X.bfloat16().float() if getattr(x, "dtype", None) is torch.bfloat16 else X
        np.testing.assert_array_equal(read(ds.rows("x")), wanted)
        assert (ds.y == y).all()
        assert (ds.train_mask == train).all()
        np.testing.assert_array_equal(edges_of(ds), EDGES)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"nodes": pd.DataFrame({"id": [0, 0], "f": [1.0, 2.0]})}, r"^nodes \(DataFrame\) row 1: id 0 stands there already"),
        (
            {"edges": pd.DataFrame({"src": [10], "dst": [7]})},
            r"^edges \(DataFrame\) row 0: dst 7 is not in nodes \(DataFrame\)",
        ),
        ({"edges": np.zeros((3, 3), int)}, r"^edges \(ndarray\) holds int64 \[3, 3\]"),
        ({"features": {"z": np.zeros(3)}}, r"^features\['z'\] \(ndarray\) has 3 rows"),
        ({"features": {"z": np.array(["a", "b"])}}, r"^features\['z'\] is an array of <U1"),
    ],
)
def test_a_fault_in_a_frame_or_an_array_names_the_argument(tmp_path: Path, changed: dict[str, Any], words: str) -> None:
    edges, nodes = pd.DataFrame({"src": [10], "dst": [11]}), pd.DataFrame({"id": [10, 11], "f": [1.0, 2.0]})
    with pytest.raises(InputError, match=words):
        ooc.ingest(tmp_path / "s.ooc", **{"edges": edges, "nodes": nodes, **changed})


def test_a_fault_in_a_frame_of_a_type_names_the_type(tmp_path: Path) -> None:
    users = pd.DataFrame({"id": ["u", "u"]})
    with pytest.raises(InputError, match=r"^nodes\['user'\] \(DataFrame\) row 1: id 'u' stands there already"):
        ooc.ingest(
            tmp_path / "s.ooc",
            nodes={"user": users},
            edges={("user", "likes", "user"): pd.DataFrame({"src": ["u"], "dst": ["u"]})},
        )


def test_ingest_refuses_what_is_no_array(tmp_path: Path) -> None:
    words = {"labels": pd.Series(["a"] * N)}, {"labels": ["a"] * N}, {"features": {"x": {1: 2}}}, {"train": 3}
    kinds = "labels is an array of object", "labels is an array of <U1", r"features\['x'\] is a dict", "train is a int"
    for given, kind in zip(words, kinds, strict=True):
        with pytest.raises(InputError, match=f"^{kind}: give an array of numbers"):
            ooc.ingest(tmp_path / "s.ooc", edges=EDGES, num_nodes=N, **given)
    assert not list(tmp_path.iterdir())


def test_messages_name_arguments(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^edges come from exactly one of `edges`, `npz`, `pyg`, `ogb` and `graphbolt`"):
        ooc.ingest(tmp_path / "s.ooc")
    with pytest.raises(ConfigError, match=r"^`random_split='2,0,0'`: shares are 0 or more"):
        ooc.ingest(tmp_path / "s.ooc", edges=EDGES, random_split=(2, 0, 0))
    with pytest.raises(InputError, match=r"no file matches .*/my--edges\.csv"):
        ooc.ingest(tmp_path / "s.ooc", edges=tmp_path / "my--edges.csv")
    with pytest.raises(ConfigError, match=r"^num_nodes = -1 is invalid: expected a number greater"):
        ooc.ingest(tmp_path / "s.ooc", edges=EDGES, num_nodes=-1)


def test_rows_of_many_ids(tmp_path: Path) -> None:
    ids = [f"u_{i}" for i in range(N)]
    edges = pa.table({"src": [ids[i] for i in EDGES[0]], "dst": [ids[i] for i in EDGES[1]]})
    ooc.ingest(tmp_path / "s.ooc", edges=edges, nodes=pa.table({"id": ids[::-1]}))
    with ooc.open(tmp_path / "s.ooc") as ds:
        assert ds.rows_of(["u_3", "u_1", "u_3"]).tolist() == [26, 28, 26]
        assert ds.rows_of(np.array(["u_0"])).tolist() == [29]
        assert ds.rows_of([]).tolist() == []
        with pytest.raises(InputError, match=r"3 of 4 ids are of no node in .*: 'a', 'b', 'c'; check"):
            ds.rows_of(["a", "u_1", "b", "c"])
    numbers = pa.table({"src": EDGES[0].numpy() * 1000, "dst": EDGES[1].numpy() * 1000})
    for name, table, factor in (("whole", numbers, 1000), ("rows", EDGES, 1)):
        ooc.ingest(tmp_path / f"{name}.ooc", edges=table, nodes=None)
        with ooc.open(tmp_path / f"{name}.ooc") as ds:
            own = np.asarray(ds.external(np.arange(ds.num_nodes)))
            assert ds.rows_of(own).tolist() == list(range(ds.num_nodes))
            assert ds.rows_of(torch.from_numpy(own[:3].copy())).tolist() == [0, 1, 2]
            with pytest.raises(InputError, match=r"no node has the id -1 in"):
                ds.rows_of([-1, int(own[0])])
            assert factor * ds.row(own[1]) == factor


@pytest.mark.cases(1)
@pytest.mark.parametrize("form", ["csr", "csc", "coo"])
def test_sparse_adjacency_files(tmp_path: Path, form: str) -> None:
    matrix = scipy.sparse.random(20, 20, 0.2, form, np.float64, random_state=3)
    scipy.sparse.save_npz(tmp_path / "a.npz", matrix)
    ooc.ingest(tmp_path / "s.ooc", npz=tmp_path / "a.npz")
    entries = matrix.tocoo()
    with ooc.open(tmp_path / "s.ooc") as ds:
        found = scipy.sparse.coo_matrix(
            (np.asarray(ds.graph.columns["weight"])[np.argsort(ds.graph.columns["edge_id"])], edges_of(ds))
        )
        want = scipy.sparse.coo_matrix((entries.data.astype(np.float32), (entries.row, entries.col)))
        np.testing.assert_array_equal(found.toarray(), want.toarray()[: found.shape[0], : found.shape[1]])
        assert ds.num_nodes == 20
    scipy.sparse.save_npz(tmp_path / "b.npz", matrix != 0)
    ooc.ingest(tmp_path / "b.ooc", npz=tmp_path / "b.npz")
    with ooc.open(tmp_path / "b.ooc") as ds:
        assert not ds.manifest.weighted
    scipy.sparse.save_npz(tmp_path / "c.npz", matrix.tocsr()[:10])
    with pytest.raises(InputError, match=r"c\.npz holds a sparse matrix of shape \[10, 20\]: an adjacency matrix is square"):
        ooc.ingest(tmp_path / "c.ooc", npz=tmp_path / "c.npz")


def test_attributed_adjacency_files(tmp_path: Path) -> None:
    adjacency, attributes = (
        scipy.sparse.random(20, 20, 0.2, "csr", random_state=1),
        scipy.sparse.random(20, 5, 0.4, "csr", random_state=2),
    )
    parts = {f"{name}_{part}": getattr(matrix, part) for name, matrix in (("adj", adjacency), ("attr", attributes))
             for part in ("data", "indices", "indptr", "shape")}  # fmt: skip
    np.savez(tmp_path / "a.npz", **parts, labels=np.arange(20) % 4)
    ooc.ingest(tmp_path / "s.ooc", npz=tmp_path / "a.npz")
    with ooc.open(tmp_path / "s.ooc") as ds:
        np.testing.assert_array_equal(read(ds.rows("x")), attributes.toarray().astype(np.float32))
        assert (ds.num_edges, ds.num_classes) == (adjacency.nnz, 4)


def stream(**more: Any) -> TemporalData:
    """Events that are not in order of time."""
    count = 200
    rng = torch.Generator().manual_seed(1)
    ends = {name: torch.randint(0, N, (count,), generator=rng) for name in ("src", "dst")}
    t = torch.randint(0, 10**6, (count,), generator=rng)
    return TemporalData(**ends, t=t, msg=torch.rand(count, 3, generator=rng), y=torch.arange(count) % 2, **more)


@pytest.mark.cases(1)
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("sort", [False, True])
def test_a_temporal_data_becomes_the_same_stream(tmp_path: Path, sort: bool) -> None:
    given = stream(price=torch.rand(200, dtype=torch.float64).half())
    order = torch.argsort(given.t, stable=True)
    given = given[order] if sort else given
    with ooc.from_data(given, tmp_path / "s.ooc", undirected=True, time_unit="ms") as ds:
        assert (len(ds.events), ds.num_nodes, ds.events.unit) == (200, given.num_nodes, "ms")
        expected = stream(price=given.price) if sort else given
        batches = list(ooc.EventLoader(ds, 64))
        for name in ("src", "dst", "t"):
            assert torch.equal(torch.cat([batch[name] for batch in batches]), given[name] if sort else expected[name][order])
        for name in ("msg", "y", "price"):
            found = torch.cat([batch[name] for batch in batches])
            wanted = given[name] if sort else given[name][order]
            assert torch.equal(found, wanted.reshape(200, -1).to(found.dtype)), name
        window = next(iter(ooc.SnapshotLoader(ds, 10**6 + 1, labels="y", columns=["msg"])))
        assert window.edge_index.size(1) == 200
    assert verify(tmp_path / "s.ooc") == []


def test_what_a_temporal_data_has_besides_its_events_is_said(tmp_path: Path) -> None:
    given = stream(name="tiny", z=torch.rand(5, 2), cube=torch.rand(200, 2, 2), weight=torch.rand(200))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with ooc.from_data(given, tmp_path / "s.ooc") as ds:
            assert sorted(ds.events.columns) == ["msg", "y"]
    texts = [str(each.message) for each in said]
    assert "left out: name (str)" in texts
    left = "z (float32 [5, 2]), cube (float32 [200, 2, 2]), weight (float32 [200])"
    assert any(f"left out, as they are no columns of events: {left}" in text for text in texts)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (TemporalData(src=torch.arange(3), dst=torch.arange(3)), "data has no events: src, dst .* and t need the same length"),
        (TemporalData(src=torch.empty(0).long(), dst=torch.empty(0).long(), t=torch.empty(0)), "data has no events"),
        (
            TemporalData(src=torch.rand(3), dst=torch.arange(3), t=torch.arange(3)),
            "src, dst .whole numbers. and t",
        ),
        (
            TemporalData(src=torch.arange(3), dst=torch.arange(3), t=torch.tensor([0.0, torch.nan, 1])),
            "t is 'nan', not a finite number",
        ),
        (TemporalData(src=torch.arange(3) - 1, dst=torch.arange(3), t=torch.arange(3)), "-1"),
    ],
)
def test_a_temporal_data_without_events_is_refused(tmp_path: Path, given: TemporalData, words: str) -> None:
    with pytest.raises(InputError, match=words):
        ooc.from_data(given, tmp_path / "s.ooc")
    assert not (tmp_path / "s.ooc").exists()


def test_a_unit_of_times_is_for_times(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`time_unit` says what the times' numbers mean, but data has no times"):
        ooc.from_data(data(), tmp_path / "s.ooc", time_unit="ms")


class Streams:
    """A data set of one stream, for `ooc ingest --pyg`."""

    def __getitem__(self, index: int) -> TemporalData:
        return stream()


def test_ingest_reads_a_data_set_of_events(tmp_path: Path) -> None:
    name = "tests.ooc.pyg.test_build_store:Streams"
    assert main(["ingest", str(tmp_path / "s.ooc"), "--pyg", name, "--undirected", "--time-unit", "us"]) == 0
    ooc.ingest(tmp_path / "t.ooc", pyg=name, undirected=True, time_unit="us")
    given = stream()
    order = torch.argsort(given.t, stable=True)
    for each in ("s.ooc", "t.ooc"):
        with ooc.open(tmp_path / each) as ds:
            assert ds.events.unit == "us"
            np.testing.assert_array_equal(np.asarray(ds.events.map("dst")), given.dst[order])
            np.testing.assert_array_equal(np.asarray(ds.events.map("msg")), given.msg[order])
    with pytest.raises(ConfigError, match="`drop_duplicates` does not go with `time`"):
        ooc.ingest(tmp_path / "u.ooc", pyg=name, drop_duplicates=True)
