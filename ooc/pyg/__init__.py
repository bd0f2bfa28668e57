"""PyG's FeatureStore, GraphStore, BaseSampler and TemporalData over a store, and PyG data sets as input."""

from typing import TYPE_CHECKING

from ooc.runtime.lazy_imports import lazy_exports

if TYPE_CHECKING:
    from ooc.pyg.mapped_events import temporal_data
    from ooc.pyg.remote_backend import OocFeatureStore, OocGraphStore, OocSampler

__all__ = ["OocFeatureStore", "OocGraphStore", "OocSampler", "temporal_data"]
_BACKEND = dict.fromkeys(("OocFeatureStore", "OocGraphStore", "OocSampler"), "ooc.pyg.remote_backend")
__getattr__ = lazy_exports(__name__, {**_BACKEND, "temporal_data": "ooc.pyg.mapped_events"})
