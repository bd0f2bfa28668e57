"""Links with relations: of labels, of edge types, of none; and their splits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData

import ooc
from ooc.layerwise.filtered_ranks import TableInOrder
from ooc.loading.relation_links import RelationLinks, RelationSplit
from ooc.models.link_scores import make_scorer
from ooc.stores.arrays.rows import ArrayRows
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError
from ooc.training.trained_table import TrainedTable

N, E = 50, 400


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    rng = np.random.default_rng(0)
    triples, part = np.stack([rng.integers(0, N, E), rng.integers(0, 7, E), rng.integers(0, N, E)], 1), rng.random(E)
    data = Data(num_nodes=N, edge_index=torch.from_numpy(triples[:, [0, 2]].T.copy()), edge_y=torch.from_numpy(triples[:, 1]))
    data.edge_train_mask, data.edge_val_mask = torch.from_numpy(part < 0.7), torch.from_numpy((part >= 0.7) & (part < 0.8))
    data.edge_test_mask = torch.from_numpy(part >= 0.8)
    path = tmp_path_factory.mktemp("links") / "labelled.ooc"
    ooc.from_data(data, path).close()
    return path, triples, part


def gathered(pieces: Any) -> list[tuple[int, int, int]]:
    return sorted(zip(*(np.concatenate(each).tolist() for each in zip(*pieces, strict=True)), strict=True))


@pytest.mark.parametrize("memory", [0, 10**9])
def test_labels_are_relations_and_splits_are_the_stores(labelled: Any, memory: int) -> None:
    path, triples, part = labelled
    with Dataset.open(path) as ds:
        links = RelationLinks(ds, None, relations=True)
        assert (links.num_nodes, links.num_relations, links.num_edges) == (N, 7, E)
        assert gathered(links.pieces(memory=memory)) == sorted(map(tuple, triples.tolist()))
        split = RelationSplit(links, None)
        for name, low, high in (("train", 0, 0.7), ("val", 0.7, 0.8), ("test", 0.8, 2)):
            own = triples[(part >= low) & (part < high)]
            assert split.count(name) == len(own)
            assert sorted(zip(*(each.tolist() for each in split.links(name)), strict=True)) == sorted(map(tuple, own.tolist()))
        none = RelationLinks(ds, None, relations=False)
        assert none.num_relations == 0
        assert gathered(none.pieces()) == sorted((h, 0, t) for h, _, t in triples.tolist())


def test_a_random_split_divides_the_links(labelled: Any) -> None:
    with Dataset.open(labelled[0]) as ds:
        split = RelationSplit(RelationLinks(ds, None, relations=True), (0.2, 0.1), seed=4)
        found = [split.count(name) for name in ("train", "val", "test")]
        assert sum(found) == E
        assert 40 < found[1] < 120
        assert 15 < found[2] < 70


def test_edge_types_are_relations_and_types_stand_behind_one_another(tmp_path: Path) -> None:
    rng, data = np.random.default_rng(1), HeteroData()
    data["user"].num_nodes, data["item"].num_nodes = 20, 30
    likes, knows = rng.integers(0, 20, (2, 60)), rng.integers(0, 20, (2, 40))
    likes[1] = rng.integers(0, 30, 60)
    data["user", "likes", "item"].edge_index, data["user", "knows", "user"].edge_index = map(torch.from_numpy, (likes, knows))
    ooc.from_data(data, tmp_path / "s.ooc").close()
    with Dataset.open(tmp_path / "s.ooc") as ds:
        links = RelationLinks(ds, None, relations=True)
        user, item = links.first["user"], links.first["item"]
        order = [key[1] for key in ds.edge_types]
        expected = [(h + user, order.index("likes"), t + item) for h, t in likes.T.tolist()]
        expected += [(h + user, order.index("knows"), t + user) for h, t in knows.T.tolist()]
        assert (links.num_relations, links.num_nodes) == (2, 50)
        assert gathered(links.pieces()) == sorted(expected)
        one = RelationLinks(ds, "likes", relations=False)
        assert (one.heads, one.tails) == (range(20), range(20, 50))
        assert gathered(one.pieces()) == sorted((h, 0, t + 20) for h, t in likes.T.tolist())
        with pytest.raises(ConfigError, match="choose the links' one"):
            RelationLinks(ds, None, relations=False)
        with pytest.raises(ConfigError, match="no such edge type"):
            RelationLinks(ds, "buys", relations=False)


def test_two_labels_are_two_relations(tmp_path: Path) -> None:
    data = Data(num_nodes=4, edge_index=torch.tensor([[0, 1, 2], [1, 2, 3]]), edge_y=torch.tensor([1, 0, 1]))
    ooc.from_data(data, tmp_path / "s.ooc").close()
    with Dataset.open(tmp_path / "s.ooc") as ds:
        links = RelationLinks(ds, None, relations=True)
        assert links.num_relations == 2
        assert gathered(links.pieces()) == [(0, 1, 1), (1, 0, 2), (2, 1, 3)]


def test_labels_of_several_edge_types_are_relations_of_each(tmp_path: Path) -> None:
    data = HeteroData()
    data["user"].num_nodes, data["item"].num_nodes = 3, 4
    data["user", "rates", "item"].edge_index = torch.tensor([[0, 1, 2], [3, 1, 0]])
    data["user", "rates", "item"].edge_y = torch.tensor([2, 0, 1])
    data["user", "knows", "user"].edge_index = torch.tensor([[0, 1], [1, 2]])
    ooc.from_data(data, tmp_path / "s.ooc").close()
    with Dataset.open(tmp_path / "s.ooc") as ds:
        links = RelationLinks(ds, None, relations=True)
        rates, knows = ((p.relation, p.head, p.tail) for p in sorted(links.parts, key=lambda part: part.key[1] == "knows"))
        assert links.num_relations == 4
        expected = [(h + rates[1], r + rates[0], t + rates[2]) for h, r, t in ((0, 2, 3), (1, 0, 1), (2, 1, 0))]
        expected += [(h + knows[1], knows[0], t + knows[2]) for h, t in ((0, 1), (1, 2))]
        assert {r for _, r, _ in expected} == {0, 1, 2, 3}
        assert gathered(links.pieces()) == sorted(expected)
        trained = TrainedTable(ds, links, make_scorer("distmult", 4, 4), TableInOrder(ArrayRows(np.zeros((7, 4), np.float32))))
        names = trained.relation_names
        assert names is not None
        assert [names[rates[0] + i] for i in range(3)] == [f"user:rates:item={i}" for i in range(3)]
        assert names[knows[0]] == "user:knows:user"
