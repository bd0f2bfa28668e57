"""The client against a real server that fails, stalls, cuts answers short and refuses."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from ooc.stores.errors import ConfigError, StoreError
from ooc.stores.io.remote import client as client_module
from ooc.stores.io.remote.client import ATTEMPTS, Client, client_of
from ooc.stores.io.remote.url import StoreUrl
from tools.bench.lib.range_server import KINDS, Conditions, serving

pytest.importorskip("obstore")
DATA = np.random.default_rng(0).integers(0, 256, 300_000).astype(np.uint8)


class Failing:
    """The next failures, in order; then answers as they should be."""

    def __init__(self) -> None:
        self.next: list[str] = []

    def __call__(self, path: str) -> str | None:
        return self.next.pop(0) if self.next else None


@pytest.fixture
def failing() -> Failing:
    return Failing()


@pytest.fixture
def conditions(failing: Failing) -> Conditions:
    return Conditions(failing=failing)


@pytest.fixture
def served(tmp_path: Path, conditions: Conditions) -> Iterator[Callable[..., Client]]:
    """Makes clients of a served folder; pauses are taken down instead of slept."""
    (tmp_path / "s.ooc").mkdir()
    (tmp_path / "s.ooc" / "a").write_bytes(DATA.tobytes())
    with serving(tmp_path, conditions) as url:
        yield lambda pauses=None: Client(StoreUrl(f"{url}/s.ooc"), [].append if pauses is None else pauses.append)


def test_ranges(served: Callable[..., Client]) -> None:
    client = served()
    assert np.array_equal(client.range("a", 100_000, 5000), DATA[100_000:105_000])
    assert client.get("a") == DATA.tobytes()
    assert client.size("a") == len(DATA)
    assert client.get("b") is client.size("b") is None
    with pytest.raises(StoreError, match=r"/s.ooc/b is missing: the store was changed or is incomplete"):
        client.range("b", 0, 1)
    assert client.cost.latency_s > 0


@pytest.mark.parametrize("kind", KINDS)
def test_failures_are_made_up_for(served: Callable[..., Client], failing: Failing, conditions: Conditions, kind: str) -> None:
    pauses: list[float] = []
    failing.next = [kind] * 5
    assert np.array_equal(served(pauses).range("a", 7, 200_000), DATA[7:200_007])
    assert conditions.counts["requests"] == 6
    assert len(pauses) == 5
    assert all(0.05 * 2**number <= pause <= 0.1 * 2**number for number, pause in enumerate(pauses))


@pytest.mark.parametrize(
    ("kind", "words"), [("status", "answers with status 503"), ("cut", "cut short"), ("drop", r"cut short|is lost")]
)
def test_it_gives_up_in_one_line(served: Callable[..., Client], failing: Failing, kind: str, words: str) -> None:
    failing.next = [kind] * ATTEMPTS
    with pytest.raises(
        StoreError, match=rf"/s.ooc/a cannot be read: .*({words}).* \(tried {ATTEMPTS} times\); check"
    ) as given_up:
        served().range("a", 0, 100_000)
    assert "\n" not in str(given_up.value)


def test_a_range_beyond_the_end_is_not_asked_for_again(served: Callable[..., Client], conditions: Conditions) -> None:
    with pytest.raises(StoreError, match="status 416"):
        served().range("a", len(DATA), 1)
    assert conditions.counts["requests"] == 1


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/s.ooc", "http://nowhere.invalid/s.ooc"])
def test_no_network_is_said_at_once(url: str) -> None:
    with pytest.raises(StoreError, match=rf"{url}/zarr.json cannot be read: (the connection is refused|its host is not found)"):
        Client(StoreUrl(url), lambda pause: None).get("zarr.json", 2)


def test_a_server_without_ranges_or_without_tls_is_said(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(DATA.tobytes())

    class Whole(SimpleHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            """Nothing is printed."""

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Whole, directory=str(tmp_path))) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        host = f"127.0.0.1:{server.server_port}"
        with pytest.raises(StoreError, match="/a cannot be read: the server does not answer requests for ranges"):
            Client(StoreUrl(f"http://{host}/")).range("a", 0, 10)
        with pytest.raises(StoreError, match="/a cannot be read: the server does not speak https"):
            Client(StoreUrl(f"https://{host}/"), lambda pause: None).get("a", 2)
        server.shutdown()


def test_without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clouds' own addresses are asked for them: no answer there is no reason to ask again."""
    for code in ("Error performing PUT http://169.254.169.254/latest/api/token - status code: 403", "missing credentials"):
        error = RuntimeError(code)
        assert not client_module.passing(error)
        assert client_module.reason_of(error) == "no credentials are found"


def test_reasons_hold_no_url() -> None:
    error = RuntimeError("Generic error for https://host/a?X-Amz-Signature=secret: odd\n\nDebug source:\nsecret")
    assert client_module.reason_of(error) == "Generic error for the URL odd"


def test_obstore_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"obstore, which is not installed: pip install 'ooc\[remote\]'"):
        Client(StoreUrl("s3://b/s.ooc"))


def test_clients_are_shared_as_long_as_the_environment_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    url = StoreUrl("http://127.0.0.1:9/s.ooc")
    first = client_of(url)
    assert client_of(url) is first
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another")
    assert client_of(url) is not first
