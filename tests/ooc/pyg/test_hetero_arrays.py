"""`ooc.from_data`, `ooc.ingest` and `ooc ingest` of heterogeneous graphs, against PyG's own."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch_geometric.transforms as T
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.data import Dataset as Dataset_of_PyG

import ooc
from ooc.cli.main import main
from ooc.pyg.dataset_source import ingest as from_pyg
from ooc.stores.array_names import EdgeKey
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError, InputError
from ooc.stores.ingest import IngestSpec
from ooc.stores.integrity import verify

WRITES, CITES, REV = ("author", "writes", "paper"), ("paper", "cites", "paper"), ("paper", "rev_writes", "author")


def academic(**of_papers: Any) -> HeteroData:
    generator = torch.Generator().manual_seed(0)
    data = HeteroData()
    data["paper"].x = torch.rand(30, 4, generator=generator)
    data["paper"].y = torch.arange(30) % 3
    data["paper"].train_mask = torch.arange(30) < 10
    for name, value in of_papers.items():
        data["paper"][name] = value
    data["author"].num_nodes = 12
    ends = torch.randint(0, 30, (2, 70), generator=generator)
    data[WRITES].edge_index = torch.stack([ends[0] % 12, ends[1]])
    data[WRITES].edge_attr = torch.rand(70, 2, generator=generator)
    data[WRITES].time = torch.arange(70).flip(0)
    data[CITES].edge_index = torch.randint(0, 30, (2, 50), generator=generator)
    data[CITES].edge_weight = torch.rand(50, generator=generator)
    return data


def test_an_edge_type_whose_end_has_no_nodes_is_named(tmp_path: Path) -> None:
    data = academic()
    data["paper", "in", "venue"].edge_index = torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(InputError, match=r"ends of type 'venue', which has no nodes: set data\['venue'\].num_nodes"):
        ooc.from_data(data, tmp_path / "s.ooc")
    with pytest.raises(ConfigError, match="`label` is given by type: give `edges` by type too"):
        ooc.ingest(tmp_path / "s.ooc", edges=np.zeros((2, 3), int), num_nodes=3, label={"paper": "y"})
    assert not any(tmp_path.iterdir())


def bipartite() -> HeteroData:
    """Nodes and edges without labels and times."""
    data = HeteroData(user={"num_nodes": 3}, item={"num_nodes": 4})
    data["user", "buys", "item"].edge_index = torch.tensor([[0, 1, 2, 2], [3, 2, 1, 0]])
    return data


def empty_type() -> HeteroData:
    """The same, and a type without nodes."""
    data = bipartite()
    data["shop"].num_nodes = 0
    return data


def edges_of(ds: Dataset, key: EdgeKey) -> np.ndarray:
    """[2, E] in the input's order."""
    graph = ds.edges(key).graph
    target = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr))
    found = np.empty((2, graph.num_edges), np.int64)
    found[:, graph.edge_ids(np.arange(graph.num_edges))] = np.stack([np.asarray(graph.indices), target])
    return found


@pytest.mark.filterwarnings("ignore:stored")
def test_a_heterodata_becomes_a_data_set_of_the_same_graph(tmp_path: Path) -> None:
    data = T.ToUndirected(merge=False)(academic(year=torch.arange(30) + 1990))
    with ooc.from_data(data, tmp_path / "s.ooc") as ds:
        assert ds.metadata() == data.metadata()
        assert verify(ds.path) == []
        for key in data.edge_types:
            np.testing.assert_array_equal(edges_of(ds, key), data[key].edge_index)
        papers, out = ds.nodes("paper"), np.empty((30, 4), np.float32)
        papers.rows("x").read(np.arange(30), out)
        np.testing.assert_array_equal(out, data["paper"].x)
        np.testing.assert_array_equal(papers.labels, data["paper"].y)
        assert papers.split("train").tolist() == list(range(10))
        assert papers.names == ["split", "x", "y", "year"]
        assert (ds.nodes("author").num_nodes, ds.nodes("author").names) == (12, [])
        writes, attr = ds.edges(WRITES), np.empty((70, 2), np.float32)
        writes.features("edge_attr").read(np.arange(70), attr)
        np.testing.assert_array_equal(attr, data[WRITES].edge_attr)
        for v in range(30):  # within a destination by time
            times = writes.graph.columns["time"][slice(*writes.graph.slots(v))]
            assert (np.diff(times) >= 0).all()
        graph = ds.edges(CITES).graph
        weight = data[CITES].edge_weight.numpy()[graph.edge_ids(np.arange(50))]
        np.testing.assert_array_equal(graph.columns["weight"], weight)
        assert ds.edges(REV).reverse_of == WRITES
        assert ds.edges(("paper", "rev_cites", "paper")).reverse_of == CITES
        assert ds.edges(WRITES).reverse_of is None


