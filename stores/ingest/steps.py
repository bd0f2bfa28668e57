"""Resuming: a journal of finished steps, so that a killed ingest continues where it stopped.

A step writes only below its own outputs. It is done when the journal, replaced atomically, has its result; outputs of
unfinished steps are removed before they run again. The journal has a fingerprint of the settings and of every input file's size
and modification time; with another fingerprint the ingest starts over and says so. The lock file is created first and removed
last, and marks the directory as an ingest's: others are left alone.
"""

import fcntl
import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import Any

from ooc.stores.errors import OocWarning, StoreError
from ooc.stores.io.atomic import disk_errors, partial_path, write_file
from ooc.stores.io.working import JOURNAL, LOCK, SPILL, STAGE, STORE, clear, remove, remove_emptied


def fingerprint(settings: str, files: Iterable[Path]) -> str:
    """Hex digest of the settings and of the files' paths, sizes and modification times (nanoseconds)."""
    digest = hashlib.sha256(settings.encode())
    for path in files:
        status = path.stat()
        digest.update(f"\n{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}".encode())
    return digest.hexdigest()


class Steps:
    """The working directory of one ingest, `<out>.partial`, and its journal. One process at a time (a lock).

    `store` becomes the published store, `stage` has intermediate tables, `spill` the engine's files. Finished steps of an
    earlier attempt that cannot be used are discarded with a warning. Raises StoreError if the directory is in use or not an
    ingest's, or the disk refuses.

    >>> steps = Steps(out, fingerprint("settings", files))
    >>> steps.run("scan", lambda: {"edges": 12})  # on a second run: the result, without the work
    {'edges': 12}
    """

    def __init__(self, out: Path, key: str) -> None:
        self.root = partial_path(out)
        # Absolute, as pyarrow takes a relative path with a colon for a URI.
        self.store, self.stage, self.spill = (self.root.absolute() / name for name in (STORE, STAGE, SPILL))
        self.resumed: list[str] = []
        self._label = ""
        self._key = key
        self._lock = self._take(out)
        try:
            with disk_errors(self.root):
                self._done = self._read()
                self._earlier = frozenset(self._done)
                remove(self.spill)
                for path in (self.store, self.stage, self.spill):
                    path.mkdir(exist_ok=True)
        except BaseException:
            os.close(self._lock)
            raise

    def of(self, label: str) -> "Steps":
        """The steps of one type of nodes or edges: their names end in `label`, and they have a folder of `stage`."""
        own = copy(self)
        own._label, own.stage = f" {label}", self.stage / label.replace(":", "__")
        return own

    def run(self, name: str, work: Callable[[], dict[str, Any]], outputs: Iterable[Path] = ()) -> dict[str, Any]:
        """Return the recorded result (JSON) of step `name`, or run `work()` after removing `outputs`."""
        name += self._label
        if name in self._done:
            if name in self._earlier and name not in self.resumed:
                self.resumed.append(name)
            return self._done[name]
        with disk_errors(self.root):
            for path in outputs:
                remove(path)
            self.stage.mkdir(parents=True, exist_ok=True)
        self._done[name] = work()
        self._write()
        return self._done[name]

    def close(self, keep: bool) -> None:
        """Release the lock; unless `keep`, remove the working directory, except files that are not an ingest's."""
        if not keep:
            with suppress(OSError):
                clear(self.root)
                remove_emptied(self.root)
        os.close(self._lock)

    def _take(self, out: Path) -> int:
        """Lock the directory and return the descriptor; an empty directory may be left by an ingest killed at its start."""
        with disk_errors(self.root):
            with suppress(FileExistsError):
                self.root.mkdir(parents=True, exist_ok=True)
            there = os.listdir(self.root) if self.root.is_dir() else ["."]
            if there and LOCK not in there:
                what = f"{self.root}, where {out} would be built, was not made by an ingest"
                raise StoreError(f"{what}: move it away, or choose another name than {out}")
            lock = os.open(self.root / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise StoreError(f"{self.root} is in use by another ingest into {out}: wait for it, or stop it") from None
        return lock

    def _read(self) -> dict[str, Any]:
        """The finished steps of an earlier attempt; unusable ones are removed."""
        try:
            found = json.loads((self.root / JOURNAL).read_bytes())
            same, done = found["fingerprint"] == self._key, dict(found["done"])
        except FileNotFoundError:
            same, done = False, {}  # no finished step
        except (ValueError, KeyError, TypeError):
            same, done = False, {}
            self._discards(f"{self.root / JOURNAL}, which records what it had finished, is damaged")
        if not self.store.is_dir():
            same, done = False, {}  # published, but killed before the rest was removed
        if same:
            return done
        if done:
            self._discards(f"it had other settings or input files than these, and had finished {', '.join(done)}")
        clear(self.root)
        return {}

    def _discards(self, why: str) -> None:
        """Say that work is lost, before it is removed: what comes may fail, and a result would then not say so."""
        warnings.warn(f"an interrupted ingest in {self.root} is discarded: {why}", OocWarning, stacklevel=2)

    def _write(self) -> None:
        text = json.dumps({"fingerprint": self._key, "done": self._done}, indent=1)
        write_file(self.root / JOURNAL, text.encode())
