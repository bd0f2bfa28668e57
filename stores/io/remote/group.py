"""`RemoteGroup`: what a group of the cache is a copy of, by a file in it."""

import fcntl
import json
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from ooc.stores.errors import StoreError
from ooc.stores.io.atomic import disk_errors, write_file
from ooc.stores.io.chunk_sums import ChunkSums
from ooc.stores.io.remote.array import RemoteArray
from ooc.stores.io.remote.cache import PRESENT, CacheDir, Presence
from ooc.stores.io.remote.client import REQUESTS, Client, client_of
from ooc.stores.io.remote.url import StoreUrl

MARKER = "ooc-remote.json"
_PART_BYTES = 2**22


@dataclass(frozen=True)
class RemoteGroup:
    """A group whose arrays are fetched as they are read, in a folder of the cache.

    >>> group = RemoteGroup.at(ds_folder)
    >>> group.url
    StoreUrl('s3://bucket/papers.ooc')
    """

    folder: Path
    mirror: Path
    """folder of the copy of the whole store"""
    url: StoreUrl

    @classmethod
    def at(cls, folder: Path) -> "RemoteGroup | None":
        """Return the group whose copy is in `folder`, None if it is no copy."""
        try:
            found = json.loads((folder / MARKER).read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            raise StoreError(f"{folder / MARKER} is damaged: remove the cache folder {folder}") from None
        return cls(folder, Path(os.path.normpath(folder / found["mirror"])), StoreUrl(found["url"]))

    def write(self) -> None:
        """Mark the folder as the copy."""
        text = {"url": str(self.url), "mirror": os.path.relpath(self.mirror, self.folder)}
        write_file(self.folder / MARKER, json.dumps(text).encode())

    @property
    def client(self) -> Client:
        """Reads its objects."""
        return client_of(self.url)

    @property
    def cache(self) -> CacheDir:
        """The cache that the copy is in."""
        return CacheDir(self.mirror.parent)

    @property
    def advice(self) -> str:
        """What to do about a damaged chunk."""
        return f"remove {self.mirror}, its copy in the cache; if that does not help, run `ooc verify` on the store"

    def create(self, name: str, paths: Sequence[Path], payload: Sequence[int], chunks: int) -> None:
        """Make the record of the array `name`, of which no chunk is there yet."""
        Presence.create(self._record(PRESENT, name), chunks)
        listed = self._record(f"{PRESENT}.paths", name)
        listed.parent.mkdir(exist_ok=True)
        lines = (f"{size} {path.relative_to(self.mirror)}" for path, size in zip(paths, payload, strict=True))
        listed.write_text("\n".join(lines))

    def array(
        self, name: str, paths: tuple[Path, ...], payload: NDArray[np.int64], chunk_bytes: int, sums: ChunkSums | None
    ) -> RemoteArray | None:
        """Return the array `name`, whose copies are at `paths`; None if they are whole files."""
        record = self._record(PRESENT, name)
        if not record.exists():
            return None
        cache = self.cache
        presence = Presence(record, int(payload.sum()) // chunk_bytes, cache)
        keys = [path.relative_to(self.folder).as_posix() for path in paths]
        return RemoteArray(self.url, name, self.client, keys, paths, payload, chunk_bytes, sums, presence, cache)

    def _record(self, kind: str, name: str) -> Path:
        inside = self.folder.relative_to(self.mirror) / name
        return self.mirror / kind / "__".join(inside.parts)

    def file(self, name: str, crc32c: str | None, again: bool = False) -> None:
        """Fetch the file `name` whole unless it is there, or `again`; `crc32c` (hex) is compared.

        Raises StoreError if that fails, or the cache has no room.
        """
        path = self.folder / name
        if path.exists() and not again:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.partial")
        with disk_errors(path):
            fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)  # one process at a time
                if again or not path.exists():
                    self._download(name, fd, crc32c)
                    os.rename(partial, path)
            finally:
                os.close(fd)

    def _download(self, name: str, fd: int, crc32c: str | None) -> None:
        client, cache = self.client, self.cache
        size = client.size(name)
        if size is None:
            raise StoreError(f"{self.url / name} is missing: the store is incomplete; upload it again")
        if not cache.reserve(size, insist=True):
            raise StoreError(f"{self.url / name} takes {size:,} bytes of the cache in {cache.folder}: give a larger `cache`")

        def part(begin: int) -> None:
            os.pwrite(fd, client.range(name, begin, min(_PART_BYTES, size - begin)).data, begin)

        try:
            os.ftruncate(fd, size)
            with ThreadPoolExecutor(REQUESTS // 2, "ooc-remote-file") as pool:
                deque(pool.map(part, range(0, size, _PART_BYTES)), maxlen=0)
            os.fsync(fd)
            if crc32c is not None and _crc_of(fd) != crc32c:
                raise StoreError(f"{self.url / name} does not match its checksum: run `ooc verify` on the store")
        except BaseException:
            cache.release(size)
            raise


def _crc_of(fd: int) -> str:
    crc, at = 0, 0
    while block := os.pread(fd, _PART_BYTES, at):
        crc, at = google_crc32c.extend(crc, block), at + len(block)
    return f"{crc:08x}"