def test_labels_and_splits_of_the_edges_of_a_type(tmp_path: Path) -> None:
    data = academic()
    data[WRITES].y = torch.arange(70) % 2
    data[WRITES].train_mask = torch.arange(70) < 20
    with ooc.from_data(data, tmp_path / "s.ooc", reverse=True) as ds:
        for key in (WRITES, REV):
            edges = ds.edges(key)
            assert (edges.task, edges.splits, edges.names) == ("binary", ["train"], ["edge_attr"])
            np.testing.assert_array_equal(edges.labels, data[WRITES].y)
            members = edges.members("train")
            assert sorted(edges.graph.edge_ids(members[np.arange(20)]).tolist()) == list(range(20))
        assert ds.edges(CITES).labels is None


def test_settings_reach_the_edges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bipartite()
    data["user", "buys", "item"].edge_y = torch.tensor([5, 3, 1, 1])
    with ooc.from_data(data, tmp_path / "s.ooc", task="regression") as ds:
        assert ds.edges(("user", "buys", "item")).task == "regression"
    data["user", "buys", "item"].edge_index[0, 0] = 9
    monkeypatch.setattr(f"{__name__}.datasets", lambda: [data])
    result = from_pyg(IngestSpec(out=tmp_path / "t.ooc", pyg=f"{__name__}:datasets", drop_missing=True))
    assert (result.num_edges, result.dropped) == (3, {"missing": 1})


def test_edges_without_an_edge_index(tmp_path: Path) -> None:
    """PyG gives only edges of torch_sparse an edge_index."""
    data, key = bipartite(), ("user", "buys", "item")
    edges = data[key].edge_index
    data[key].adj_t = torch.sparse_coo_tensor(edges.flip(0), torch.ones(4), (4, 3))
    del data[key].edge_index
    with ooc.from_data(data, tmp_path / "s.ooc") as ds:
        assert sorted(edges_of(ds, key).T.tolist()) == sorted(edges.T.tolist())
    del data[key].adj_t
    with pytest.raises(InputError, match=r"data\[\('user', 'buys', 'item'\)\] has no edge_index"):
        ooc.from_data(data, tmp_path / "t.ooc")


def test_names_that_the_store_takes_are_left_out(tmp_path: Path) -> None:
    data, key = bipartite(), ("user", "buys", "item")
    data[key].edge_y, data[key].y = torch.arange(4) % 2, torch.full((4,), 7)
    data[key].split, data[key].split_train = torch.full((4,), 8), torch.full((4,), 9)
    data[key].train_mask = torch.tensor([True, True, False, False])
    data["user"].split_train = torch.ones(3)
    with pytest.warns(UserWarning, match=r"left out.*: y \(int64 \[4\]\), split \(int64 \[4\]\), split_train \(int64 \[4\]\)"):
        ooc.from_data(data, tmp_path / "s.ooc").close()
    with ooc.open(tmp_path / "s.ooc") as ds:
        edges = ds.edges(key)
        assert edges.labels is not None
        assert (edges.labels.tolist(), len(edges.members("train")), edges.names) == ([0, 1, 0, 1], 2, [])
        assert ds.nodes("user").names == []


def test_a_reverse_with_labels_of_its_own(tmp_path: Path) -> None:
    data = academic()
    data[REV].edge_index = data[WRITES].edge_index.flip(0)
    del data[REV].edge_attr
    data[REV].y = torch.arange(70) % 2
    with ooc.from_data(data, tmp_path / "s.ooc") as ds:
        assert ds.edges(REV).reverse_of == WRITES
        assert ds.edges(REV).task == "binary"
        assert ds.edges(WRITES).task is None


def test_other_edges_called_reverse_are_none(tmp_path: Path) -> None:
    data = academic()
    data[REV].edge_index = data[WRITES].edge_index.flip(0).flip(1)  # in another order: other edge ids
    with ooc.from_data(data, tmp_path / "s.ooc") as ds:
        assert ds.edges(REV).reverse_of is None


