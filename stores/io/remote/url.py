"""`StoreUrl`: the address of a store far away, wherever the path of a store may be given."""

import re
from pathlib import Path, PosixPath
from typing import Any

from ooc.stores.errors import ConfigError

SCHEMES = ("s3", "gs", "https", "http", "file")
READ_ONLY = ("https", "http", "file")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(/+)(.*)", re.DOTALL)


class StoreUrl(PosixPath):
    """A URL with the interface of a path, as far as names go: `/`, `name` and `parent`; nothing is there on the local disk.

    `Path` would drop a slash of `s3://`, and settings, messages and `ds.path` would show what nobody wrote.

    >>> StoreUrl("s3://bucket/papers.ooc") / "zarr.json"
    StoreUrl('s3://bucket/papers.ooc/zarr.json')
    """

    __slots__ = ()

    def __str__(self) -> str:
        return re.sub(r":/+", self._slashes, super().__str__(), count=1)

    @staticmethod
    def _slashes(found: "re.Match[str]") -> str:
        return ":///" if found.string[: found.start()] == "file" else "://"

    def absolute(self) -> "StoreUrl":
        """The URL itself."""
        return self

    @property
    def scheme(self) -> str:
        """What stands before the colon: "s3", "gs", "https", "http" or "file"."""
        return str(self).partition(":")[0]


def store_path(path: Any) -> Path:
    """Return the path of a store as a `StoreUrl` if it is a URL, else as a `Path`.

    Raises ConfigError for a scheme that is not supported, and for a URL with credentials or a query: they would get into
    settings and messages, so the message does not repeat them.

    >>> store_path("s3://bucket/papers.ooc"), store_path("papers.ooc")
    (StoreUrl('s3://bucket/papers.ooc'), PosixPath('papers.ooc'))
    """
    if isinstance(path, StoreUrl):
        return path
    found = _URL.fullmatch(str(path))
    if found is None or not (found[1].lower() in SCHEMES or found[2] == "//"):
        return Path(path)
    scheme, rest = found[1].lower(), found[3]
    if scheme not in SCHEMES:
        raise ConfigError(f"a store's URL begins with {', '.join(f'{each}://' for each in SCHEMES[:4])}, not {scheme}://")
    if "@" in rest.partition("/")[0] or "?" in rest or "#" in rest:
        raise ConfigError(
            f"a store's {scheme}:// URL holds no user, password, query or fragment: give credentials by the environment"
        )
    if not rest.strip("/"):
        raise ConfigError(f"{scheme}:// names no store: write {scheme}://{'BUCKET' if scheme in ('s3', 'gs') else 'HOST'}/PATH")
    return StoreUrl(f"{scheme}:/{rest.rstrip('/')}")


def refuse_url(path: Any, what: str) -> Path:
    """Return the path of a local store. Raises ConfigError for a URL; `what` cannot be done there.

    >>> refuse_url("papers.ooc", "appended to")
    PosixPath('papers.ooc')
    """
    found = store_path(path)
    if isinstance(found, StoreUrl):
        raise ConfigError(
            f"{found} cannot be {what} where it is: change a local copy of the store and upload it, or ingest it again"
        )
    return found
