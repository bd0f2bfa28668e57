"""`Mirror`: the copy in the cache of a store far away, opened as a store of this disk.

A mirror belongs to one content of the store's `zarr.json`, which has checksums of all that follows from it: a store that was
built again is another mirror. So what was fetched once needs no request to be trusted again, and opening a store that is in the
cache takes one request. Its arrays have files of full length whose chunks come as they are read (`ooc.stores.io.remote`).
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import zarr

from ooc.stores import array_names as names
from ooc.stores.arrays.checksums import FOLDER, has_checksums
from ooc.stores.arrays.zarr_rows import Shards, chunk_keys, open_zarr_rows
from ooc.stores.errors import ConfigError, StoreError
from ooc.stores.io.atomic import disk_errors, partial_path, publish
from ooc.stores.io.remote.array import NoRoom
from ooc.stores.io.remote.cache import CacheDir, default_folder, mirror_lock
from ooc.stores.io.remote.client import QUICK_ATTEMPTS, REQUESTS, Client, client_of
from ooc.stores.io.remote.group import RemoteGroup
from ooc.stores.io.remote.url import StoreUrl, store_path
from ooc.stores.manifest import Manifest
from ooc.stores.metadata import ATTRIBUTE, VERSION, arrays_listed, arrays_of, read_manifest, says_appended
from ooc.stores.sizes import format_bytes, parse_bytes

MIRRORS = "mirrors"
"""folder of the cache with the copies of stores"""
UPLOADING = "ooc-upload.json"
"""object that says that a store is being uploaded"""
_METADATA = "zarr.json"
Report = Callable[[str, int, int], None]
"""called with a step, the bytes done, and in total"""


@dataclass(frozen=True)
class CacheSettings:
    """Where the cache of stores far away is, and how large.

    Attributes:
        folder: Its directory; None for that of the user, `~/.cache/ooc/stores`.
        limit: Most bytes that it takes; None for half of what is free there.
    """

    folder: Path | None = None
    limit: int | None = None

    @classmethod
    def of(cls, cache_dir: Path | str | None, cache: int | str | None) -> Self:
        """Parse the settings as they are given. Raises ConfigError for what is no size."""
        return cls(None if cache_dir is None else Path(cache_dir), None if cache is None else parse_bytes(cache, "cache"))

    @property
    def given(self) -> bool:
        """Whether anything was set."""
        return self.folder is not None or self.limit is not None


class Mirror:
    """A store's copy, which stays in the cache until `close`.

    >>> with closing(Mirror.open(StoreUrl("s3://bucket/papers.ooc"), CacheSettings())) as mirror:
    ...     read_manifest(arrays_of(mirror.path))
    """

    def __init__(self, url: StoreUrl, path: Path, lock: int) -> None:
        self.url, self.path = url, path
        """its URL, and the directory of the copy"""
        self._lock: int | None = lock

    @classmethod
    def open(cls, url: StoreUrl, settings: CacheSettings) -> Self:
        """Make or find the copy of the store at `url`.

        Raises StoreError if there is no store, it cannot be read, or the cache cannot be written; ConfigError as `Client` does.
        """
        client, cache = client_of(url), CacheDir((settings.folder or default_folder()) / MIRRORS)
        top = _first(client)
        cache.open(settings.limit)
        inner = _inner(client, url, top)
        digest = hashlib.sha256(b"\0".join([str(url).encode(), top, inner[1]])).hexdigest()[:16]
        mirror = cache.folder / f"{url.name}-{digest}"
        lock = _shared(mirror)
        try:
            if not mirror.is_dir():
                with _alone(mirror):
                    if not mirror.is_dir():
                        _build(client, url, mirror, top, inner)
            return cls(url, mirror / "store", lock)
        except BaseException:
            os.close(lock)
            raise

    def is_latest(self) -> bool:
        """Whether the store is what it was when it was opened; a request. Raises StoreError as opening does."""
        return _first(client_of(self.url)) == (self.path / _METADATA).read_bytes()

    def fill(self, report: Report | None) -> None:
        """Fetch the topology, which is memory-mapped when a data set is opened, and report the progress.

        Raises StoreError as `RemoteArray.fill` does; if the cache has no room, with what the topology takes in all.
        """
        root = arrays_of(self.path)
        listed = [name for name in arrays_listed(root) if name.startswith("graph/")]
        with ExitStack() as opened:
            arrays = [(name, opened.enter_context(closing(open_zarr_rows(root, name, "mmap")))) for name in listed]
            fetched = {name: rows.segments for name, rows in arrays if hasattr(rows, "segments")}
            try:
                for name, segments in fetched.items():
                    segments.fill(None if report is None else partial(report, f"fetch {name}"))
            except NoRoom as error:
                total = sum(segments.total for segments in fetched.values())
                raise StoreError(f"{error}; the topology takes {format_bytes(total)} in all") from None

    def close(self) -> None:
        """Let the copy be given up when others need its space; idempotent."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


