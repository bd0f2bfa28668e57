"""Batches compared to the bit."""

from collections.abc import Mapping
from typing import Any

import torch
from torch_geometric.data import HeteroData
from torch_geometric.data.data import BaseData


def same(a: Any, b: Any) -> bool:
    """Every field of two batches is equal, to the bit."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, HeteroData):
        return same(a.to_dict(), b.to_dict())
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, BaseData):
        return set(a.keys()) == set(b.keys()) and all(same(a[key], b[key]) for key in a.keys())  # noqa: SIM118
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)
