"""Stored rows -> a batch's `x`: gathered and converted in one pass."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ooc.graph.aggregation import FirstLayerAggregates
from ooc.runtime.buffers import Buffers
from stores.arrays.encoding import DecodedRows, Encoding
from stores.arrays.rows import AnyArray, Ids, Rows

_AS_STORED = {"float16": torch.float16, "bfloat16": torch.bfloat16}
"""Types that torch has too: a batch may want them as they are stored"""


@dataclass(frozen=True)
class Gather:
    """How the rows of a batch become its `x`.

    encoding: of the stored rows. dtype: of x; None for their values: float32 for float16, bfloat16 and scaled int8, otherwise
    as stored. Where it is the stored type nothing is converted; any type but these two costs a second copy.

    >>> gather = Gather(ds.encoding("x"))
    >>> x = gather.tensor(gather.take(pool_rows, slots, Buffers(1)))
    """

    encoding: Encoding
    dtype: torch.dtype | None = None

    @property
    def kept(self) -> bool:
        """Whether rows stay as stored."""
        asked = self.dtype is not None and self.dtype == _AS_STORED.get(self.encoding.name)
        return asked or not self.encoding.is_short

    @property
    def gathered(self) -> np.dtype[Any]:
        """What `take` and `read` give."""
        return self.encoding.stored if self.kept else self.encoding.dtype

    def take(self, rows: AnyArray, at: Any, buffers: Buffers) -> AnyArray:
        """[n, *row shape] of `gathered`: rows[at], of stored rows in memory; at: int32|int64[n], in range."""
        out = buffers.empty((len(at), *rows.shape[1:]), self.gathered)
        encoding = Encoding.raw(rows.dtype) if self.kept else self.encoding
        encoding.gather(rows, at, out)
        return out

    def read(self, rows: Rows, ids: Ids, buffers: Buffers) -> tuple[AnyArray, int]:
        """The same of rows anywhere, with the bytes read from the disk for it; see `Rows.read`."""
        out = buffers.empty((len(ids), *rows.shape[1:]), self.gathered)
        return out, (rows if self.kept else DecodedRows(rows, self.encoding)).read(ids, out)

    @property
    def float32(self) -> bool:
        """Whether values are float32 from the gathering on: what sums can be made of."""
        return self.gathered == np.float32 and self.dtype in (None, torch.float32)

    def tensor(self, gathered: AnyArray | FirstLayerAggregates) -> Any:
        """`x`, over the same memory where its dtype allows."""
        if isinstance(gathered, FirstLayerAggregates):
            return FirstLayerAggregates(*map(torch.from_numpy, gathered))
        x = torch.from_numpy(gathered)
        if self.kept and self.encoding.name == "bfloat16":
            x = x.view(torch.bfloat16)
        return x if self.dtype is None else x.to(self.dtype)

    def row_bytes(self, row_shape: tuple[int, ...]) -> int:
        """Bytes of a node's features from gathering to the model: as gathered and, where that differs, in `dtype`."""
        example = np.empty((1, *row_shape), self.gathered)
        x = self.tensor(example)
        return example.nbytes + (x.nbytes if x.data_ptr() != example.ctypes.data else 0)
