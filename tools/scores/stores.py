"""The stores for reproducing published scores."""

import shutil
from pathlib import Path
from typing import Any


def ingest(npz: Path, store: Path, **options: Any) -> None:
    """Build a store from an npz file, anew."""
    from ooc.stores.ingest import IngestSpec
    from ooc.stores.ingest import ingest as build

    shutil.rmtree(store, ignore_errors=True)
    build(IngestSpec(out=store, npz=npz, **options))
