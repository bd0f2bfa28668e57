"""Small stores of links, with relations or of users and items, and runs of tables on them."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data, HeteroData

import ooc
from ooc.config.tables import TableConfig

N, E, R = 300, 3000, 4
USERS, ITEMS, GROUPS = 40, 30, 5


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


def make_shop(path: Path) -> None:
    """A store of users who like items of their group; a split of the likes."""
    rng, data = np.random.default_rng(0), HeteroData()
    user, item = rng.integers(0, USERS // GROUPS, 300) * GROUPS, rng.integers(0, ITEMS // GROUPS, 300) * GROUPS
    group = rng.integers(0, GROUPS, 300)
    likes = np.unique(np.stack([user + group, item + group]), axis=1)
    part = rng.random(likes.shape[1])
    data["user"].num_nodes, data["item"].num_nodes = USERS, ITEMS
    edges = data["user", "likes", "item"]
    edges.edge_index = torch.from_numpy(likes)
    edges.edge_train_mask, edges.edge_val_mask = torch.from_numpy(part < 0.7), torch.from_numpy(part > 0.85)
    edges.edge_test_mask = torch.from_numpy((part >= 0.7) & (part <= 0.85))
    ooc.from_data(data, path).close()


def recall_and_ndcg(store: Path, rows: np.ndarray, name: str, k: int) -> tuple[float, float]:
    """Recall@k and NDCG@k of a split of a shop, by sorting all scores. rows: of users, and behind them of items."""
    score, part = rows[:USERS] @ rows[USERS:].T, {}
    with ooc.open(store) as ds:
        edges = ds.edges(("user", "likes", "item"))
        for each in edges.splits:
            slot = edges.members(each)[np.arange(len(edges.members(each)))]
            part[each] = np.zeros((USERS, ITEMS), bool)
            part[each][edges.graph.indices[slot], np.searchsorted(edges.graph.indptr, slot, side="right") - 1] = True
    score[part["train"] | (part["val"] if name == "test" else False)] = -np.inf
    found = np.take_along_axis(part[name], np.argsort(-score, axis=1, kind="stable")[:, :k], 1)
    wanted = part[name].sum(1)
    found, wanted = found[wanted > 0], wanted[wanted > 0]
    gain = 1 / np.log2(np.arange(2, k + 2))
    best = np.array([gain[: min(k, each)].sum() for each in wanted])
    return float((found.sum(1) / wanted).mean()), float((found @ gain / best).mean())
