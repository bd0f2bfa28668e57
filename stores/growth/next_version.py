"""The next version of a store's arrays, written beside the current one and published whole."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ooc.stores.array_names import VERSIONS
from ooc.stores.growth.lineage import forget_states
from ooc.stores.growth.versions import remove_unused
from ooc.stores.io.atomic import disk_errors, partial_path
from ooc.stores.metadata import read_manifest, set_version


@contextmanager
def next_version(path: Path, version: str) -> Iterator[tuple[Path, Path]]:
    """Make the version behind `version` of the store at `path`, whose "growth" and "view" the caller has alone.

    Yields (folder to write the arrays in, folder that `finish_store` publishes them as). At the end of the block that is the
    current version, and its rows have no history of appends; after an exception or a kill the store has its earlier one.

    Raises:
        StoreError: If the disk is full.

    >>> with next_version(path, version_of(path)) as (out, final):
    ...     link_the_rest(arrays_of(path), out)
    ...     finish_store(out, final, manifest)
    """
    remove_unused(path, version, None)  # also what a killed call had written, but not made current
    new = str(int(version or 0) + 1)
    final = path / VERSIONS / new
    out = partial_path(final)
    with disk_errors(final):
        shutil.rmtree(out, ignore_errors=True)
        try:
            out.mkdir(parents=True)
            yield out, final
        except BaseException:
            shutil.rmtree(out, ignore_errors=True)
            raise
    forget_states(path)
    set_version(path, read_manifest(final), new)
    remove_unused(path, new, None)