def test_reverse_is_pygs_to_undirected_without_merging(tmp_path: Path) -> None:
    data = academic()
    with ooc.from_data(data, tmp_path / "s.ooc", reverse=True) as ds:
        want = T.ToUndirected(merge=False)(data)
        assert ds.edge_types == want.edge_types
        for key in want.edge_types:
            np.testing.assert_array_equal(edges_of(ds, key), want[key].edge_index)
        attr = np.empty((70, 2), np.float32)
        ds.edges(REV).features("edge_attr").read(np.arange(70), attr)
        np.testing.assert_array_equal(attr, want[REV].edge_attr)


@pytest.mark.parametrize(
    ("data", "settings", "error", "words"),
    [
        (academic(), {"parts": 3}, ConfigError, "`parts` is for graphs of one type"),
        (academic(x=torch.full((30, 4), torch.inf)), {}, InputError, r"x\].*infinite"),
        (academic(train_mask=torch.ones(7, dtype=torch.bool)), {}, InputError, "train_mask"),
        (bipartite(), {"undirected": True}, ConfigError, "`undirected` is for edges between nodes of one type"),
        (bipartite(), {"task": "regression"}, ConfigError, "`task='regression'` .* there are none"),
        (bipartite(), {"split_index": 0}, ConfigError, "`split_index` chooses among the splits of masks, and there are none"),
        (bipartite(), {"time_unit": "ms"}, ConfigError, "`time_unit` .* no edges have `time`"),
        (HeteroData(paper={"x": torch.ones(3, 1)}), {}, InputError, "no edge types"),
        (
            empty_type(),
            {},
            InputError,
            r"data\['shop'\]\[num_nodes\] holds \[0\]: .* at least 1, the nodes of the type: leave out",
        ),
        (
            Batch.from_data_list([bipartite(), bipartite()]),
            {},
            InputError,
            "data is a batch of HeteroData: many graphs have one",
        ),
        (Data(edge_index=torch.zeros(2, 3, dtype=torch.long), num_nodes=4), {"reverse": True}, ConfigError, "edges have none"),
    ],
)
def test_what_does_not_fit_leaves_nothing(tmp_path: Path, data: Any, settings: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        ooc.from_data(data, tmp_path / "s.ooc", **settings)
    assert list(tmp_path.iterdir()) == []


def test_random_splits_are_of_the_types_with_labels(tmp_path: Path) -> None:
    with ooc.from_data(academic(), tmp_path / "s.ooc", random_split=(0.5, 0.25, 0.25), seed=1) as ds:
        assert {name: len(ds.nodes("paper").split(name)) for name in ds.nodes("paper").splits} == {
            "train": 15,
            "val": 7,
            "test": 8,
        }
        assert ds.nodes("author").splits == []


def datasets() -> list[HeteroData]:
    return [academic()]


def test_a_pyg_data_set_of_a_heterodata(tmp_path: Path) -> None:
    result = from_pyg(IngestSpec(out=tmp_path / "s.ooc", pyg="tests.ooc.pyg.test_hetero_arrays:datasets", reverse=True))
    assert (result.num_nodes, result.num_edges) == (42, 240)


class OnlyItem(Dataset_of_PyG):  # type: ignore[misc]
    """A data set of PyG's with one graph of several types, as OGB_MAG."""

    def __init__(self) -> None:
        super().__init__()

    def len(self) -> int:
        return 1

    def get(self, idx: int) -> HeteroData:
        return academic()


def test_a_data_set_of_one_graph_is_that_graph(tmp_path: Path) -> None:
    with ooc.from_data(OnlyItem(), tmp_path / "s.ooc") as ds:
        assert ds.num_nodes == 42


BUYS = ("user", "buys", "item")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"edges": {1: None}}, "`edges` of type 1: an edge type is .source, name, target., in text"),
        ({"edges": {(1, 2, 3): None}}, "`edges` of type .1, 2, 3.: an edge type is"),
        ({"nodes": {1: None}}, "`nodes` of type 1: a node type is its name, in text"),
        ({"edges": {BUYS: None}}, "`edges` of user:buys:item is None: give files, an array or a table"),
        ({"edges": {}}, "`edges` names no edge type"),
        ({"labels": np.arange(30)}, "`labels` is a ndarray: say of which type, in a mapping by type as `edges` is"),
        ({"nodes": pd.DataFrame({"id": [0, 1]})}, "`nodes` is a DataFrame: say of which type"),
    ],
)
def test_values_that_are_of_no_type(tmp_path: Path, given: Any, words: str) -> None:
    with pytest.raises((ConfigError, InputError), match=words):
        ooc.ingest(tmp_path / "s.ooc", **{"edges": {BUYS: np.array([[0, 1], [1, 0]])}, **given})
    assert list(tmp_path.iterdir()) == []


