"""Rows of a value in a GPU's memory."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DeviceRows:
    """Rows on a device. values: as stored; scale: float32[f] of int8, else empty; short: whether they are decoded to float32;
    dtype: that they are read in."""

    values: Tensor
    scale: Tensor
    short: bool
    dtype: torch.dtype

    @classmethod
    def plain(cls, values: Tensor) -> "DeviceRows":
        """Rows that are read as they are."""
        return cls(values, values.new_empty(0), False, values.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def as_read(self) -> bool:
        """Whether what is stored is what is read."""
        return not self.short and self.values.dtype == self.dtype

    def read(self, stored: Tensor, columns: slice = slice(None)) -> Tensor:
        """Some of `values`, or of these columns of them, as they are read."""
        if self.short:
            stored = stored.float()
            stored = stored * self.scale[columns] if len(self.scale) else stored
        return stored.to(self.dtype)
