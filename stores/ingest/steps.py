"""Resuming: a journal of finished steps, so that an ingest killed at any moment goes on where it stood.

A step writes only below its own outputs. It counts as done when the journal, replaced atomically, holds its result;
what an unfinished step left behind is removed before it runs again. The journal carries a fingerprint of the settings and
of every input file's size and modification time: another fingerprint starts afresh.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from stores.atomic import disk_errors, partial_path, write_file
from stores.errors import StoreError


def fingerprint(settings: str, files: Iterable[Path]) -> str:
    """Hex digest of the settings and of the files' paths, sizes and modification times (nanoseconds)."""
    digest = hashlib.sha256(settings.encode())
    for path in files:
        status = path.stat()
        digest.update(f"\n{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}".encode())
    return digest.hexdigest()


def remove(path: Path) -> None:
    """Remove a file or a directory, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class Steps:
    """The working directory of one ingest, `<out>.partial`, and its journal. One process at a time (a lock).

    `store` becomes the published store, `stage` holds intermediate tables, `spill` the engine's own files.

    >>> steps = Steps(out, fingerprint("settings", files))
    >>> steps.run("scan", lambda: {"edges": 12})  # on a second run: the result, without the work
    {'edges': 12}
    """

    def __init__(self, out: Path, key: str) -> None:
        self.root = partial_path(out)
        self.store, self.stage, self.spill = (self.root / name for name in ("store", "stage", "spill"))
        self.resumed: list[str] = []
        with disk_errors(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise StoreError(f"{self.root} is in use by another ingest into {out}: wait for it, or stop it") from None
        self._key = key
        self._done = self._read()
        with disk_errors(self.root):
            remove(self.spill)
            for path in (self.store, self.stage, self.spill):
                path.mkdir(exist_ok=True)

    def run(self, name: str, work: Callable[[], dict[str, Any]], outputs: Iterable[Path] = ()) -> dict[str, Any]:
        """The result (JSON) of step `name`: recorded, or of `work()` after removing `outputs`."""
        if name in self._done:
            self.resumed.append(name)
            return self._done[name]
        with disk_errors(self.root):
            for path in outputs:
                remove(path)
            self.stage.mkdir(exist_ok=True)
        self._done[name] = work()
        self._write()
        return self._done[name]

    def close(self, keep: bool) -> None:
        """Let go of the lock; without `keep` the working directory goes too."""
        if not keep:
            shutil.rmtree(self.root, ignore_errors=True)
        os.close(self._lock)

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads((self.root / "steps.json").read_bytes())
            if found["fingerprint"] == self._key:
                return dict(found["done"])
        except (OSError, ValueError, KeyError, TypeError):
            pass  # no journal, or a damaged one: start afresh
        with disk_errors(self.root):
            for path in self.root.iterdir():
                if path.name != "lock":
                    remove(path)
        return {}

    def _write(self) -> None:
        text = json.dumps({"fingerprint": self._key, "done": self._done}, indent=1)
        write_file(self.root / "steps.json", text.encode())
