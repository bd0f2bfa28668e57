"""(Task, mode) -> the mode: the one place that knows which modes there are. Their settings: `ooc.config.modes.choices`."""

from ooc.config.base import RunConfig
from ooc.training.batch_modes import ClusterMode, SaintMode, SampledMode
from ooc.training.edge_mode import EdgeMode
from ooc.training.event_mode import EventMode
from ooc.training.full_mode import FullMode
from ooc.training.graph_mode import GraphMode
from ooc.training.history_mode import HistoryMode
from ooc.training.lightgcn_mode import LightGCNMode
from ooc.training.link_mode import LinkMode
from ooc.training.mode import Mode
from ooc.training.snapshot_mode import SnapshotMode
from ooc.training.table_mode import TableMode

MODES: dict[tuple[str, str], type[Mode]] = {
    ("node", "sampled"): SampledMode,
    ("node", "cluster"): ClusterMode,
    ("node", "saint"): SaintMode,
    ("node", "history"): HistoryMode,
    ("node", "full"): FullMode,
    ("edge", "sampled"): EdgeMode,
    ("graph", "graphs"): GraphMode,
    ("link", "sampled"): LinkMode,
    ("link", "lightgcn"): LightGCNMode,
    ("link", "events"): EventMode,
    ("link", "snapshots"): SnapshotMode,
    ("link", "table"): TableMode,
    ("node", "snapshots"): SnapshotMode,
}


def mode_of(config: RunConfig) -> type[Mode]:
    """The class of a configuration's task and mode."""
    return MODES[config.task, config.mode]
