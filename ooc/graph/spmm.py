"""Sparse sums over the edges of a block."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.utils.sparse import index2ptr


def pointers(ascending: Tensor, size: int) -> Tensor:
    """Return CSR row pointers int64[size + 1] of the sorted numbers `ascending` (int64[e], below `size`)."""
    if torch.compiler.is_compiling():  # index2ptr would fix the size and recompile for every batch
        return torch.searchsorted(ascending, torch.arange(size + 1, device=ascending.device))
    return index2ptr(ascending, size)


def bag_sum(index: Tensor, rows: Tensor, indptr: Tensor, value: Tensor | None) -> Tensor:
    """For each bag index[indptr[i]:indptr[i + 1]], sum those rows [n, f], each multiplied by its value [e]: [d, f].

    Uses embedding_bag, torch's fastest kernel for it (three times torch.sparse on CPU). Each output row is one sequential sum,
    so the result does not depend on the number of threads.
    """
    value = None if value is None else value.to(rows.dtype)
    return F.embedding_bag(index, rows, indptr, mode="sum", include_last_offset=True, per_sample_weights=value)
