"""PyG's FeatureStore, GraphStore and BaseSampler over a store, and PyG data sets as input."""

from typing import TYPE_CHECKING

from ooc.runtime.lazy_imports import lazy_exports

if TYPE_CHECKING:
    from ooc.pyg.remote_backend import OocFeatureStore, OocGraphStore, OocSampler

__all__ = ["OocFeatureStore", "OocGraphStore", "OocSampler"]
__getattr__ = lazy_exports(__name__, dict.fromkeys(__all__, "ooc.pyg.remote_backend"))
