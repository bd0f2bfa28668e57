"""One run of any mode: `train(config)`, `plan(config)`; the loop, checkpoints and results."""

from ooc.runtime.lazy_imports import lazy_exports

__getattr__ = lazy_exports(__name__, {"plan": "ooc.training.loop", "train": "ooc.training.loop"})
