"""`Client`: objects below one URL, read and written with retries; errors are one line without credentials."""

import os
import random
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ooc.stores.errors import ConfigError, StoreError
from ooc.stores.io.read_plan import ReadCost
from ooc.stores.io.remote.url import StoreUrl

T = TypeVar("T")
Bytes = NDArray[np.uint8]
REQUESTS = 32
"""requests in flight, at most: with chunks of 1 MiB enough for 1 GB/s at a latency of 30 ms"""
ATTEMPTS = 10
"""of a request, over about a minute"""
QUICK_ATTEMPTS = 4
"""of the first request of a store, within a second: a mistake in its URL should be said at once"""
_FIRST_DELAY_S, _MOST_DELAY_S = 0.1, 10.0
_CONNECT_S, _TIMEOUT_S = "5s", "60s"
_SMALL_BYTES = 2**17
_MEASURED_BYTES = 2**23
_DEFAULT_LATENCY_S, _DEFAULT_BYTE_S = 0.03, 1e-8
_FOR_GOOD = frozenset(
    [
        *("NotFoundError", "PermissionDeniedError", "UnauthenticatedError", "InvalidPathError", "NotSupportedError"),
        *("UnknownConfigurationKeyError", "AlreadyExistsError", "PreconditionError"),
    ]
)
_ENVIRONMENT = ("AWS_", "GOOGLE_", "SSL_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


class _Cut(Exception):
    """An answer that is not what was asked for."""


class Meter:
    """What requests took: the latency of small ones, and the bandwidth while any is in flight. Thread-safe."""

    def __init__(self) -> None:
        self.requests = self.failures = self.nbytes = 0
        self._latencies: list[float] = []
        self._flying, self._busy_s, self._since = 0, 0.0, 0.0
        self._lock = threading.Lock()

    def begin(self) -> float:
        now = time.perf_counter()
        with self._lock:
            if self._flying == 0:
                self._since = now
            self._flying += 1
        return now

    def end(self, begun: float, nbytes: int) -> None:
        """A request is over; `nbytes` came, -1 for a failure."""
        now = time.perf_counter()
        with self._lock:
            self.requests += 1
            self._flying -= 1
            if self._flying == 0:
                self._busy_s += now - self._since
            if nbytes < 0:
                self.failures += 1
                return
            self.nbytes += nbytes
            if nbytes <= _SMALL_BYTES and len(self._latencies) < 1000:
                self._latencies.append(now - begun)

    @property
    def cost(self) -> ReadCost:
        """The cost of reads with `REQUESTS` in flight, as far as it was measured."""
        with self._lock:
            latency = float(np.median(self._latencies)) if self._latencies else _DEFAULT_LATENCY_S
            enough = self.nbytes >= _MEASURED_BYTES and self._busy_s > 0
            byte_s = self._busy_s / self.nbytes if enough else _DEFAULT_BYTE_S
        return ReadCost(latency / REQUESTS, byte_s, latency)


class Client:
    """Reads and writes the objects below a URL; any number of threads may.

    Raises ConfigError if obstore is not installed or its settings in the environment are invalid.

    >>> Client(StoreUrl("s3://bucket/papers.ooc")).get("zarr.json")
    """

    def __init__(self, url: StoreUrl, pause: Callable[[float], None] = time.sleep) -> None:
        self.url, self.meter, self._pause = url, Meter(), pause
        try:
            import obstore
            from obstore.store import from_url
        except ImportError:
            raise ConfigError(f"{url} is read through obstore, which is not installed: pip install 'ooc[remote]'") from None
        self._obstore = obstore
        settings: dict[str, Any] = {}
        if url.scheme != "file":  # retries are ours: they also cover answers that were cut short or damaged
            settings["client_options"] = {"allow_http": True, "connect_timeout": _CONNECT_S, "timeout": _TIMEOUT_S}
            settings["retry_config"] = {"max_retries": 0}
        try:
            self._store: Any = from_url(str(url), **settings)
        except Exception as error:  # of obstore, whose classes are not all its base's
            if url.scheme == "file":
                raise StoreError(f"there is no store at {url}: check the URL, or build one with `ooc ingest`") from None
            raise ConfigError(f"{url} cannot be opened: {reason_of(error)}; check the URL and the environment") from None

    @property
    def cost(self) -> ReadCost:
        """The cost of reads, as measured by this client's requests."""
        return self.meter.cost

    def get(self, key: str, attempts: int = ATTEMPTS) -> bytes | None:
        """Return an object, None if there is none. Raises StoreError as `range` does."""
        try:
            return self._retried(key, lambda: bytes(self._obstore.get(self._store, key).bytes()), attempts)
        except FileNotFoundError:
            return None

    def size(self, key: str) -> int | None:
        """Return the bytes of an object, None if there is none. Raises StoreError as `range` does."""
        try:
            return self._retried(key, lambda: int(self._obstore.head(self._store, key)["size"]), ATTEMPTS)
        except FileNotFoundError:
            return None

    def range(self, key: str, begin: int, nbytes: int) -> Bytes:
        """Return bytes begin..begin + nbytes - 1 of an object, uint8[nbytes].

        Failures are retried with exponential backoff. Raises StoreError if there is no such object, it is too short, access is
        denied, or retries are of no use.
        """

        def request() -> Bytes:
            data = np.frombuffer(self._obstore.get_range(self._store, key, start=begin, length=nbytes), np.uint8)
            if len(data) != nbytes:
                raise _Cut(f"{len(data)} bytes came where {nbytes} were asked for")
            return data

        try:
            return self._retried(key, request, ATTEMPTS)
        except FileNotFoundError:
            raise StoreError(f"{self.url / key} is missing: the store was changed or is incomplete; upload it again") from None

    def put(self, key: str, source: Path | bytes) -> None:
        """Write an object, in parts if it is large. Raises StoreError as `range` does."""
        try:
            self._retried(key, lambda: self._obstore.put(self._store, key, source), ATTEMPTS, "written")
        except FileNotFoundError:
            raise StoreError(f"{self.url / key} cannot be written: there is no such bucket; make it first") from None

    def delete(self, key: str) -> None:
        """Remove an object. Raises StoreError as `range` does."""
        with suppress(FileNotFoundError):
            self._retried(key, lambda: self._obstore.delete(self._store, key), ATTEMPTS, "removed")

    def _retried(self, key: str, request: Callable[[], T], attempts: int, what: str = "read") -> T:
        """Raises FileNotFoundError if there is no such object."""
        for attempt in range(1, attempts + 1):
            begun = self.meter.begin()
            try:
                found = request()
            except FileNotFoundError as error:
                self.meter.end(begun, 0)
                if "NoSuchBucket" in str(error):
                    raise StoreError(f"{self.url / key} cannot be {what}: there is no such bucket; check the URL") from None
                raise
            except Exception as error:
                self.meter.end(begun, -1)
                if passing(error) and attempt < attempts:
                    delay = min(_FIRST_DELAY_S * 2 ** (attempt - 1), _MOST_DELAY_S)
                    self._pause(delay * (0.5 + random.random() / 2))  # not all at once again
                    continue
                raise self._failed(key, error, attempt, what) from None
            self.meter.end(begun, getattr(found, "nbytes", None) or (len(found) if isinstance(found, bytes) else 0))
            return found
        raise AssertionError("attempts are at least one")

    def _failed(self, key: str, error: Exception, attempts: int, what: str) -> StoreError:
        name, advice = type(error).__name__, "check the URL and the network"
        if name in ("PermissionDeniedError", "UnauthenticatedError") or _without_credentials(str(error)):
            advice = "check the credentials in the environment"
        elif reason_of(error) == _NO_RANGES:
            advice = "serve the store by one that does, such as nginx, or copy it to this disk"
        times = f" (tried {attempts} times)" if attempts > 1 else ""
        return StoreError(f"{self.url / key} cannot be {what}: {reason_of(error)}{times}; {advice}")


def passing(error: Exception) -> bool:
    """Whether a failure may be over when the request is made again.

    >>> passing(TimeoutError())
    True
    """
    if type(error).__name__ in _FOR_GOOD or isinstance(error, FileNotFoundError | PermissionError | ValueError | TypeError):
        return False
    text = str(error)
    code = None if _without_credentials(text) else _status(text)
    if code is not None:
        return code in (408, 425, 429) or code >= 500
    return "dns error" not in text and not _without_credentials(text)


def _without_credentials(text: str) -> bool:
    """Whether credentials were looked for where clouds give them to their machines, and not found."""
    first = text.partition("Debug source")[0]
    return "169.254.169.254" in text or "metadata.google" in text or "redential" in first


def _status(text: str) -> int | None:
    found = re.search(r"(?:status code|status(?: client| server)? error)\D{0,20}(\d{3})", text) or re.search(
        r"status: (\d{3})\b", text
    )
    return None if found is None else int(found[1])


_NO_RANGES = "the server does not answer requests for ranges of bytes"
_REASONS = (
    ("dns error", "its host is not found"),
    ("ConnectionRefused", "the connection is refused"),
    ("timed out", "no answer in time"),
    ("TimedOut", "no answer in time"),
    ("Network is unreachable", "the network is not reachable"),
    ("NetworkUnreachable", "the network is not reachable"),
    ("certificate", "its certificate is not accepted"),
    ("InvalidContentType", "the server does not speak https"),
    ("Range request not supported", _NO_RANGES),
    ("IncompleteMessage", "the answer is cut short"),
    ("IncompleteBody", "the answer is cut short"),
    ("decoding response body", "the answer is cut short"),
    ("end of file before message length reached", "the answer is cut short"),
    ("ConnectionReset", "the connection is lost"),
    ("BrokenPipe", "the connection is lost"),
)


def reason_of(error: Exception) -> str:
    """Describe a failure of obstore on one line, without URLs, which may hold signatures."""
    if isinstance(error, _Cut):
        return str(error)
    name, text = type(error).__name__, str(error)
    if name in ("PermissionDeniedError", "UnauthenticatedError") or isinstance(error, PermissionError):
        return "access is denied"
    if _without_credentials(text):
        return "no credentials are found"
    code = _status(text)
    if code is not None:
        return f"the server answers with status {code}"
    for mark, reason in _REASONS:
        if mark in text:
            return reason
    first = " ".join(text.partition("Debug source")[0].split()) or name
    return re.sub(r"\S*://\S*", "the URL", first)[:200].rstrip(" .;:-")


def client_of(url: StoreUrl) -> Client:
    """Return the process's client of `url`, whose connections and measurements are shared.

    >>> client_of(StoreUrl("https://example.org/papers.ooc")).get("zarr.json")
    """
    own = tuple(sorted((name, value) for name, value in os.environ.items() if name.upper().startswith(_ENVIRONMENT)))
    return _client(str(url), own, os.getpid())


@lru_cache(maxsize=8)
def _client(url: str, environment: tuple[tuple[str, str], ...], process: int) -> Client:
    """By the environment too, which may have other credentials by now, and by the process: a fork has no threads of obstore."""
    return Client(StoreUrl(url))
