"""An HTTP server with ranges whose latency, bandwidth and failures are imposed; object storage on one machine.

    python -m tools.bench.lib.range_server FOLDER --latency 0.02 --bandwidth 200MB --failures 0.01

Prints its URL, then serves until its standard input is closed. `GET /counts` gives what was asked for so far, as JSON. To a
client of S3 or Google's storage the folders in FOLDER are buckets; signatures are not looked at, and objects can only be read.
"""

import argparse
import json
import os
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from ooc.stores.sizes import parse_bytes

_PIECE_BYTES = 2**18
COUNTS = "/counts"
KINDS = ("status", "cut", "drop")
"""failures: an answer with status 503, one that ends early, and none at all"""


@dataclass
class Conditions:
    """What the server imposes. `failing(path)` names one of `KINDS`, or None for an answer as it should be."""

    latency_s: float = 0.0
    bandwidth: float | None = None
    """bytes per second of all connections together; None for no limit"""
    failing: Callable[[str], str | None] = lambda path: None
    counts: Counter[str] = field(default_factory=Counter)
    """requests, bytes and failures so far, and microseconds with a request in progress"""
    asked: list[str] = field(default_factory=list)
    """paths of all requests"""
    _flying: int = 0
    _since: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def request(self, path: str) -> Iterator[str | None]:
        """Count a request, impose the latency and yield how it fails."""
        failure = self.failing(path)
        with self._lock:
            self.asked.append(path)
            self.counts["requests"] += 1
            self.counts["failures"] += failure is not None
            self._since = self._since if self._flying else time.perf_counter()
            self._flying += 1
        try:
            time.sleep(self.latency_s)
            yield failure
        finally:
            with self._lock:
                self._flying -= 1
                if not self._flying:
                    self.counts["busy_us"] += round((time.perf_counter() - self._since) * 1e6)

    def sent(self, nbytes: int) -> None:
        """Count bytes of an answer."""
        with self._lock:
            self.counts["bytes"] += nbytes


def at_random(share: float, seed: int = 0) -> Callable[[str], str | None]:
    """Failures of a share of the requests, of all kinds in turn."""
    draw = random.Random(seed)
    lock = threading.Lock()

    def failing(path: str) -> str | None:
        with lock:
            return draw.choice(KINDS) if draw.random() < share else None

    return failing


class Pace:
    """Divides a bandwidth among connections, piece by piece."""

    def __init__(self, bandwidth: float | None) -> None:
        self._bandwidth, self._free, self._lock = bandwidth, 0.0, threading.Lock()

    def wait(self, nbytes: int) -> None:
        if self._bandwidth is None:
            return
        with self._lock:
            self._free = max(self._free, time.perf_counter()) + nbytes / self._bandwidth
            until = self._free
        time.sleep(max(0.0, until - time.perf_counter()))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, folder: Path, conditions: Conditions) -> None:
        self.folder, self.conditions, self.pace = folder, conditions, Pace(conditions.bandwidth)
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that are gone are none."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        if self.path == COUNTS:
            self._text(200, json.dumps(self.server.conditions.counts).encode())
            return
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = unquote(self.path.partition("?")[0])
        with self.server.conditions.request(path) as failure:
            self._found(path, body, failure)

    def _found(self, path: str, body: bool, failure: str | None) -> None:
        if failure == "drop":
            self.close_connection = True
            return
        if failure == "status":
            self._text(503, b"")
            return
        file = self.server.folder / path.lstrip("/")
        if not file.is_file():
            self._text(404, b"")
            return
        with file.open("rb") as opened:
            self._send(opened.fileno(), body, cut=failure == "cut")

    def _send(self, fd: int, body: bool, cut: bool) -> None:
        found = os.fstat(fd)
        size = found.st_size
        begin, end, asked = 0, size, self.headers.get("Range")
        if asked is not None:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            begin, end = (int(first), min(size, int(last or size - 1) + 1)) if first else (max(0, size - int(last)), size)
            if begin >= end:
                self._text(416, b"")
                return
        self.send_response(200 if asked is None else 206)
        self.send_header("Content-Length", str(end - begin))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{found.st_mtime_ns:x}-{size:x}"')
        self.send_header("Last-Modified", formatdate(found.st_mtime, usegmt=True))
        if asked is not None:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{size}")
        self.end_headers()
        self.wfile.flush()
        if cut:
            end, self.close_connection = begin + (end - begin) // 2, True
        while body and begin < end:
            nbytes = min(_PIECE_BYTES, end - begin)
            self.server.pace.wait(nbytes)
            sent = os.sendfile(self.connection.fileno(), fd, begin, nbytes)
            begin += sent
            self.server.conditions.sent(sent)

    def _text(self, status: int, text: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        with suppress(OSError):
            self.wfile.write(text)

    def log_message(self, *arguments: Any) -> None:
        """Nothing is printed."""


@contextmanager
def serving(folder: Path, conditions: Conditions) -> Iterator[str]:
    """Serve a folder from threads of this process; yields the URL.

    >>> with serving(work, Conditions(latency_s=0.02)) as url:
    ...     ooc.open(f"{url}/papers.ooc")
    """
    server = _Server(folder, conditions)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--latency", type=float, default=0.0, help="seconds before every answer")
    parser.add_argument("--bandwidth", type=parse_bytes, help="bytes per second of all connections together")
    parser.add_argument("--failures", type=float, default=0.0, help="share of the requests that fail or are cut short")
    a = parser.parse_args()
    with serving(a.folder, Conditions(a.latency, a.bandwidth, at_random(a.failures))) as url:
        print(url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
