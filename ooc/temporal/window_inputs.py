"""What a model of windows is told of a node: its features, what it did in the window, and who it is.

Who it is: numbers drawn from the node's id alone, so they take no memory and are the same in every window and run of a seed.
With them the sum over a node's neighbors says who these were, which features of nodes may not. (Random node features: Sato et
al., "Random Features Strengthen Graph Neural Networks", SDM 2021.)
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ooc.loading.feature_gather import Gather
from ooc.runtime.buffers import Buffers
from ooc.sampling.kernels import stream_of, uniform
from stores.arrays.rows import AnyArray, Ids, Rows
from stores.jit import kernel

_SPREAD = 2 * 3**0.5
"""of a uniform number of variance 1"""


@dataclass(frozen=True)
class Inputs:
    """The first rows of a window's nodes. x, gather: node features, or None; columns: name -> width, of the events.

    identity: numbers drawn for every node; key: by which. Events count as sources and as destinations apart: how many there
    were, log(1 + n), and the mean of asinh(value) of every column, which tames long tails without knowing the future.

    >>> Inputs(None, None, {"msg": 16}, identity=32, key=7).channels
    66
    """

    x: Rows | None
    gather: Gather | None
    columns: Mapping[str, int]
    identity: int
    key: int

    @property
    def features(self) -> int:
        """Numbers of a node's features."""
        return 0 if self.x is None else int(np.prod(self.x.shape[1:], dtype=np.int64))

    @property
    def channels(self) -> int:
        """Width of the rows."""
        return self.features + self.identity + 2 * (1 + sum(self.columns.values()))

    def rows(
        self, node: Ids, present: int, edge_index: Ids, columns: Mapping[str, AnyArray], buffers: Buffers
    ) -> tuple[Tensor, int]:
        """(float32[n, channels], bytes read): of nodes `node` (int64[n]); the first `present` of them are the window's.

        edge_index: int64[2, k], the window's events among those; columns: [k, width] each, of the events.
        """
        out = np.empty((len(node), self.channels), np.float32)
        begin = nbytes = 0
        if self.x is not None and self.gather is not None:
            begin = self.features
            found, nbytes = self.gather.read(self.x, node, buffers)
            torch.from_numpy(out)[:, :begin] = self.gather.tensor(found).reshape(len(node), -1)
        identify(node, np.uint64(self.key & (2**64 - 1)), out[:, begin : begin + self.identity])
        begin += self.identity
        width = sum(self.columns.values())
        values = np.empty((edge_index.shape[1], width), np.float32)
        at = 0
        for name, size in self.columns.items():
            np.arcsinh(columns[name].reshape(len(values), -1), out=values[:, at : at + size], casting="same_kind")
            at += size
        for end in edge_index:
            did = out[:, begin : begin + 1 + width]
            did[:] = 0
            add_events(np.ascontiguousarray(end), values, did[:present])
            begin += 1 + width
        return torch.from_numpy(out), nbytes


@kernel
def identify(node: Ids, key: np.uint64, out: NDArray[np.float32]) -> None:
    """out[i]: numbers of mean 0 and variance 1 that depend on (key, node[i]) alone."""
    for i in range(len(node)):
        stream = stream_of(key, node[i])
        for j in range(out.shape[1]):
            out[i, j] = (uniform(stream, j) - 0.5) * _SPREAD


@kernel
def add_events(node: Ids, values: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """out[v]: log(1 + events of v), and the mean of their values. out: zeros [n, 1 + w]; node: int64[k]; values: [k, w]."""
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
