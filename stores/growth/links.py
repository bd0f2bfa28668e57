"""Hard links from unchanged files into a new version of a store."""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from ooc.stores import array_names as names
from ooc.stores.fingerprints import array_names


def link_array(root: Path, out: Path, name: str) -> None:
    """`link_tree` for an array and its checksums."""
    for path in (name, names.checksum_array(name)):
        link_tree(root / path, out / path)


def link_tree(source: Path, target: Path) -> None:
    """Link the files below `source` below `target`, copying if the file system lacks hard links; no-op if `target` exists."""
    if not source.is_dir() or target.exists():
        return
    for folder, _, files in os.walk(source):
        to = target / Path(folder).relative_to(source)
        to.mkdir(parents=True, exist_ok=True)
        for name in files:
            _link_file(Path(folder, name), to / name)


def link_the_rest(root: Path, out: Path, without: Iterable[str] = ()) -> None:
    """Link all arrays and ids of the store `root` that `out` lacks, with their group metadata; not the arrays `without`."""
    there = {*array_names(out), *without}
    for name in array_names(root):
        if name not in there:
            link_array(root, out, name)
    for ids in (names.IDS, names.GRAPH_IDS):
        link_tree(root / ids, out / ids)
    for top in ("graph", names.GRAPHS, names.EVENTS, "node", "edge", names.REDUCTIONS, names.CHECKSUMS):
        for group in (root / top).rglob("zarr.json"):
            target = out / group.relative_to(root)
            if target.parent.is_dir() and not target.exists():
                _link_file(group, target)


def _link_file(source: Path, target: Path) -> None:
    """A hard link, or a copy if the file system has none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
