"""Sums over the edges of a block: the one kernel that layers use."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.utils.sparse import index2ptr


def pointers(ascending: Tensor, size: int) -> Tensor:
    """int64[size + 1]: where each number below `size` begins in `ascending` (int64[e]): the pointers of a CSR matrix."""
    if torch.compiler.is_compiling():  # index2ptr would make the size a constant, and every batch be compiled anew
        return torch.searchsorted(ascending, torch.arange(size + 1, device=ascending.device))
    return index2ptr(ascending, size)


def bag_sum(index: Tensor, rows: Tensor, indptr: Tensor, value: Tensor | None) -> Tensor:
    """[d, f]: for each of d bags, index[indptr[i]:indptr[i + 1]], the sum of those rows [n, f], each times its value [e].

    By embedding_bag, the fastest kernel torch has for it (three times torch.sparse on CPU); each output row is one sequential
    sum, so the result does not depend on threads.
    """
    value = None if value is None else value.to(rows.dtype)
    return F.embedding_bag(index, rows, indptr, mode="sum", include_last_offset=True, per_sample_weights=value)