def test_frames_and_arrays_by_type(tmp_path: Path) -> None:
    data = academic()
    papers = pd.DataFrame({"id": [f"p{i}" for i in range(30)], "topic": ["a", "b", "c"] * 10, "f": np.arange(30) / 7})
    writes = pd.DataFrame({"src": data[WRITES].edge_index[0], "dst": [f"p{i}" for i in data[WRITES].edge_index[1].tolist()]})
    result = ooc.ingest(
        tmp_path / "s.ooc",
        nodes={"paper": papers, "author": None},
        num_nodes={"author": 12},
        edges={WRITES: writes},
        label={"paper": "topic"},
        x_cols={"paper": ["f"]},
        features={"author": {"x": np.ones((12, 2), np.float32)}},
        edge_features={WRITES: {"edge_attr": data[WRITES].edge_attr}},
        random_split={"paper": (0.5, 0.25, 0.25)},
        reverse=True,
    )
    with Dataset.open(result.path) as ds:
        np.testing.assert_array_equal(edges_of(ds, WRITES), data[WRITES].edge_index)
        assert ds.nodes("paper").class_names == ["a", "b", "c"]
        assert (ds.nodes("author").num_features, ds.nodes("paper").num_features) == (2, 1)
        assert ds.nodes("paper").row("p7") == 7


def test_the_command_line_ingests_describes_and_verifies_types(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    pd.DataFrame({"id": range(5), "topic": [0, 1, 0, 1, 1]}).to_csv("papers.csv", index=False)
    pd.DataFrame({"src": ["ann", "bob", "ann"], "dst": [0, 4, 2]}).to_parquet("writes.parquet")
    command = "ingest s.ooc --nodes paper=papers.csv --nodes author --edges author:writes:paper=writes.parquet --reverse"
    assert main([*command.split(), "--label", "paper=topic"]) == 0
    assert "7 nodes, 6 edges" in capsys.readouterr().out
    assert main(["info", "s.ooc"]) == 0
    shown = capsys.readouterr().out
    assert "paper                    5 nodes, binary, 2 classes" in shown
    assert "paper:rev_writes:author  3 edges, directed, unweighted, without self-loops, reverse of author:writes:paper" in shown
    assert main(["verify", "s.ooc"]) == 0
    assert main(["append", "s.ooc", "--edges", "writes.parquet"]) == 2
    assert "is heterogeneous" in capsys.readouterr().err
    assert main(["split", "s.ooc", "--random-split", "0.5,0.2,0.2"]) == 2
    assert "s.ooc has several node types: give one of paper, author as --node-type" in capsys.readouterr().err
    assert main(["split", "s.ooc", "--random-split", "0.6,0.2,0.2", "--node-type", "paper"]) == 0
    assert main(["info", "s.ooc"]) == 0
    told = capsys.readouterr().out
    assert "paper                    5 nodes, binary, 2 classes, train 3, val 1, test 1" in told
    arrays = told.partition("  arrays\n")[2].splitlines()
    assert len({len(line) - len(line.split(maxsplit=1)[1]) for line in arrays}) == 1, "the columns are aligned"
    assert main(["info", "s.ooc", "--id", "author:bob"]) == 0
    assert capsys.readouterr().out == "1\n"
    for text, message in (
        ("bob", "say of which, as in paper:bob"),
        ("writer:bob", "has no node type 'writer'"),
        ("author:c", "no node has"),
    ):
        assert main(["info", "s.ooc", "--id", text]) == 2
        assert message in capsys.readouterr().err
    assert main(["verify", "s.ooc"]) == 0
    assert main([*command.replace("s.ooc", "t.ooc").split(), "--label", "papr=topic"]) == 2
    assert "--label: there is no node type 'papr'" in capsys.readouterr().err
    assert main([*command.replace("s.ooc", "t.ooc").split(), "--edges", "author:writes:paper=papers.csv"]) == 2
    assert "is given twice" in capsys.readouterr().err
    assert not Path("t.ooc").exists()
    assert main(["compact", "s.ooc"]) == 0
