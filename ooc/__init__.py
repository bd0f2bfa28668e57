"""Out-of-core training of graph neural networks: features and edges on disk, PyTorch Geometric in front.

Importing this package imports neither torch nor numba; what needs them is imported on first use.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ooc.runtime.lazy_imports import defer_modules, keep_old_names, lazy_exports
from ooc.stores.errors import BudgetError, ConfigError, InputError, OocError, OocWarning, StoreError

if TYPE_CHECKING:
    from ooc.config.events import EventsConfig
    from ooc.config.links import LinkConfig
    from ooc.config.modes import load_config
    from ooc.config.nodes import FullConfig, TrainConfig
    from ooc.config.snapshots import SnapshotsConfig
    from ooc.layerwise.top_k import TopK, top_k
    from ooc.loading.event_loader import EventLoader
    from ooc.loading.graph_loader import GraphLoader
    from ooc.loading.lightning import LightningData
    from ooc.loading.link_neighbor_loader import LinkNeighborLoader
    from ooc.loading.neighbor_loader import HGTLoader, NeighborLoader
    from ooc.loading.snapshot_loader import SnapshotLoader
    from ooc.loading.stored_edge_split import StoredEdgeSplit
    from ooc.loading.subgraph_loaders import ClusterLoader, SaintLoader
    from ooc.models.builders import build_model, full_blocks
    from ooc.models.pre_aggregation import pre_aggregation_of
    from ooc.planning.run_plan import Plan
    from ooc.pyg.build_store import from_data, ingest
    from ooc.pyg.change_store import append, reduce, split
    from ooc.report.memory_page import write_memory_report
    from ooc.report.page import write_report
    from ooc.runtime.memory import MemoryMeter
    from ooc.runtime.version import __version__
    from ooc.sampling.edge_split import EdgeSplit
    from ooc.sampling.labor import Labor
    from ooc.sampling.layer_wise import LayerWise
    from ooc.sampling.negatives import GivenNegatives, HistoricalNegatives, RandomNegatives, TgbNegatives
    from ooc.stores.dataset import Dataset
    from ooc.stores.growth.append import AppendResult
    from ooc.stores.growth.compact import compact
    from ooc.stores.ingest.join import join
    from ooc.stores.integrity import verify
    from ooc.training.callbacks import Callback
    from ooc.training.comparison import Trial, compare
    from ooc.training.infer import embed, infer
    from ooc.training.node_rows import NodeRows, WrittenRows
    from ooc.training.rank import rank
    from ooc.training.table_outputs import neighbors
    from ooc.training.verbs import plan, train

__all__ = [
    "AppendResult",
    "BudgetError",
    "Callback",
    "ClusterLoader",
    "ConfigError",
    "Dataset",
    "EdgeSplit",
    "EventLoader",
    "EventsConfig",
    "FullConfig",
    "GivenNegatives",
    "GraphLoader",
    "HGTLoader",
    "HistoricalNegatives",
    "InputError",
    "Labor",
    "LayerWise",
    "LightningData",
    "LinkConfig",
    "LinkNeighborLoader",
    "MemoryMeter",
    "NeighborLoader",
    "NodeRows",
    "OocError",
    "OocWarning",
    "Plan",
    "RandomNegatives",
    "SaintLoader",
    "SnapshotLoader",
    "SnapshotsConfig",
    "StoreError",
    "StoredEdgeSplit",
    "TgbNegatives",
    "TopK",
    "TrainConfig",
    "Trial",
    "WrittenRows",
    "__version__",
    "append",
    "build_model",
    "compact",
    "compare",
    "embed",
    "from_data",
    "full_blocks",
    "infer",
    "ingest",
    "join",
    "load_config",
    "neighbors",
    "open",
    "plan",
    "pre_aggregation_of",
    "rank",
    "reduce",
    "split",
    "top_k",
    "train",
    "verify",
    "write_memory_report",
    "write_report",
]

# PyG imports its data sets, and pandas and pyarrow with them; numba imports scipy.linalg to see whether it is there.
defer_modules(["torch_geometric.datasets", "scipy.linalg"])
keep_old_names(
    {
        "ooc.progress": "ooc.training.watchers",
        "ooc.summary": "ooc.training.summary",
        "ooc.temporal.recurrent": "ooc.temporal.window_models",
        "ooc.temporal.run": "ooc.training.loop",
    }
)
__getattr__ = lazy_exports(
    __name__,
    {
        "AppendResult": "ooc.stores.growth.append",
        "Callback": "ooc.training.callbacks",
        "ClusterLoader": "ooc.loading.subgraph_loaders",
        "Dataset": "ooc.stores.dataset",
        "EdgeSplit": "ooc.sampling.edge_split",
        "EventLoader": "ooc.loading.event_loader",
        "EventsConfig": "ooc.config.events",
        "FullConfig": "ooc.config.nodes",
        "GivenNegatives": "ooc.sampling.negatives",
        "GraphLoader": "ooc.loading.graph_loader",
        "HistoricalNegatives": "ooc.sampling.negatives",
        "Labor": "ooc.sampling.labor",
        "LayerWise": "ooc.sampling.layer_wise",
        "LightningData": "ooc.loading.lightning",
        "LinkConfig": "ooc.config.links",
        "LinkNeighborLoader": "ooc.loading.link_neighbor_loader",
        "MemoryMeter": "ooc.runtime.memory",
        "HGTLoader": "ooc.loading.neighbor_loader",
        "NeighborLoader": "ooc.loading.neighbor_loader",
        "NodeRows": "ooc.training.node_rows",
        "Plan": "ooc.planning.run_plan",
        "RandomNegatives": "ooc.sampling.negatives",
        "SaintLoader": "ooc.loading.subgraph_loaders",
        "SnapshotLoader": "ooc.loading.snapshot_loader",
        "SnapshotsConfig": "ooc.config.snapshots",
        "StoredEdgeSplit": "ooc.loading.stored_edge_split",
        "TgbNegatives": "ooc.sampling.negatives",
        "TopK": "ooc.layerwise.top_k",
        "TrainConfig": "ooc.config.nodes",
        "Trial": "ooc.training.comparison",
        "WrittenRows": "ooc.training.node_rows",
        "__version__": "ooc.runtime.version",
        "append": "ooc.pyg.change_store",
        "build_model": "ooc.models.builders",
        "compare": "ooc.training.comparison",
        "compact": "ooc.stores.growth.compact",
        "embed": "ooc.training.infer",
        "from_data": "ooc.pyg.build_store",
        "full_blocks": "ooc.models.builders",
        "infer": "ooc.training.infer",
        "ingest": "ooc.pyg.build_store",
        "join": "ooc.stores.ingest.join",
        "load_config": "ooc.config.modes",
        "neighbors": "ooc.training.table_outputs",
        "plan": "ooc.training.verbs",
        "pre_aggregation_of": "ooc.models.pre_aggregation",
        "rank": "ooc.training.rank",
        "reduce": "ooc.pyg.change_store",
        "split": "ooc.pyg.change_store",
        "top_k": "ooc.layerwise.top_k",
        "train": "ooc.training.verbs",
        "verify": "ooc.stores.integrity",
        "write_memory_report": "ooc.report.memory_page",
        "write_report": "ooc.report.page",
    },
)


def __dir__() -> list[str]:
    """The public names, for completion."""
    return __all__


def open(
    path: Path | str,
    memory: int | str | None = None,
    engine: str = "auto",
    in_memory: bool = False,
    features: Mapping[str, Path | str] | None = None,
    verify_reads: bool = False,
    cache_dir: Path | str | None = None,
    cache: int | str | None = None,
) -> "Dataset":
    """Open the store at `path`, a directory or a URL; see `Dataset.open` for the arguments and the errors.

    >>> ds = ooc.open("papers.ooc", memory="2GB")
    >>> loader = ooc.NeighborLoader(ds, num_neighbors=[10, 10], input_nodes="train", batch_size=1024, shuffle=True)
    >>> for batch in loader: ...
    """
    from ooc.stores.dataset import Dataset

    return Dataset.open(path, memory, engine, in_memory, features, verify_reads=verify_reads, cache_dir=cache_dir, cache=cache)
