"""`Place`: where a reader finds a store's arrays as they were when it opened the store, appends included."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ooc.stores.fingerprints import fingerprint_of
from ooc.stores.growth.delta import Appended, reading
from ooc.stores.growth.versions import AGAIN_SECONDS, Hold, hold_current, view_folder
from ooc.stores.growth.view import _merge_view
from ooc.stores.io.working import tidy
from ooc.stores.manifest import Manifest
from ooc.stores.metadata import arrays_of, check_metadata, read_manifest, version_of

if TYPE_CHECKING:
    from ooc.stores.ingest.duck import Progress

_MARK = "+appended="


@dataclass(frozen=True)
class Place:
    """A version of a store's arrays and the view of its appends; neither is removed before `close`."""

    path: Path
    """directory of the store; of one far away, of its copy in the cache"""
    address: Path
    """where the user has the store, for messages: `path`, or a URL"""
    root: Path
    """the version"""
    view: Path | None
    """view of the appends (`ooc.stores.growth.grow`), None without any"""
    appended: Appended
    base: Manifest
    """manifest of the version"""
    manifest: Manifest
    """manifest of the store including appends"""
    holds: tuple[Hold, ...]

    def group(self, name: str) -> Path:
        """The group of the array `name`, including appends."""
        if self.view is not None and (self.view / name / "zarr.json").exists():
            return self.view
        return self.root

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the arrays and the appends."""
        own = fingerprint_of(self.root, self.base)
        return own if self.view is None else f"{own}{_MARK}{self.appended.digest}"

    def is_latest(self) -> bool:
        """Whether there was no append or compaction since."""
        version = version_of(self.path)
        if self.root != arrays_of(self.path, version):
            return False
        with reading(self.path, version) as delta:
            return sum(delta.appends if delta else [], Appended()) == self.appended

    def close(self) -> None:
        """Release the files; idempotent."""
        for hold in self.holds:
            hold.close()


def with_appends(fingerprint: str, appends: list[Appended]) -> str:
    """Fingerprint of a version with some appends."""
    return f"{fingerprint}{_MARK}{sum(appends, Appended()).digest}"


def open_place(path: Path, memory: int | None = None, progress: "Progress | None" = None, address: Path | None = None) -> Place:
    """Find the current arrays of the store at `path`; the first reader after an append merges its changes.

    `memory` is that of the process, an eighth of which is used for merging; `progress` is called with the progress; `address`
    is the URL of a copy in the cache. Raises StoreError if there is no store, or changes must be merged and the store cannot be
    written.
    """
    tidy(path)
    while True:
        version, hold = hold_current(path)
        try:
            place = _place(path, version, hold, memory, progress, address or path)
        except BaseException:
            hold.close()
            raise
        if place is not None:
            return place
        hold.close()


def _place(
    path: Path, version: str, hold: Hold, memory: int | None, progress: "Progress | None", address: Path
) -> Place | None:
    """None if another version was published, or the appends changed, meanwhile."""
    root = arrays_of(path, version)
    base = read_manifest(root)
    check_metadata(root)
    with reading(path, version) as delta:
        appends = [] if delta is None else delta.appends
    if version != version_of(path):  # its appends are gone as well
        return None
    if not appends:
        return Place(path, address, root, None, Appended(), base, base, (hold,))
    view = view_folder(path, version, len(appends))
    try:
        held = Hold(view)
    except FileNotFoundError:
        _merge_view(path, memory, progress)
        return None
    except BlockingIOError:
        time.sleep(AGAIN_SECONDS)
        return None
    try:
        merged = read_manifest(view)
        check_metadata(view)
        return Place(path, address, root, view, sum(appends, Appended()), base, merged, (hold, held))
    except BaseException:
        held.close()
        raise
