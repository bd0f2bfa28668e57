"""Out-of-core training of graph neural networks: features and edges on disk, PyTorch Geometric in front.

Importing this package imports neither torch nor numba; what needs them is imported on first use.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stores.errors import BudgetError, ConfigError, InputError, OocError, StoreError

if TYPE_CHECKING:
    from ooc.eventloader import EventLoader
    from ooc.induced import ClusterLoader, SaintLoader
    from ooc.loaders import NeighborLoader
    from ooc.snapshots import SnapshotLoader
    from stores.dataset import Dataset

__all__ = [
    "BudgetError",
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
    "open",
]

_LAZY = {"Dataset": "stores.dataset", "NeighborLoader": "ooc.loaders", "SnapshotLoader": "ooc.snapshots"}
_LAZY["EventLoader"] = "ooc.eventloader"
_LAZY |= dict.fromkeys(("ClusterLoader", "SaintLoader"), "ooc.induced")


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
    from stores.dataset import Dataset

    return Dataset.open(path, memory, engine, in_memory, features)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'ooc' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
