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


def test_a_graph_of_groups_is_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, groups = np.random.default_rng(0), 5
    src, dst = rng.integers(0, 20, (2, 400)) * groups + rng.integers(0, groups, 400)
    x = (np.eye(groups)[np.arange(100) % groups] + 0.1 * rng.standard_normal((100, groups))).astype(np.float32)
    (tmp_path / "planetoid").mkdir()
    edges = np.concatenate([[src, dst], [dst, src]], axis=1)
    np.savez(tmp_path / "planetoid" / "pubmed.npz", x=x, edge_index=edges)
    monkeypatch.setattr(links, "BATCH", 64)
    assert links.measure("pubmed", tmp_path, tmp_path, 0, epochs=6)["ooc"] > 80
