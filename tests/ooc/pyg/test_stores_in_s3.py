"""Stores in S3: built, opened, checked and refused through the real client, against a local server of its protocol."""

import logging
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ooc
from ooc.cli.main import main
from ooc.stores.errors import ConfigError, StoreError
from ooc.stores.io.remote.client import Client
from ooc.stores.io.remote.url import StoreUrl

pytest.importorskip("obstore")
moto = pytest.importorskip("moto.server")
NODES, SECRET = 3000, "the-secret-key"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL of a bucket that no other test has, as the server keeps them in this process; what opens it is in the environment."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for variable, value in {"ENDPOINT_URL": f"http://{host}:{port}", "ACCESS_KEY_ID": "key-id", "REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{variable}", value)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    import boto3

    name = f"graphs-{uuid.uuid4().hex}"

    boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1").create_bucket(Bucket=name)
    yield f"s3://{name}"
    server.stop()


@pytest.fixture
def arrays(tmp_path: Path) -> dict[str, Any]:
    """Arguments of an ingest."""
    rng = np.random.default_rng(0)
    np.save(tmp_path / "edges.npy", rng.integers(0, NODES, (2, 20_000)))
    given = {"edges": str(tmp_path / "edges.npy"), "num_nodes": NODES, "train": np.arange(0, NODES, 2)}
    return {
        **given,
        "features": {"x": rng.standard_normal((NODES, 200), dtype=np.float32)},
        "labels": rng.integers(0, 3, NODES),
    }


def test_a_store_is_built_and_read_there(bucket: str, arrays: dict[str, Any], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    told: list[str] = []
    result = ooc.ingest(f"{bucket}/a/p.ooc", **arrays, cache_dir=cache, progress=lambda step, *rest, **unit: told.append(step))
    assert result.path == StoreUrl(f"{bucket}/a/p.ooc")
    assert "upload" in told
    assert not any((cache / "ingest").iterdir())
    near = ooc.ingest(tmp_path / "p.ooc", **arrays)
    with ooc.open(f"{bucket}/a/p.ooc", cache_dir=cache) as far, ooc.open(near.path) as local:
        assert far.fingerprint == local.fingerprint
        x = np.empty((NODES, 200), np.float32)
        far.rows("x").read(np.arange(NODES), x)
        assert np.array_equal(x, arrays["features"]["x"])
    assert ooc.verify(f"{bucket}/a/p.ooc", cache_dir=cache) == []
    with pytest.raises(StoreError, match=rf"{bucket}/a/p.ooc exists already: choose another name"):
        ooc.ingest(f"{bucket}/a/p.ooc", **arrays, cache_dir=cache)


@pytest.mark.slow
def test_an_upload_that_ends_early_leaves_no_store_and_says_so(
    bucket: str, arrays: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = Client.put

    class Killed(BaseException):
        """Stands for kill -9."""

    def killed(client: Client, key: str, source: Any) -> None:
        if key.startswith("node/"):
            raise Killed
        put(client, key, source)

    cache, url = tmp_path / "cache", f"{bucket}/p.ooc"
    with monkeypatch.context() as patched:
        patched.setattr(Client, "put", killed)
        with pytest.raises(Killed):
            ooc.ingest(url, **arrays, cache_dir=cache)
    with pytest.raises(StoreError, match="is being uploaded, or its upload was interrupted: ingest it again"):
        ooc.open(url, cache_dir=cache)
    ooc.ingest(url, **arrays, cache_dir=cache)
    assert ooc.verify(url, cache_dir=cache) == []
    assert not any((cache / "ingest").iterdir())


@pytest.mark.slow
def test_what_was_built_is_kept_where_its_upload_fails(
    bucket: str, arrays: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(client: Client, key: str, source: Any) -> None:
        raise StoreError("no network")

    monkeypatch.setattr(Client, "put", refused)
    with pytest.raises(StoreError, match="no network; the store that was built is in ") as failed:
        ooc.ingest(f"{bucket}/q.ooc", **arrays, cache_dir=tmp_path / "cache")
    built = Path(str(failed.value).partition(" is in ")[2].partition(",")[0])
    assert ooc.verify(built) == []


@pytest.mark.slow
def test_the_command_line(bucket: str, arrays: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cache = ["--cache-dir", str(tmp_path / "cache")]
    url = f"{bucket}/p.ooc"
    assert main(["ingest", url, "--edges", arrays["edges"], "--num-nodes", str(NODES), *cache]) == 0
    assert main(["verify", url, *cache]) == 0
    assert main(["info", url, *cache]) == 0
    assert f"{url}: 3,000 nodes, 20,000 edges" in capfd.readouterr().out
    refused = {
        ("info", f"{bucket}/none.ooc", *cache): f"there is no store at {bucket}/none.ooc",
        (
            "info",
            "s3://other/p.ooc",
            *cache,
        ): "s3://other/p.ooc/zarr.json cannot be read: there is no such bucket; check the URL",
        ("train", "s3://other/p.ooc", *cache): "there is no such bucket",
        ("ingest", "s3://other/p.ooc", "--edges", arrays["edges"], *cache): "there is no such bucket",
        ("append", url, "--edges", arrays["edges"]): f"{url} cannot be appended to where it is: change a local copy",
        ("join", url, "a", "b"): f"{url} cannot be joined where it is",
        ("ingest", f"{bucket}/1", "--edges", arrays["edges"], "--shard", "1/2"): "cannot be written in shards where it is",
        ("compact", url): f"{url} cannot be compacted where it is",
        ("split", url, "--random-split", "0.5,0.5,0"): f"{url} cannot be split again where it is",
        (
            "ingest",
            "https://host/p.ooc",
            "--edges",
            arrays["edges"],
        ): "a store is written to a path, or to an s3:// or gs:// URL",
        ("verify", "https://me:word@host/p.ooc"): "give credentials by the environment",
    }
    for words, message in refused.items():
        assert main(words) == 2, words
        said = capfd.readouterr().err
        assert message in said
        assert said.count("\n") == 1
        assert SECRET not in said


def test_denied_access_is_said_without_credentials(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Client, "get", lambda *given: Client._retried(given[0], "zarr.json", denied, 3))

    def denied() -> bytes:
        from obstore.exceptions import PermissionDeniedError

        raise PermissionDeniedError(f"403: {SECRET}")

    assert main(["info", f"{bucket}/p.ooc", "--cache-dir", str(tmp_path)]) == 2
    said = capfd.readouterr().err
    assert f"{bucket}/p.ooc/zarr.json cannot be read: access is denied; check the credentials in the environment" in said
    assert SECRET not in said


@pytest.mark.slow
def test_data_sets_are_stored_there(bucket: str, tmp_path: Path) -> None:
    import torch
    from torch_geometric.data import Data

    data = Data(x=torch.rand(20, 4), edge_index=torch.randint(0, 20, (2, 60)), y=torch.randint(0, 2, (20,)))
    with ooc.from_data(data, f"{bucket}/d.ooc", cache_dir=tmp_path / "cache") as ds:
        assert ds.num_nodes == 20
        assert isinstance(ds.path, StoreUrl)
    with pytest.raises(ConfigError, match="`cache_dir` is for a store at a URL"):
        ooc.from_data(data, tmp_path / "d.ooc", cache_dir=tmp_path / "cache")