@contextmanager
def opened(path: Any, cache_dir: Path | str | None = None, cache: int | str | None = None) -> Iterator[Path]:
    """Yield the directory of a store: its own, or that of its copy if `path` is a URL.

    Raises ConfigError if cache settings are given for a store on this disk, else as `Mirror.open`.

    >>> with opened("s3://bucket/papers.ooc") as path: ...
    """
    mirror = mirror_of(path, cache_dir, cache)
    try:
        yield Path(path) if mirror is None else mirror.path
    finally:
        if mirror is not None:
            mirror.close()


def manifest_at(path: Any) -> Manifest:
    """Return the manifest of the store at a path or URL, by one request past the cache. Raises as `opened` and `read_manifest`
    do."""
    url = store_path(path)
    if not isinstance(url, StoreUrl):
        return read_manifest(url)
    with TemporaryDirectory() as folder:
        Path(folder, _METADATA).write_bytes(_first(client_of(url)))
        return read_manifest(folder)


def mirror_of(path: Any, cache_dir: Path | str | None = None, cache: int | str | None = None) -> Mirror | None:
    """Open the copy of the store at a URL; None for a store on this disk. Raises as `opened` does."""
    url, settings = store_path(path), CacheSettings.of(cache_dir, cache)
    if isinstance(url, StoreUrl):
        return Mirror.open(url, settings)
    if settings.given:
        raise ConfigError(f"`cache` and `cache_dir` are for stores at a URL, and {url} is on this disk: leave them out")
    return None


def _first(client: Client) -> bytes:
    """The store's zarr.json."""
    top = client.get(_METADATA, QUICK_ATTEMPTS)
    if top is not None:
        return top
    if client.get(UPLOADING, QUICK_ATTEMPTS) is not None:
        raise StoreError(f"{client.url} is being uploaded, or its upload was interrupted: ingest it again in that case")
    raise StoreError(f"there is no store at {client.url}: it has no zarr.json; check the URL, or build one with `ooc ingest`")


def _inner(client: Client, url: StoreUrl, top: bytes) -> tuple[str, bytes]:
    """Folder of the arrays below the store, "" for the store itself, and the zarr.json of that folder."""
    try:
        attributes = json.loads(top)["attributes"]
        version = attributes.get(VERSION, "")
        named = ATTRIBUTE in attributes and (not version or str(version).isdecimal())
    except (ValueError, KeyError, TypeError, AttributeError):
        named = False
    if not named:
        raise StoreError(f"{url} is not a finished ooc store: its zarr.json has no manifest; build one with `ooc ingest`")
    if not version:
        return "", b""
    folder = f"{names.VERSIONS}/{version}"
    inner = client.get(f"{folder}/{_METADATA}")
    if inner is None:
        raise StoreError(f"{url / folder}, where {url} has its arrays, is missing: upload the whole store")
    return folder, inner


def _shared(mirror: Path) -> int:
    """A descriptor with a shared lock that keeps a mirror from being removed."""
    with disk_errors(mirror):
        lock = os.open(mirror_lock(mirror), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_SH)
        os.utime(lock)
    return lock


