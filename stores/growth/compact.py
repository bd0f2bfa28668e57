"""`compact`: writes a new version of a store's arrays that includes appended data."""

import time
from dataclasses import dataclass, field
from os import PathLike

from ooc.stores.array_names import VERSIONS
from ooc.stores.growth.delta import Appended, reading, remove
from ooc.stores.growth.grow import Growing
from ooc.stores.growth.lineage import note
from ooc.stores.growth.sorting import room_of
from ooc.stores.growth.versions import alone, remove_unused, view_folder
from ooc.stores.ingest.duck import Progress, silent
from ooc.stores.io.atomic import partial_path
from ooc.stores.io.remote.url import refuse_url
from ooc.stores.manifest import Manifest
from ooc.stores.metadata import arrays_of, read_manifest, set_version, version_of


@dataclass(frozen=True)
class Compacted:
    """Result of a compaction."""

    appends: int
    """number of appends merged"""
    appended: Appended
    manifest: Manifest = field(repr=False)
    seconds: float


def compact(path: str | PathLike[str], progress: Progress = silent) -> Compacted:
    """Merge everything appended to the store at `path` into a new version of its arrays, and make that the current one.

    Open readers continue to read the old version, which is removed when unused (possibly by a later append or compaction).
    Memory does not depend on what was appended. If killed, the store is in its old or new state; calling again completes it.

    Args:
        path: The store.
        progress: Called with (step, done, total, unit).

    Returns:
        `Compacted`: what was appended and is merged now.

    Raises:
        StoreError: If there is no store, the disk is full, or an append or compaction is in progress.

    >>> compact("papers.ooc").appended.edges
    1000000
    """
    begin, path = time.perf_counter(), refuse_url(path, "compacted")
    read_manifest(path)  # a folder that is no store gets no locks
    with alone(path, "growth", wait=False), alone(path, "view", wait=True):
        version = version_of(path)
        root = arrays_of(path, version)
        with reading(path, version) as delta:
            appends = [] if delta is None else delta.appends
            view = view_folder(path, version, len(appends))
            remove_unused(path, version, view if appends else None)
            if delta is not None and appends:
                new = str(int(version or 0) + 1)
                final = path / VERSIONS / new
                merged = view if view.exists() else None
                growing = Growing(
                    root, delta, partial_path(final), whole=True, room=room_of(None), progress=progress, view=merged
                )
                growing.write(final)
                note(path, root, delta, final)
        manifest = read_manifest(final if appends else root)
        if appends:
            set_version(path, manifest, new)
        remove(path)  # empty, or already merged by an earlier call that was killed
        remove_unused(path, new if appends else version, None)
    return Compacted(len(appends), sum(appends, Appended()), manifest, time.perf_counter() - begin)
