"""Where one reader finds a store's arrays, as they were when it opened the store, appends included."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stores.growth.delta import Appended, reading
from stores.growth.versions import AGAIN_SECONDS, Hold, hold_current, view_folder
from stores.growth.view import _merge_view
from stores.integrity import fingerprint_of
from stores.manifest import Manifest, arrays_of, read_manifest, version_of

if TYPE_CHECKING:
    from stores.ingest.duck import Progress

_MARK = "+appended="


@dataclass(frozen=True)
class Place:
    """A version of a store's arrays, and the part that appends changed. Held until `close`: nobody removes it."""

    path: Path
    root: Path
    """the version"""
    view: Path | None
    """what appends changed of it (`stores.growth.grow`), None where there are none"""
    appended: Appended
    base: Manifest
    """of the version"""
    manifest: Manifest
    """of the store as appends made it"""
    holds: tuple[Hold, ...]

    def group(self, name: str) -> Path:
        """The group in which the array `name` is as appends made it."""
        if self.view is not None and (self.view / name / "zarr.json").exists():
            return self.view
        return self.root

    @property
    def fingerprint(self) -> str:
        """Of the arrays and of what was appended to them."""
        own = fingerprint_of(self.root, self.base)
        return own if self.view is None else f"{own}{_MARK}{self.appended.digest}"

    def is_latest(self) -> bool:
        """Whether no append and no compaction came since."""
        version = version_of(self.path)
        if self.root != arrays_of(self.path, version):
            return False
        with reading(self.path, version) as delta:
            return sum(delta.appends if delta else [], Appended()) == self.appended

    def close(self) -> None:
        """Let go of the files; idempotent."""
        for hold in self.holds:
            hold.close()


def with_appends(fingerprint: str, appends: list[Appended]) -> str:
    """The fingerprint of a version of that one with some appends."""
    return f"{fingerprint}{_MARK}{sum(appends, Appended()).digest}"


def open_place(path: Path, memory: int | None = None, progress: "Progress | None" = None) -> Place:
    """Find the current arrays of the store at `path`; the first reader after an append merges what that changed.

    memory: bytes that the process may use, an eighth of which the merge sorts in; progress: told how far that is.
    Raises StoreError where there is no store, or what appends changed is not merged yet and cannot be written there.
    """
    while True:
        version, hold = hold_current(path)
        try:
            place = _place(path, version, hold, memory, progress)
        except BaseException:
            hold.close()
            raise
        if place is not None:
            return place
        hold.close()


def _place(path: Path, version: str, hold: Hold, memory: int | None, progress: "Progress | None") -> Place | None:
    """None where another version was published, or appends came or went, meanwhile."""
    root = arrays_of(path, version)
    base = read_manifest(root)
    with reading(path, version) as delta:
        appends = [] if delta is None else delta.appends
    if version != version_of(path):  # its appends are gone, too
        return None
    if not appends:
        return Place(path, root, None, Appended(), base, base, (hold,))
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
        return Place(path, root, view, sum(appends, Appended()), base, read_manifest(view), (hold, held))
    except BaseException:
        held.close()
        raise
