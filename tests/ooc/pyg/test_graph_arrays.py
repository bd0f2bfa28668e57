"""Data sets of PyG graphs as stores: what each attribute is of, one graph after the other, and what is refused."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Batch, Data, HeteroData

import ooc
from ooc.pyg import graph_arrays
from ooc.pyg.dataset_source import ingest
from ooc.stores.errors import ConfigError, InputError
from ooc.stores.ingest import IngestSpec
from tests.ooc.many_graphs import assert_same_batch, random_graphs

warnings.filterwarnings("ignore", message="left out")


class Many:
    """A data set of `count` graphs."""

    def __init__(self, count: int) -> None:
        self.graphs = random_graphs(count)

    def __len__(self) -> int:
        return len(self.graphs)

    def __getitem__(self, index: int) -> Data:
        return self.graphs[index]


def batch_of(path: Path) -> Any:
    with ooc.open(path) as ds:
        return next(iter(ooc.GraphLoader(ds, batch_size=ds.num_graphs)))


def test_lists_iterators_batches_and_data_sets_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_arrays, "_FLUSH_BYTES", 300)
    graphs = random_graphs(20)
    data: dict[str, Any] = {"list": graphs, "iterator": iter(graphs), "batch": Batch.from_data_list(graphs), "set": Many(20)}
    for name, each in data.items():
        ooc.from_data(each, tmp_path / f"{name}.ooc").close()
        assert_same_batch(batch_of(tmp_path / f"{name}.ooc"), graphs)
    ingest(IngestSpec(out=tmp_path / "pyg.ooc", pyg=f"{__name__}:Many", arg=["count=20"]))
    assert_same_batch(batch_of(tmp_path / "pyg.ooc"), graphs)


def test_graphs_are_read_one_by_one(tmp_path: Path) -> None:
    """An iterator is asked for a graph only when the one before it was dropped."""
    alive = []

    def stream() -> Iterator[Data]:
        for graph in random_graphs(30):
            alive.append(torch.zeros(1))
            yield graph

    ooc.from_data(stream(), tmp_path / "s.ooc").close()
    assert len(alive) == 30
    assert not [path for path in tmp_path.iterdir() if path.name != "s.ooc"]


def test_ambiguous_sizes_are_settled_by_all_graphs_and_by_names(tmp_path: Path) -> None:
    """Graphs of one node and one edge alone say nothing of what an attribute is of."""
    one = {"edge_index": torch.zeros(2, 1, dtype=torch.long)}
    graphs = [
        Data(x=torch.ones(1, 2), edge_attr=torch.ones(1, 3), y=torch.tensor([1.0 * at % 2]), extra=torch.ones(1), **one)
        for at in range(3)
    ]
    ds = ooc.from_data(graphs, tmp_path / "ones.ooc")
    assert (ds.names, ds.manifest.edge_types[0].arrays, ds.graphs.names) == (["x"], ["edge_attr"], ["extra", "y"])
    ds.close()
    graphs.append(Data(x=torch.ones(2, 2), edge_attr=torch.ones(1, 3), y=torch.tensor([1.0]), extra=torch.ones(2), **one))
    with ooc.from_data(graphs, tmp_path / "other.ooc") as ds:
        assert ds.names == ["extra", "x"]
    assert_same_batch(batch_of(tmp_path / "other.ooc").__class__.from_data_list(graphs), graphs)


def test_labels_of_nodes_stay_theirs(tmp_path: Path) -> None:
    graphs = random_graphs(9)
    for graph in graphs:
        graph.y = torch.randint(0, 3, (graph.num_nodes,))
    with ooc.from_data({"train": graphs[:5], "val": graphs[5:]}, tmp_path / "s.ooc") as ds:
        assert (ds.task, ds.graphs.task, ds.graphs.splits) == ("multiclass", None, ["train", "val"])
        assert torch.equal(next(iter(ooc.GraphLoader(ds, 9))).y, torch.cat([graph.y for graph in graphs]))


REFUSED = [
    ([], r"data has no graphs: give one at least"),
    ([Data(x=torch.ones(0, 2), edge_index=torch.zeros(2, 0, dtype=torch.long))], r"data graph 0 has no nodes: leave it out"),
    ([Data(x=torch.ones(2, 2))], r"data graph 0 has no edge_index"),
    ([Data(x=torch.ones(2, 2), edge_index=torch.tensor([[0], [2]]))], r"graph 0: edge_index has node 2, and the graph has 2"),
    ([HeteroData()], r"data graph 0 is a HeteroData: it must be a Data"),
    (["graph"], r"data graph 0 is a str: it must be a Data"),
    ({"dev": [Data()]}, r"data has a split 'dev': name the data sets train, val and test"),
]


@pytest.mark.parametrize(("graphs", "message"), REFUSED)
def test_what_is_no_graph_is_refused(tmp_path: Path, graphs: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ooc.from_data(graphs, tmp_path / "s.ooc")
    assert list(tmp_path.iterdir()) == []


def test_graphs_have_the_same_attributes(tmp_path: Path) -> None:
    graphs = random_graphs(3)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"u": None}, r"data graph 3 has no u, which the graphs before it have"),
        ({"more": torch.ones(1)}, r"data graph 3 has more, which the graphs before it lack"),
        ({"u": torch.ones(1, 3)}, r"data graph 3: u is float32\[1, 3\], those before it float32\[\.\., 2\]"),
        ({"y": torch.tensor([[1, 2], [3, 4]])}, r"data graph 3: y is int64\[2, 2\]"),
    ]
    for change, message in changes:
        odd = random_graphs(1)[0]
        odd.update(change)
        with pytest.raises(InputError, match=message):
            ooc.from_data([*graphs, odd], tmp_path / "s.ooc")
        assert list(tmp_path.iterdir()) == []


def test_masks_to_choose_from_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`split_index` chooses among the splits of masks, and there are none"):
        ooc.from_data(random_graphs(3), tmp_path / "s.ooc", split_index=1)


def test_labels_of_no_shape_are_refused(tmp_path: Path) -> None:
    edges = torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(InputError, match=r"y .* has no row per graph, node or edge; give \[1, C\]"):
        ooc.from_data([Data(x=torch.ones(4, 2), edge_index=edges, y=torch.ones(5)) for _ in range(3)], tmp_path / "s.ooc")


def test_names_that_the_store_takes_are_left_out(tmp_path: Path) -> None:
    graphs = random_graphs(6)
    for graph in graphs:
        graph.split, graph.edge_ptr, graph.train, graph.kind = 9, 9, True, 5
    with pytest.warns(UserWarning, match=r"left out: split \(the store has another array of that name\), edge_ptr .*, train "):
        ooc.from_data(graphs, tmp_path / "s.ooc", random_split=(0.5, 0.5, 0)).close()
    with ooc.open(tmp_path / "s.ooc") as ds:
        assert {name: len(ds.graphs.split(name)) for name in ds.graphs.splits} == {"train": 3, "val": 3}
        assert ds.graphs.edge_ptr[-1] == ds.num_edges
        assert "kind" in ds.graphs.names


def test_two_edges_in_all_are_two_edges(tmp_path: Path) -> None:
    graphs = [
        Data(x=torch.ones(3, 1), edge_index=torch.tensor([[0], [2]])),
        Data(x=torch.ones(2, 1), edge_index=torch.tensor([[1], [0]])),
    ]
    ooc.from_data(graphs, tmp_path / "two.ooc").close()
    assert batch_of(tmp_path / "two.ooc").edge_index.tolist() == [[0, 4], [2, 3]]
    none = [Data(x=torch.ones(2, 1), edge_index=torch.zeros(2, 0, dtype=torch.long)) for _ in range(2)]
    ooc.from_data(none, tmp_path / "none.ooc").close()
    assert batch_of(tmp_path / "none.ooc").edge_index.shape == (2, 0)


def test_undirected_graphs_have_both_directions(tmp_path: Path) -> None:
    graphs = random_graphs(30)
    with ooc.from_data(graphs, tmp_path / "s.ooc", undirected=True) as ds:
        batch = next(iter(ooc.GraphLoader(ds, 30, edge_ids=True)))
        whole = torch.cat([graph.edge_attr for graph in graphs])
        assert torch.equal(batch.edge_attr, whole[batch.e_id])
        loops = sum(int((graph.edge_index[0] == graph.edge_index[1]).sum()) for graph in graphs)
        assert batch.num_edges == 2 * len(whole) - loops
        assert np.array_equal(batch.batch[batch.edge_index[0]], batch.batch[batch.edge_index[1]])
