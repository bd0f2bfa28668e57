"""Building a store at a URL: it is built on this disk, uploaded, and exists from the moment its `zarr.json` is there."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ooc.stores.errors import ConfigError, StoreError
from ooc.stores.io.atomic import disk_errors
from ooc.stores.io.remote.cache import default_folder
from ooc.stores.io.remote.client import QUICK_ATTEMPTS, client_of
from ooc.stores.io.remote.url import READ_ONLY, StoreUrl, store_path
from ooc.stores.remote.mirror import UPLOADING

if TYPE_CHECKING:
    from ooc.stores.ingest.duck import Progress

_TOP = "zarr.json"
_FILES_AT_ONCE = 4
"""each of which obstore sends in several parts at once"""


@contextmanager
def built_for(out: Path | str, cache_dir: Path | str | None = None, progress: "Progress | None" = None) -> Iterator[Path]:
    """Yield where to build the store `out`: there or, if it is a URL, in the cache folder, from which it is then uploaded.

    What is built stays there if the process is killed, so that the same ingest continues, and if the upload fails; it goes
    after another error and after the upload.

    Raises ConfigError for a URL that stores cannot be written to; StoreError if there is a store, or the upload fails.

    >>> with built_for("s3://bucket/papers.ooc") as path:
    ...     ingest(IngestSpec(out=path, ...))
    """
    url = store_path(out)
    if not isinstance(url, StoreUrl):
        if cache_dir is not None:
            raise ConfigError(f"`cache_dir` is for a store at a URL, and {url} is on this disk: leave it out")
        yield url
        return
    check_free(url)
    folder = Path(cache_dir or default_folder()) / "ingest" / hashlib.sha256(str(url).encode()).hexdigest()[:16]
    path = folder / url.name
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(path, ignore_errors=True)  # built, but killed while it was uploaded: its input may be another now
    try:
        yield path
    except Exception:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    try:
        upload(path, url, progress)
    except StoreError as error:
        raise StoreError(f"{error}; the store that was built is in {path}, and can be uploaded from there") from error
    shutil.rmtree(folder, ignore_errors=True)


def check_free(url: StoreUrl) -> None:
    """Raise ConfigError if stores cannot be written to the URL's scheme, StoreError if there is a store or no access."""
    if url.scheme in READ_ONLY:
        raise ConfigError(f"{url}: a store is written to a path, or to an s3:// or gs:// URL; build it there, and upload it")
    if client_of(url).get(_TOP, QUICK_ATTEMPTS) is not None:
        raise StoreError(f"{url} exists already: choose another name, or remove it first")


def upload(path: Path, url: StoreUrl, progress: "Progress | None" = None) -> None:
    """Upload the store at `path`: its arrays first, its `zarr.json` last. A killed upload leaves no store, and says so.

    Raises StoreError if there is a store already, or it cannot be written.
    """
    check_free(url)
    client = client_of(url)
    client.put(UPLOADING, json.dumps({"store": "being uploaded"}).encode())
    files = sorted(each for each in path.rglob("*") if each.is_file() and each != path / _TOP)
    total, done = sum(each.stat().st_size for each in files), 0
    with ThreadPoolExecutor(_FILES_AT_ONCE, "ooc-upload") as pool:
        flying = {pool.submit(client.put, each.relative_to(path).as_posix(), each): each for each in files}
        try:
            for each in as_completed(flying):
                each.result()
                done += flying[each].stat().st_size
                if progress is not None:
                    progress("upload", done, total, "bytes")
        finally:
            for each in flying:
                each.cancel()
    client.put(_TOP, path / _TOP)
    client.delete(UPLOADING)
