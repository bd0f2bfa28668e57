"""Sums over the in-edges of destinations: each destination is a bag of rows."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ooc.runtime.row_kernels import fused
from ooc.stores.jit import kernel
from ooc.stores.prefetch import prefetch

Floats = NDArray[np.float32]
HUB_EDGES = 65_536
"""A bag of so many rows is summed by all threads"""
_LINE, _AHEAD = 16, 16
"""float32 per cache line; rows between prefetching one and adding it"""


def bag_sum(index: Tensor, rows: Tensor, indptr: Tensor, value: Tensor | None) -> Tensor:
    """For each bag index[indptr[i]:indptr[i + 1]], sum those rows [n, f], each multiplied by its value [e]: [d, f].

    Uses embedding_bag, torch's fastest kernel for it (three times torch.sparse on CPU), in which one thread sums a bag. On CPU
    all threads sum a hub's bag, each some of the columns. Each number of the output is one sequential sum, so the result does
    not depend on the number of threads.
    """
    value = None if value is None else value.to(rows.dtype)
    hubs = _hubs(index, rows, indptr)
    if not hubs:
        return F.embedding_bag(index, rows, indptr, mode="sum", include_last_offset=True, per_sample_weights=value)
    sums = rows.new_empty(len(indptr) - 1, rows.size(1))
    for hub in hubs:
        bag = slice(int(indptr[hub]), int(indptr[hub + 1]))
        _sum_hub(index[bag], rows, None if value is None else value[bag], sums[hub])
    for first, stop in zip([0, *(hub + 1 for hub in hubs)], [*hubs, len(sums)], strict=True):  # the bags between
        if first < stop:
            begin, end = int(indptr[first]), int(indptr[stop])
            part = None if value is None else value[begin:end]
            sums[first:stop] = bag_sum(index[begin:end], rows, indptr[first : stop + 1] - begin, part)
    return sums


def _hubs(index: Tensor, rows: Tensor, indptr: Tensor) -> list[int]:
    """The bags that all threads are to sum, ascending."""
    if len(index) < HUB_EDGES or torch.compiler.is_compiling() or (rows.requires_grad and torch.is_grad_enabled()):
        return []
    known = rows.device.type == "cpu" and rows.dtype == torch.float32 and index.dtype == torch.int64
    if not known or torch.get_num_threads() == 1 or rows.size(1) <= _LINE:
        return []
    return [int(i) for i in torch.nonzero(indptr.diff() >= HUB_EDGES).flatten()]


def _sum_hub(index: Tensor, rows: Tensor, value: Tensor | None, out: Tensor) -> None:
    """Set out [f] to the sum of the rows `index`, each times its value."""
    add: Callable[..., None] = _add_rows if value is None else _add_scaled_rows
    arrays = [tensor.detach().contiguous().numpy() for tensor in (index, rows, value) if tensor is not None]
    lines = -(-rows.size(1) // _LINE)
    threads = min(torch.get_num_threads(), lines)
    columns = [min(lines * i // threads * _LINE, rows.size(1)) for i in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(partial(add, *arrays), *part, out.numpy()) for part in pairwise(columns)]:
            done.result()


@kernel
def _add_rows(index: NDArray[np.int64], rows: Floats, begin: int, end: int, out: Floats) -> None:
    """Set columns begin:end of out [f] to their sum over the rows `index`."""
    flat, width = rows.reshape(-1), rows.shape[1]
    sums = np.zeros(end - begin, np.float32)
    for i in range(len(index)):
        if i + _AHEAD < len(index):
            for column in range(begin, end, _LINE):
                prefetch(flat, index[i + _AHEAD] * width + column)
        row = rows[index[i], begin:end]
        for column in range(len(sums)):
            sums[column] += row[column]
    out[begin:end] = sums


@kernel
def _add_scaled_rows(index: NDArray[np.int64], rows: Floats, value: Floats, begin: int, end: int, out: Floats) -> None:
    """Set columns begin:end of out [f] to their sum over the rows `index`, each times its value."""
    flat, width = rows.reshape(-1), rows.shape[1]
    sums = np.zeros(end - begin, np.float32)
    for i in range(len(index)):
        if i + _AHEAD < len(index):
            for column in range(begin, end, _LINE):
                prefetch(flat, index[i + _AHEAD] * width + column)
        row, factor = rows[index[i], begin:end], value[i]
        for column in range(len(sums)):
            sums[column] = fused(factor, row[column], sums[column])
    out[begin:end] = sums
