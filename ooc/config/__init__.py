"""Typed settings of every mode, read from flags, TOML or JSON."""

from ooc.runtime.lazy_imports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "EventsConfig": "ooc.config.events",
        "FullConfig": "ooc.config.nodes",
        "RunConfig": "ooc.config.base",
        "LinkConfig": "ooc.config.links",
        "SnapshotsConfig": "ooc.config.snapshots",
        "TrainConfig": "ooc.config.nodes",
        "load_config": "ooc.config.modes",
    },
)
