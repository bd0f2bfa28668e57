"""The verbs of the command line, each a single call. Heavy imports are inside them, so `ooc --help` is fast.

The flags of `ingest` and `train` are the fields of `IngestSpec` and of the modes' configurations: flags, configuration keys and
Python arguments have the same names.
"""

from ooc.cli import store_verbs, train_verbs, utility_verbs  # in the order of the help
from ooc.cli.app import app

__all__ = ["app", "store_verbs", "train_verbs", "utility_verbs"]
