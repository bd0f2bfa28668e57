"""Small stores of links with relations, and runs of tables on them."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data

import ooc
from ooc.config.tables import TableConfig

N, E, R = 300, 3000, 4


def make_triples(path: Path, nodes: int = N, edges: int = E, seed: int = 0) -> Any:
    """A store whose tails follow from heads and relations; its triples int64[E, 3] and the part of each in [0, 1)."""
    rng = np.random.default_rng(seed)
    head, relation = (rng.random(edges) ** 2 * nodes).astype(np.int64), rng.integers(0, R, edges)
    tail = (head * 7 + relation * 31 + rng.integers(0, 3, edges)) % nodes
    part = rng.random(edges)
    data = Data(num_nodes=nodes, edge_index=torch.from_numpy(np.stack([head, tail])), edge_y=torch.from_numpy(relation))
    data.edge_train_mask, data.edge_val_mask = torch.from_numpy(part < 0.8), torch.from_numpy((part >= 0.8) & (part < 0.9))
    data.edge_test_mask = torch.from_numpy(part >= 0.9)
    ooc.from_data(data, path).close()
    return np.stack([head, relation, tail], 1), part


def table_config(store: Path, out: Path, **settings: Any) -> TableConfig:
    small: dict[str, Any] = {"model": "complex", "hidden": 8, "batch_size": 50, "ratio": 16, "epochs": 3, "eval_every": 1}
    return TableConfig(store=store, out=out, **{**small, "threads": 1, "seed": 3, **settings})
