"""The values of a step in a GPU's memory: features as stored, rows, sums and gradients. The host waits for none of them."""

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ooc.fullgraph.program import Placement
from ooc.fullgraph.value_store import ValueStore
from ooc.layerwise.device_rows import DeviceRows
from ooc.layerwise.io_stats import IoStats
from ooc.layerwise.layerwise_pass import Progress
from ooc.layerwise.pass_plan import FEATURES
from ooc.loading.row_pool import RowPool, SlotMap, fits_pool
from ooc.runtime.memory import Tidy
from ooc.runtime.transfer import to_device
from ooc.stores.dataset import Dataset


def can_be_there(dataset: Dataset) -> bool:
    """Whether torch has the type of the features."""
    return fits_pool(dataset.stored("x"), dataset.encoding("x"))


class DeviceValueStore(ValueStore):
    """Values on `device`. It has them all: see `Placement.resident`. The features are there once `load` has returned."""

    def __init__(
        self,
        engine: str,
        dataset: Dataset,
        columns: dict[str, int],
        dtype: np.dtype[Any],
        stats: IoStats,
        tidy: Tidy,
        device: torch.device,
    ) -> None:
        super().__init__(None, engine, dataset, columns, dtype, stats, tidy)
        self._device, self._dtype = device, torch.float64 if dtype == np.float64 else torch.float32
        self._values: dict[str, DeviceRows] = {}
        self._copied = 0
        """rows of features"""

        def read(rows: int, nbytes: int) -> None:
            stats.read(nbytes, perf_counter())
            self._copied += rows

        every = SlotMap.first(dataset.num_nodes, dataset.num_nodes)
        self._pool = RowPool(dataset.stored("x"), dataset.encoding("x"), every, device, read, engine)
        short = dataset.encoding("x").is_short
        self._features = DeviceRows(self._pool.values, self._pool.scale, short, self._dtype)

    @property
    def memory_bytes(self) -> int:
        """See `ValueStore.memory_bytes`: of the host's none."""
        return 0

    def place(self, placement: Placement) -> None:
        """See `ValueStore.place`."""
        self.placement = placement

    def load(self, progress: Progress) -> None:
        """Read the features, if they are not there yet; goes on where `progress` ended it."""

        def reported() -> bool:
            progress("features", self._copied, self._nodes)
            return False

        self._pool.fill(reported)

    def device_rows(self, name: str) -> DeviceRows:
        """See `RowStore.device_rows`; made where there are none."""
        if name == FEATURES.name:
            return self._features
        if name not in self._values:
            shape = self.count(name), self._columns[name]
            self._values[name] = DeviceRows.plain(torch.empty(shape, dtype=self._dtype, device=self._device))
        return self._values[name]

    def open(self, name: str, half: int | None = None) -> Any:
        """See `device_rows`."""
        return self.device_rows(name)

    def rows(self, name: str) -> Any:
        """See `device_rows`."""
        return self.device_rows(name)

    def read(self, name: str, first: int, stop: int) -> Any:
        """See `RowStore.read`: a tensor, a view where rows are read as they are stored."""
        rows = self.device_rows(name)
        return rows.read(rows.values[first:stop])

    def gather(self, name: str, node: NDArray[np.int64]) -> Any:
        """See `RowStore.gather`: a tensor."""
        rows = self.device_rows(name)
        return rows.read(rows.values.index_select(0, self.tensor(node)))

    def computed(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """See `RowStore.computed`: the tensors themselves."""
        return [tensor.detach() for tensor in tensors]

    def tensor(self, values: NDArray[Any] | Tensor) -> Tensor:
        """See `RowStore.tensor`."""
        return to_device([torch.from_numpy(values)], self._device)[0] if isinstance(values, np.ndarray) else values

    def put(self, name: str, first: int, values: NDArray[Any] | Tensor, half: int | None = None) -> None:
        """See `RowStore.put`."""
        self.device_rows(name).values[first : first + len(values)].copy_(self.tensor(values))

    def add(self, name: str, node: NDArray[np.int64], values: NDArray[Any] | Tensor) -> None:
        """See `ValueStore.add`; nodes are named once, so no order matters."""
        rows, at = self.device_rows(name).values, self.tensor(node)
        rows.index_copy_(0, at, rows.index_select(0, at) + self.tensor(values))

    def clear(self, name: str, start: int = 0) -> None:
        """See `ValueStore.clear`."""
        self.device_rows(name).values[start:].zero_()

    def drop(self, name: str) -> None:
        """See `ValueStore.drop`."""
        self._values.pop(name, None)

    def on_disk(self, name: str) -> bool:
        """See `ValueStore.on_disk`: no value is."""
        return False

    def make_room(self) -> None:
        """See `ValueStore.make_room`: the host's memory has nothing of it."""

    def close(self) -> None:
        """See `ValueStore.close`."""
        super().close()
        self._values.clear()
