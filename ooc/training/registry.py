"""Mode name -> the mode: the one place that knows which modes there are. Their settings: `ooc.config.modes.classes`."""

from ooc.config.base import RunConfig
from ooc.training.batch_modes import ClusterMode, SaintMode, SampledMode
from ooc.training.event_mode import EventMode
from ooc.training.full_mode import FullMode
from ooc.training.history_mode import HistoryMode
from ooc.training.mode import Mode
from ooc.training.snapshot_mode import SnapshotMode

MODES: dict[str, type[Mode]] = {
    "sampled": SampledMode,
    "cluster": ClusterMode,
    "saint": SaintMode,
    "history": HistoryMode,
    "full": FullMode,
    "events": EventMode,
    "snapshots": SnapshotMode,
}


def mode_of(config: RunConfig) -> type[Mode]:
    """The class of a configuration's mode."""
    return MODES[config.mode]