@contextmanager
def _alone(mirror: Path) -> Iterator[None]:
    """The making of a mirror for one process at a time; a lock of its own, as who has made it keeps the shared one."""
    with disk_errors(mirror):
        making = os.open(mirror.with_name(f".{mirror.name}.making"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(making, fcntl.LOCK_EX)
        yield
    finally:
        os.close(making)


def _build(client: Client, url: StoreUrl, mirror: Path, top: bytes, inner: tuple[str, bytes]) -> None:
    """Fetch the metadata, the checksums and what is no array of plain shards, and publish the mirror."""
    making = partial_path(mirror)
    shutil.rmtree(making, ignore_errors=True)
    with disk_errors(mirror):
        root = making / "store" / inner[0]
        root.mkdir(parents=True)
        (making / "store" / _METADATA).write_bytes(top)
        if inner[0]:
            (root / _METADATA).write_bytes(inner[1])
        if says_appended(making / "store"):
            raise StoreError(
                f"{url} has appends that its arrays do not hold: run `ooc compact` on a local copy, and upload that"
            )
        group = RemoteGroup(root, making, StoreUrl(str(url / inner[0]) if inner[0] else str(url)))
        group.write()
        _fetch_metadata(client, group, inner[0])
    publish(making, mirror)


def _fetch_metadata(client: Client, group: RemoteGroup, folder: str) -> None:
    prefix, listed = f"{folder}/" if folder else "", arrays_listed(group.folder)
    with ThreadPoolExecutor(REQUESTS, "ooc-remote-file") as pool:

        def fetch(keys: Iterable[str]) -> None:
            for key, data in zip(keys := list(keys), pool.map(lambda key: client.get(prefix + key), keys), strict=True):
                if data is not None:
                    (group.folder / key).parent.mkdir(parents=True, exist_ok=True)
                    (group.folder / key).write_bytes(data)

        fetch(f"{above}{name}/{_METADATA}" for name in listed for above in ("", f"{FOLDER}/"))
        summed = [name for name in listed if has_checksums(group.folder, name)]
        fetch(f"{FOLDER}/{name}/{key}" for name in summed for key in _keys(group.folder / FOLDER / name))
        plain = {name: shards for name in summed if (shards := _shards(group.folder / name)) is not None}
        others = [name for name in listed if name not in plain and (group.folder / name / _METADATA).exists()]
        fetch(f"{name}/{key}" for name in others for key in _keys(group.folder / name))
        indexes = [
            (name, key, int(count) * shards.chunk_bytes, shards.index_bytes)
            for name, shards in plain.items()
            for key, count in zip(shards.keys, shards.chunks, strict=True)
        ]
        deque(pool.map(lambda each: _make_shard(client, group.folder, prefix, *each), indexes), maxlen=0)
    for name, shards in plain.items():
        paths = [group.folder / name / key for key in shards.keys]
        group.create(name, paths, (shards.chunks * shards.chunk_bytes).tolist(), int(shards.chunks.sum()))


def _make_shard(client: Client, folder: Path, prefix: str, name: str, key: str, payload: int, index_bytes: int) -> None:
    """Write a file of a shard's length that holds its index alone."""
    index = client.range(f"{prefix}{name}/{key}", payload, index_bytes)
    path = folder / name / key
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(payload + index_bytes)
        file.seek(payload)
        file.write(index.data)


def _opened_array(path: Path) -> "zarr.Array[Any]":
    try:
        return zarr.open_array(path, mode="r")
    except Exception as error:  # metadata zarr cannot parse: exceptions of many types
        raise StoreError(f"{path.name} cannot be opened as a Zarr array: {str(error).splitlines()[:1]}") from error


def _keys(path: Path) -> list[str]:
    return chunk_keys(_opened_array(path))


def _shards(path: Path) -> Shards | None:
    if not (path / _METADATA).exists():
        return None
    array = _opened_array(path)
    return Shards.of(array) if array.ndim and array.shape[0] else None
