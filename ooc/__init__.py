"""Out-of-core training of graph neural networks: features and edges on disk, PyTorch Geometric in front.

Importing this package imports neither torch nor numba; what needs them is imported on first use.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ooc.runtime.lazy_imports import keep_old_names, lazy_exports
from ooc.stores.errors import BudgetError, ConfigError, InputError, OocError, StoreError

if TYPE_CHECKING:
    from ooc.loading.event_loader import EventLoader
    from ooc.loading.neighbor_loader import NeighborLoader
    from ooc.loading.snapshot_loader import SnapshotLoader
    from ooc.loading.subgraph_loaders import ClusterLoader, SaintLoader
    from ooc.pyg.build_store import from_data, ingest
    from ooc.stores.dataset import Dataset
    from ooc.training.callbacks import Callback

__all__ = [
    "BudgetError",
    "Callback",
    "ClusterLoader",
    "ConfigError",
    "Dataset",
    "EventLoader",
    "InputError",
    "NeighborLoader",
    "OocError",
    "SaintLoader",
    "SnapshotLoader",
    "StoreError",
    "from_data",
    "ingest",
    "open",
]

keep_old_names(
    {
        "ooc.progress": "ooc.training.watchers",
        "ooc.summary": "ooc.training.summary",
        "ooc.temporal.recurrent": "ooc.temporal.window_models",
        "ooc.temporal.run": "ooc.training.loop",
        "ooc.train": "ooc.training.loop",
    }
)
__getattr__ = lazy_exports(
    __name__,
    {
        "Callback": "ooc.training.callbacks",
        "ClusterLoader": "ooc.loading.subgraph_loaders",
        "Dataset": "ooc.stores.dataset",
        "EventLoader": "ooc.loading.event_loader",
        "NeighborLoader": "ooc.loading.neighbor_loader",
        "SaintLoader": "ooc.loading.subgraph_loaders",
        "SnapshotLoader": "ooc.loading.snapshot_loader",
        "from_data": "ooc.pyg.build_store",
        "ingest": "ooc.pyg.build_store",
    },
)


def open(
    path: Path | str,
    memory: int | str | None = None,
    engine: str = "auto",
    in_memory: bool = False,
    features: Mapping[str, Path | str] | None = None,
) -> "Dataset":
    """Open the store at `path`; see `Dataset.open` for the arguments and the errors.

    >>> ds = ooc.open("papers.ooc", memory="2GB")
    >>> loader = ooc.NeighborLoader(ds, num_neighbors=[10, 10], input_nodes="train", batch_size=1024, shuffle=True)
    >>> for batch in loader: ...
    """
    from ooc.stores.dataset import Dataset

    return Dataset.open(path, memory, engine, in_memory, features)
