"""Input rows of a window's nodes: features, statistics of their events in the window, and random identity features.

Identity features are computed from the node's id alone: they take no memory and are equal in every window and run of a seed.
They let the neighbor sum identify the neighbors. (Sato et al., "Random Features Strengthen Graph Neural Networks", SDM 2021.)
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ooc.loading.collate import Gather
from ooc.runtime.buffers import Buffers
from ooc.sampling.kernels import stream_of, uniform
from stores.arrays.rows import AnyArray, Ids, Rows
from stores.jit import kernel

_SPREAD = 2 * 3**0.5
"""width of a uniform distribution of variance 1"""


@dataclass(frozen=True)
class Inputs:
    """Computes the input rows of a window's nodes: features x (or None), `identity` features by `key`, and event statistics.

    Events are aggregated separately for sources and destinations: log(1 + count), and the mean of asinh(value) of every column
    (name -> width), which limits long tails without statistics of the future.
    """

    x: Rows | None
    gather: Gather | None
    columns: Mapping[str, int]
    identity: int
    key: int

    @property
    def features(self) -> int:
        return 0 if self.x is None else int(np.prod(self.x.shape[1:], dtype=np.int64))

    @property
    def channels(self) -> int:
        return self.features + self.identity + 2 * (1 + sum(self.columns.values()))

    def rows(
        self, node: Ids, present: int, edge_index: Ids, columns: Mapping[str, AnyArray], buffers: Buffers
    ) -> tuple[Tensor, int]:
        """Return the rows of `node` (int64[n], the window's `present` ones first), float32[n, channels], and the bytes read.

        `edge_index` (int64[2, k]) are the window's events by position in `node`, `columns` ([k, width] each) their columns.
        """
        out = np.empty((len(node), self.channels), np.float32)
        begin = nbytes = 0
        if self.x is not None and self.gather is not None:
            begin = self.features
            features, nbytes = self.gather.read(self.x, node, buffers)
            torch.from_numpy(out)[:, :begin] = self.gather.tensor(features).reshape(len(node), -1)
        identify(node, np.uint64(self.key & (2**64 - 1)), out[:, begin : begin + self.identity])
        begin += self.identity
        width = sum(self.columns.values())
        values = np.empty((edge_index.shape[1], width), np.float32)
        at = 0
        for name, size in self.columns.items():
            np.arcsinh(columns[name].reshape(len(values), -1), out=values[:, at : at + size], casting="same_kind")
            at += size
        for end in edge_index:
            stats = out[:, begin : begin + 1 + width]
            stats[:] = 0
            add_events(np.ascontiguousarray(end), values, stats[:present])
            begin += 1 + width
        return torch.from_numpy(out), nbytes


@kernel
def identify(node: Ids, key: np.uint64, out: NDArray[np.float32]) -> None:
    """Fill out[i] with numbers of mean 0 and variance 1 that depend on (key, node[i]) only."""
    for i in range(len(node)):
        stream = stream_of(key, node[i])
        for j in range(out.shape[1]):
            out[i, j] = (uniform(stream, j) - 0.5) * _SPREAD


@kernel
def add_events(node: Ids, values: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """Set out[v] to log(1 + events of v) and the mean of their values.

    `out` is zeros [n, 1 + w], `node` int64[k] and `values` [k, w].
    """
    for i in range(len(node)):
        row = out[node[i]]
        row[0] += 1
        for j in range(values.shape[1]):
            row[1 + j] += values[i, j]
    for v in range(len(out)):
        count = out[v, 0]
        if count > 0:
            for j in range(values.shape[1]):
                out[v, 1 + j] /= count
            out[v, 0] = np.log1p(count)
