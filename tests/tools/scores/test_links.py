"""The tool of scores of links on a small graph: it learns, and takes the links of PyG's batches out by hand."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from tools.scores import links


def test_links_and_their_reverses_are_taken_out_by_hand() -> None:
    batch = Data(
        n_id=torch.tensor([7, 3, 9]),
        edge_index=torch.tensor([[0, 1, 1, 2, 2, 0], [1, 0, 2, 1, 0, 0]]),
        edge_label_index=torch.tensor([[0, 2], [1, 1]]),
        edge_label=torch.tensor([1.0, 0.0]),
    )
    assert torch.equal(links.without_links(batch), torch.tensor([[1, 2, 2, 0], [2, 1, 0, 0]]))


def test_a_graph_of_groups_is_learned_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, groups = np.random.default_rng(0), 5
    src, dst = rng.integers(0, 20, (2, 400)) * groups + rng.integers(0, groups, 400)
    x = (np.eye(groups)[np.arange(100) % groups] + 0.1 * rng.standard_normal((100, groups))).astype(np.float32)
    (tmp_path / "planetoid").mkdir()
    edges = np.concatenate([[src, dst], [dst, src]], axis=1)
    np.savez(tmp_path / "planetoid" / "pubmed.npz", x=x, edge_index=edges)
    settings = {"batch_size": 64, "epochs": 6}
    found = links.scores("pubmed", tmp_path, tmp_path, [0], settings, ["ooc"])
    assert found["ooc"]["mean"] > 80
    monkeypatch.setattr(links, "ARMS", {})
    assert links.scores("pubmed", tmp_path, tmp_path, [0], settings, ["ooc"]) == found
    with pytest.raises(KeyError, match="ooc"):
        links.scores("pubmed", tmp_path, tmp_path, [0], {**settings, "epochs": 7}, ["ooc"])


def test_pairs_that_are_no_edges() -> None:
    edges = torch.tensor([[u, v] for u in range(8) for v in range(8) if u != v and (u + v) % 3]).t()
    graph = links.Links(None, edges, torch.full((edges.size(1),), 2), 8)
    drawn = links.no_edges(graph, 0)
    assert drawn.shape == edges.shape
    assert not set(map(tuple, drawn.t().tolist())) & set(map(tuple, edges.t().tolist()))
    assert torch.equal(drawn, links.no_edges(graph, 0))
