"""PyG data sets as input, from an importable class."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData, InMemoryDataset, TemporalData

from ooc.pyg.dataset_source import arguments, ingest
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError, InputError
from ooc.stores.ingest import IngestSpec


class Tiny:
    """A data set whose item 0 is a random graph of `nodes` nodes with ten splits."""

    def __init__(self, nodes: int, hetero: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        edges = torch.randint(0, nodes, (2, 4 * nodes), generator=generator)
        self.masks = torch.rand(nodes, 10, generator=generator) < 0.5
        x = torch.rand(nodes, 3, generator=generator)
        self.data = Data(
            x=x, edge_index=edges, y=torch.arange(nodes) % 3, train_mask=self.masks, edge_weight=torch.rand(4 * nodes)
        )
        self.hetero = hetero

    def __getitem__(self, index: int) -> Any:
        return {"not": "a Data"} if self.hetero else self.data


def spec(out: Path, *arg: str, **options: Any) -> IngestSpec:
    return IngestSpec(out=out, pyg=f"{__name__}:Tiny", arg=list(arg), **options)


def test_a_data_set_becomes_a_store(tmp_path: Path) -> None:
    ingest(spec(tmp_path / "s.ooc", "nodes=30", split_index=4))
    tiny = Tiny(30)
    with Dataset.open(tmp_path / "s.ooc") as ds:
        order = np.argsort(tiny.data.edge_index[1].numpy(), kind="stable")
        np.testing.assert_array_equal(np.asarray(ds.graph.indices), tiny.data.edge_index[0].numpy()[order])
        assert ds.split("train").tolist() == tiny.masks[:, 4].nonzero().flatten().tolist()
        assert (ds.num_features, ds.task, ds.manifest.weighted) == (3, "multiclass", True)


def test_arguments_are_json_or_text() -> None:
    assert arguments(["name=Cora", "n=3", "flag=true", 's="0"']) == {"name": "Cora", "n": 3, "flag": True, "s": "0"}
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        arguments(["Cora"])


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no data set torch_geometric\.datasets\.Plantoid"):
        ingest(IngestSpec(out=tmp_path / "s.ooc", pyg="Plantoid"))
    with pytest.raises(ConfigError, match="cannot be constructed with"):
        ingest(spec(tmp_path / "s.ooc", "knots=30"))
    with pytest.raises(InputError, match=r"item 0 .* is a dict"):
        ingest(spec(tmp_path / "s.ooc", "nodes=30", "hetero=true"))
    assert not list(tmp_path.iterdir())


def test_a_class_in_the_working_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import torch\nfrom torch_geometric.data import Data\n\ndef Pair():\n"
    source += "    return [Data(edge_index=torch.tensor([[0], [1]]), num_nodes=2)]\n"
    (tmp_path / "own_data_set.py").write_text(source)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.chdir(tmp_path)
    assert ingest(IngestSpec(out=tmp_path / "s.ooc", pyg="own_data_set:Pair")).num_edges == 1


def test_what_torch_saved_is_taken(tmp_path: Path) -> None:
    """A graph, one of several types, a stream and a list of graphs, each as `from_data` takes it."""
    pair = torch.tensor([[0, 1], [1, 2]])
    hetero = HeteroData(user={"num_nodes": 3}, item={"num_nodes": 3})
    hetero["user", "buys", "item"].edge_index = pair
    data: dict[str, Any] = {
        "data": Data(x=torch.rand(3, 2), edge_index=pair),
        "hetero": hetero,
        "stream": TemporalData(src=pair[0], dst=pair[1], t=torch.tensor([3, 4])),
        "list": [Data(x=torch.rand(3, 2), edge_index=pair, y=torch.tensor([at % 2])) for at in range(4)],
    }
    for name, each in data.items():
        torch.save(each, tmp_path / f"{name}.pt")
    InMemoryDataset.save(data["list"], str(tmp_path / "set.pt"))
    InMemoryDataset.save([hetero], str(tmp_path / "set of one.pt"))
    for name in [*data, "set", "set of one"]:
        result = ingest(IngestSpec(out=tmp_path / name, pyg=str(tmp_path / f"{name}.pt")))
        with Dataset.open(result.path) as ds:
            assert (ds.num_edges, ds.num_graphs) == ((8, 4) if name in ("list", "set") else (2, 1))
            assert ds.is_hetero == (name in ("hetero", "set of one"))
            assert (ds.manifest.time is not None) == (name == "stream")


class Harmful:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('ran what a file told it')",)


def test_files_that_hold_no_graphs_are_refused_without_running_them(tmp_path: Path) -> None:
    torch.save([Harmful()], tmp_path / "harmful.pt")
    torch.save({"a": torch.ones(3)}, tmp_path / "dict.pt")
    (tmp_path / "text.pt").write_text("no graph")
    for name, message in (
        ("harmful", r"harmful\.pt does not hold PyG's graphs alone, .* give the graphs to `ooc\.from_data`"),
        ("text", r"text\.pt is no file of torch\.save, or damaged"),
        ("none", r"there is no file .*none\.pt"),
        ("dict", r"dict\.pt has a split 'a': name the data sets train, val and test"),
    ):
        with pytest.raises(InputError, match=message):
            ingest(IngestSpec(out=tmp_path / "s.ooc", pyg=str(tmp_path / f"{name}.pt")))
    with pytest.raises(ConfigError, match="`arg` is for the class of a data set"):
        ingest(IngestSpec(out=tmp_path / "s.ooc", pyg=str(tmp_path / "dict.pt"), arg=["a=1"]))
    assert {path.suffix for path in tmp_path.iterdir()} == {".pt"}
