"""The merged view of a store with appends, created once by the first reader."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ooc.stores.errors import StoreError
from ooc.stores.growth.delta import reading
from ooc.stores.growth.versions import alone, remove_views, view_folder
from ooc.stores.io.atomic import partial_path

if TYPE_CHECKING:
    from ooc.stores.ingest.duck import Progress
from ooc.stores.metadata import arrays_of, version_of


def _merge_view(path: Path, memory: int | None, progress: "Progress | None") -> None:
    """Merge the changes of the current appends, unless done already."""
    if not os.access(path, os.W_OK):
        raise StoreError(
            f"{path} has appends that its arrays do not hold, and nothing can be written there: "
            f"run `ooc compact {path}` where it can be"
        )
    from ooc.stores.growth.grow import Growing  # an ingest's modules, which other readers do without
    from ooc.stores.growth.sorting import room_of
    from ooc.stores.ingest.duck import silent

    with alone(path, "view", wait=True):
        version = version_of(path)
        with reading(path, version) as delta:
            if delta is None or not delta.appends:
                return
            view = view_folder(path, version, len(delta.appends))
            if not view.exists():
                root, room = arrays_of(path, version), room_of(memory)
                Growing(root, delta, partial_path(view), whole=False, room=room, progress=progress or silent).write(view)
        remove_views(path, view)
