"""Labels and splits of edges: from tables and PyG's data to the store, and to batches of LinkNeighborLoader."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch_geometric.data import Data

import ooc
from ooc.stores.errors import ConfigError, InputError
from tests.conftest import random_edges

N, E = 40, 200
SRC, DST = random_edges(N, E)
SPLIT = np.array(["train", "val", "test", ""])[np.arange(E) % 4]
KIND = np.arange(E) % 3
CLASSES = ["good", "bad", "odd"]
SCORE = np.random.default_rng(0).standard_normal((E, 2))


def table(folder: Path, **columns: Any) -> str:
    given = {"src": SRC, "dst": DST, "when": np.arange(E)[::-1], "w": SCORE[:, 0], "part": SPLIT, **columns}
    pq.write_table(pa.table(given), folder / "edges.parquet")
    return str(folder / "edges.parquet")


@pytest.mark.parametrize("undirected", [False, True])
@pytest.mark.parametrize("time", [None, "when"])
def test_labels_and_splits_of_edges_reach_batches(tmp_path: Path, undirected: bool, time: str | None) -> None:
    words = np.array(CLASSES)[KIND]
    options: dict[str, Any] = {"time": time, "undirected": undirected, "num_nodes": N, "edge_features": ["edge_attr=w"]}
    result = ooc.ingest(
        tmp_path / "s.ooc", edges=table(tmp_path, kind=words), edge_label="kind", edge_split="part",
        features={"x": np.eye(N, dtype=np.float32)}, **options,
    )  # fmt: skip
    assert not [note for note in result.notes if "edge_attr" in note]
    assert ooc.verify(tmp_path / "s.ooc") == []
    position = np.arange(E)[::-1] if time else np.arange(E)  # of an edge id: events are in order of time
    with ooc.open(tmp_path / "s.ooc") as ds:
        edges = ds.edges()
        assert (edges.task, edges.num_classes, edges.class_names) == ("multiclass", 3, sorted(CLASSES))
        assert edges.labels is not None
        assert np.array(sorted(CLASSES))[edges.labels].tolist() == words[position].tolist()
        assert edges.splits == ["train", "val", "test"]
        for name in edges.splits:
            members = edges.members(name)
            e_id = ds.graph.edge_ids(members[np.arange(len(members))])
            assert sorted(position[e_id]) == np.flatnonzero(name == SPLIT).tolist()
        loader = ooc.LinkNeighborLoader(ds, [2, 2], edge_label_index="train", edge_label="y", batch_size=20, seed=0)
        seen = []
        for batch in loader:
            place = position[batch.input_id]
            seen += place.tolist()
            ends = batch.n_id[batch.edge_label_index].numpy()
            wanted = np.stack([SRC[place], DST[place]])
            assert (np.sort(ends, 0) == np.sort(wanted, 0)).all()
            assert undirected or (ends == wanted).all()
            assert batch.edge_label.dtype == torch.int64
            assert np.array(sorted(CLASSES))[batch.edge_label].tolist() == words[place].tolist()
            assert torch.equal(batch.edge_attr.view(-1), torch.from_numpy(SCORE[position[batch.e_id], 0]).float())
        assert sorted(seen) == np.flatnonzero(SPLIT == "train").tolist()
        with pytest.raises(ConfigError, match="or one of the store's splits of edges: train, val, test"):
            ooc.LinkNeighborLoader(ds, [2], edge_label_index="all")
        with pytest.raises(ConfigError, match="leave out neg_sampling"):
            ooc.LinkNeighborLoader(ds, [2], edge_label="y", neg_sampling="binary")
        with pytest.raises(InputError, match="no split 'dev' of edges"):
            edges.members("dev")
    more = pa.table({"src": [0], "dst": [1], "when": [7], "w": [0.5], "kind": ["odd"], "part": ["val"]})
    with pytest.raises(ConfigError, match="have labels: name the column" if time else "edge features"):
        ooc.append(tmp_path / "s.ooc", edges=more, time=time, edge_features=["edge_attr=w"])


def test_a_data_set_of_pyg_has_targets_and_masks_of_edges(tmp_path: Path) -> None:
    data = Data(edge_index=torch.from_numpy(np.stack([SRC, DST])), num_nodes=N, edge_y=torch.from_numpy(SCORE).float())
    data.edge_train_mask, data.edge_test_mask = torch.arange(E) < 120, torch.arange(E) >= 100
    with pytest.warns(UserWarning, match="splits train and test share 20 edges"):
        ds = ooc.from_data(data, tmp_path / "s.ooc")
    with ds:
        edges = ds.edges()
        assert (edges.task, edges.num_classes, edges.splits) == ("regression", 2, ["train", "test"])
        np.testing.assert_array_equal(edges.labels, SCORE.astype(np.float32))
        assert [len(edges.members(name)) for name in edges.splits] == [120, 100]
        batch = next(iter(ooc.LinkNeighborLoader(ds, [-1], edge_label_index="test", edge_label="y", batch_size=9)))
        np.testing.assert_array_equal(batch.edge_label, SCORE[batch.input_id].astype(np.float32))
        assert ds.task is None


def test_what_is_no_label_is_refused(tmp_path: Path) -> None:
    given: dict[str, Any] = {"edges": table(tmp_path, kind=KIND + (np.arange(E) == 7) * 0.5), "num_nodes": N}
    with pytest.raises(InputError, match="row 7: label"):
        ooc.ingest(tmp_path / "a.ooc", edge_label="kind", **given)
    with pytest.raises(InputError, match="no column 'sort'"):
        ooc.ingest(tmp_path / "b.ooc", edge_label="sort", **given)
    with pytest.raises(InputError, match="a split is train, val or test"):
        ooc.ingest(tmp_path / "c.ooc", edge_split="kind", **given)
    with pytest.raises(ConfigError, match="the name 'y' is taken"):
        ooc.ingest(tmp_path / "d.ooc", edge_label="kind", edge_features=["y=w"], **given)
    plain = table(tmp_path)
    ooc.ingest(tmp_path / "e.ooc", edges=plain, num_nodes=N)
    with ooc.open(tmp_path / "e.ooc") as ds:
        assert (ds.edges().labels, ds.edges().splits) == (None, [])
        with pytest.raises(ConfigError, match="no labels of edges"):
            ooc.LinkNeighborLoader(ds, [2], edge_label="y")
