"""What a run learned, where its summary does not say it: of nodes, edges and graphs, whatever became of the store."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch_geometric.data import Data

import ooc
from ooc.config.edges import EdgeConfig
from ooc.config.graphs import GraphConfig
from ooc.config.labels import LabelConfig
from ooc.config.nodes import TrainConfig
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError
from ooc.training.learned import Learned, labels_of_edges, labels_of_graphs, labels_of_nodes, learned_labels
from ooc.training.loop import train

N, E = 40, 200
SMALL: dict[str, Any] = {"hidden": 4, "threads": 1, "max_steps": 1}
RATES, BACK = "user:rates:item", "item:rev_rates:user"
LATER = ("num_classes", "labels_of")
"""what summaries of earlier versions lack"""


def of_types(path: Path, classes: int = 3) -> Path:
    """Users with a label each, who rate items, each edge with a label."""
    rng = np.random.default_rng(classes)
    labels = [f"class {i % classes}" for i in range(E)]
    parts = ["train", "val"] * (E // 2)
    x = rng.standard_normal((N, 3)).astype(np.float32)
    items: dict[str, Any] = {"id": np.arange(N), **{f"f{i}": x[:, i] for i in range(3)}}
    users = {**items, "kind": labels[:N], "part": parts[:N]}
    edges = {"src": rng.integers(0, N, E), "dst": rng.integers(0, N, E), "stars": labels, "part": parts}
    ooc.ingest(
        path,
        nodes={"user": pa.table(users), "item": pa.table(items)},
        edges={RATES: pa.table(edges)},
        x_cols={"user": "f*", "item": "f*"},
        label={"user": "kind"},
        split={"user": "part"},
        edge_label={RATES: "stars"},
        edge_split={RATES: "part"},
        reverse=True,
    )
    return path


def of_graphs(path: Path, classes: int = 3) -> Path:
    """Graphs with a label each."""
    ends = torch.tensor([[0, 1, 2], [1, 2, 0]])
    graphs = [Data(x=torch.rand(3, 3), edge_index=ends, y=torch.tensor([i % classes])) for i in range(18)]
    ooc.from_data(graphs, path, random_split=(0.6, 0.2, 0.2)).close()
    return path


class Kind(NamedTuple):
    """Runs on labels of nodes, of edges or of graphs."""

    store: Callable[..., Path]
    config: Callable[..., LabelConfig]
    find: Callable[..., Any]
    of: str | None

    def run(self, store: Path, out: Path) -> LabelConfig:
        """A trained one."""
        config = self.config(store=store, out=out, **SMALL)
        train(config)
        return config

    def learned(self, config: LabelConfig, store: Path) -> Learned:
        """What the run learned, for outputs on that store."""
        find: Any = self.find if self.of is None else lambda manifest: self.find(config, manifest)
        with Dataset.open(store) as ds:
            return learned_labels(config.out, config, ds, find)


def typed(cls: Callable[..., LabelConfig], **more: Any) -> Callable[..., LabelConfig]:
    return lambda **settings: cls(model="rsage", fanout=[2, 2], **settings, **more)


KINDS = {
    "nodes": Kind(of_types, typed(TrainConfig), labels_of_nodes, "user"),
    "edges": Kind(of_types, typed(EdgeConfig), labels_of_edges, RATES),
    "reverse": Kind(of_types, typed(EdgeConfig, edge_type=BACK), labels_of_edges, BACK),
    "graphs": Kind(of_graphs, GraphConfig, labels_of_graphs, None),
}


def forget(config: LabelConfig, state: str) -> None:
    """Make the run one of an earlier version, or one that has not ended."""
    path = config.out / "summary.json"
    if state == "unfinished":
        path.unlink()
    if state == "earlier":
        path.write_text(json.dumps({name: value for name, value in json.loads(path.read_text()).items() if name not in LATER}))


@pytest.mark.parametrize("state", ["ended", "earlier", "unfinished"])
@pytest.mark.parametrize("name", list(KINDS))
def test_what_a_run_learned_is_known(tmp_path: Path, name: str, state: str) -> None:
    """Of its own store, wherever that is now, and where another one lies at its path; by its summary of any other store too."""
    kind = KINDS[name]
    config = kind.run(kind.store(tmp_path / "own.ooc"), tmp_path / "run")
    other = kind.store(tmp_path / "other.ooc", 4)
    expected = kind.learned(config, config.store)
    assert (expected.task.num_classes, expected.of) == (3, kind.of)
    assert (expected.class_names is None) == (name == "graphs")
    forget(config, state)
    assert kind.learned(config, config.store) == expected
    assert kind.learned(config, other) == expected
    shutil.move(tmp_path / "own.ooc", tmp_path / "moved.ooc")
    assert kind.learned(config, tmp_path / "moved.ooc") == expected
    shutil.copytree(other, tmp_path / "own.ooc")
    assert kind.learned(config, tmp_path / "moved.ooc") == expected


@pytest.mark.parametrize("name", ["nodes", "edges"])
def test_of_which_type_it_was_is_not_guessed(tmp_path: Path, name: str) -> None:
    """By another store's labels: that store may have them of another type."""
    kind = KINDS[name]
    config = kind.run(kind.store(tmp_path / "own.ooc"), tmp_path / "run")
    other = kind.store(tmp_path / "other.ooc", 4)
    shutil.rmtree(tmp_path / "own.ooc")
    assert kind.learned(config, other).of == kind.of
    forget(config, "unfinished")
    with pytest.raises(ConfigError, match=r"does not say which labels it learned, .*: give the store that it was trained on"):
        kind.learned(config, other)


def test_labels_of_a_homogeneous_store_stand_for_those_that_are_gone(tmp_path: Path) -> None:
    """Of the same kind."""
    kind = KINDS["graphs"]
    config = kind.run(kind.store(tmp_path / "own.ooc"), tmp_path / "run")
    other = kind.store(tmp_path / "other.ooc", 4)
    shutil.rmtree(tmp_path / "own.ooc")
    forget(config, "earlier")
    assert kind.learned(config, other).task.num_classes == 4
    two = kind.store(tmp_path / "two.ooc", 2)
    with pytest.raises(ConfigError, match=r"does not say which multiclass labels it learned, and neither does .*own\.ooc \("):
        kind.learned(config, two)
