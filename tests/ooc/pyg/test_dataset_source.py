"""PyG data sets as input, from an importable class."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

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
