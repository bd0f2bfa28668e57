"""Stores at a URL give what the same stores give on this disk, from a real server that fails, and from the cache."""

import json
import shutil
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ooc.stores.build import write_store
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError, OocError, StoreError
from ooc.stores.graph import Graph
from ooc.stores.growth.append import append
from ooc.stores.growth.compact import compact
from ooc.stores.growth.spec import AppendSpec
from ooc.stores.info import describe
from ooc.stores.integrity import verify
from ooc.stores.io.remote.url import StoreUrl
from ooc.stores.metadata import arrays_of
from ooc.stores.remote.mirror import CacheSettings, Mirror, manifest_at, opened
from tests.conftest import random_edges
from tests.forked import Python
from tests.stores.damage import flip, shard
from tests.waiting import in_threads
from tools.bench.lib.range_server import Conditions, at_random, serving

pytest.importorskip("obstore")
NODES, EDGES = 30_000, 200_000


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose x has four chunks, with ids."""
    rng, (src, dst) = np.random.default_rng(0), random_edges(NODES, EDGES)
    return write_store(
        tmp_path_factory.mktemp("kept") / "s.ooc",
        Graph.from_edges(src, dst, NODES),
        x=rng.standard_normal((NODES, 32), dtype=np.float32),
        y=rng.integers(0, 3, NODES),
        task="multiclass",
        num_classes=3,
        splits={"train": np.arange(0, NODES, 2)},
        external=[f"n{number}" for number in range(NODES)],
    )


@pytest.fixture
def store(kept: Path, tmp_path: Path) -> Path:
    """A copy of it, below what is served."""
    return Path(shutil.copytree(kept, tmp_path / "served" / "s.ooc"))


@pytest.fixture
def conditions() -> Conditions:
    return Conditions()


@pytest.fixture
def url(store: Path, conditions: Conditions) -> Iterator[str]:
    with serving(store.parent, conditions) as base:
        yield f"{base}/{store.name}"


@pytest.fixture
def cached(tmp_path: Path) -> dict[str, Any]:
    """Settings of a cache."""
    return {"cache_dir": tmp_path / "cache", "cache": "1GB"}


def same(far: Dataset, near: Dataset) -> None:
    """Whether two data sets hold the same."""
    assert far.fingerprint == near.fingerprint
    assert np.array_equal(far.graph.indptr, near.graph.indptr)
    assert np.array_equal(far.graph.indices, near.graph.indices)
    assert np.array_equal(far.graph.columns["edge_id"], near.graph.columns["edge_id"])
    assert np.array_equal(far.labels, near.labels)  # type: ignore[arg-type]
    assert np.array_equal(far.split("train"), near.split("train"))
    ids = np.random.default_rng(1).integers(0, near.num_nodes, 500)
    outs = [np.empty((500, 32), np.float32) for _ in range(2)]
    for each, out in zip((far, near), outs, strict=True):
        each.rows("x").read(ids, out)
    assert np.array_equal(*outs)
    assert far.external(ids) == near.external(ids)
    assert far.row(near.external(ids[:1])[0]) == ids[0]


@pytest.mark.parametrize("engine", ["auto", "pread", "mmap"])
def test_a_store_at_a_url_is_the_store(store: Path, url: str, cached: dict[str, Any], engine: str) -> None:
    with Dataset.open(url, engine=engine, **cached) as far, Dataset.open(store) as near:
        assert far.path == StoreUrl(url)
        assert str(far.path) in repr(far)
        assert far.reading("x").startswith("engine remote (by ranges, with a cache read through ")
        same(far, near)


def test_failing_requests_change_nothing(store: Path, url: str, cached: dict[str, Any], conditions: Conditions) -> None:
    conditions.failing = at_random(0.2)
    for _ in range(2):
        with Dataset.open(url, **cached) as far, Dataset.open(store) as near:
            same(far, near)
        shutil.rmtree(cached["cache_dir"])
    assert conditions.counts["failures"] > 5


def test_a_store_in_the_cache_takes_one_request(url: str, store: Path, cached: dict[str, Any], conditions: Conditions) -> None:
    for number in range(2):
        conditions.asked.clear()
        with Dataset.open(url, **cached) as far, Dataset.open(store) as near:
            same(far, near)
            out = np.empty((NODES, 32), np.float32)
            far.rows("x").read(np.arange(NODES), out)
        assert (len(conditions.asked) == 1) == (number == 1)
    assert conditions.asked == ["/s.ooc/zarr.json"]


def test_opening_takes_no_features_and_no_ids(url: str, cached: dict[str, Any], conditions: Conditions) -> None:
    told: list[tuple[str, int, Any, str]] = []
    Dataset.open(url, progress=lambda *step, unit: told.append((*step, unit)), **cached).close()
    assert conditions.counts["bytes"] < 6 * 2**20
    assert not any("ids.lmdb" in path for path in conditions.asked)
    assert {step for step, *_ in told} >= {"fetch graph/indptr", "fetch graph/indices"}
    conditions.asked.clear()
    conditions.counts.clear()
    describe(url, **cached)
    assert conditions.counts["bytes"] < 2**14


def test_in_memory_and_verified_reads(url: str, store: Path, cached: dict[str, Any]) -> None:
    for settings in ({"in_memory": True}, {"verify_reads": True}):
        with Dataset.open(url, **settings, **cached) as far, Dataset.open(store) as near:
            same(far, near)


def test_a_store_that_was_built_again_is_another(kept: Path, store: Path, url: str, cached: dict[str, Any]) -> None:
    with Dataset.open(url, **cached) as before:
        assert before.follow() is before
        shutil.rmtree(store)
        src, dst = random_edges(NODES, 1000, seed=1)
        write_store(store, Graph.from_edges(src, dst, NODES))
        with before.follow() as after:
            assert after.num_edges == 1000
        assert before.num_edges == EDGES
    with Dataset.open(url, **cached) as found:
        assert found.num_edges == 1000


def test_objects_that_changed_under_an_open_store_are_noticed(store: Path, url: str, cached: dict[str, Any]) -> None:
    with Dataset.open(url, **cached) as far:
        flip(shard(store, "node/node/x"), 5)
        with pytest.raises(StoreError, match=rf"{url}/node/node/x is damaged: chunk 0 .* remove .*, its copy in the cache"):
            far.rows("x").read(np.arange(10), np.empty((10, 32), np.float32))


def test_verify_reads_the_objects_and_not_the_cache(store: Path, url: str, cached: dict[str, Any]) -> None:
    with Dataset.open(url, **cached) as far:
        far.rows("x").read(np.arange(NODES), np.empty((NODES, 32), np.float32))
    assert verify(url, **cached) == []
    flip(shard(store, "node/node/x"), 2**20 + 5)
    flip(store / "ids.lmdb" / "data.mdb", 50_000)
    damages = verify(url, **cached)
    assert [(each.array, each.chunk) for each in damages] == [("node/node/x", 1), ("ids.lmdb", None)]
    assert f"{url}/node/node/x/c/0/0" in str(damages[0])


def test_info_is_that_of_the_store(store: Path, url: str, cached: dict[str, Any]) -> None:
    assert describe(url, **cached) == {**describe(store), "path": url}


def test_a_manifest_is_read_past_the_cache(
    store: Path, url: str, conditions: Conditions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert manifest_at(url) == manifest_at(store)
    assert conditions.asked == ["/s.ooc/zarr.json"]
    assert not (tmp_path / "home").exists()


def test_compacted_stores_are_read_and_appended_ones_refused(store: Path, url: str, cached: dict[str, Any]) -> None:
    (store.parent / "new.csv").write_text("src,dst\nn0,n1\nn2,n3\n")
    append(AppendSpec(out=store, edges=str(store.parent / "new.csv")))
    with pytest.raises(StoreError, match=f"{url} has appends that its arrays do not hold: run `ooc compact` on a local copy"):
        Dataset.open(url, **cached)
    compact(store)
    assert arrays_of(store) != store
    with Dataset.open(url, **cached) as far, Dataset.open(store) as near:
        assert far.num_edges == EDGES + 2
        same(far, near)
    assert verify(url, **cached) == []


def test_a_data_set_is_opened_again_where_it_is_unpickled(url: str, cached: dict[str, Any]) -> None:
    import pickle

    with Dataset.open(url, **cached) as far, pickle.loads(pickle.dumps(far)) as again:
        assert again.path == far.path
        assert again.settings["cache"] == "1GB"


def test_several_data_sets_share_the_cache(url: str, store: Path, cached: dict[str, Any], conditions: Conditions) -> None:
    with Dataset.open(url, **cached) as one, Dataset.open(url, **cached) as other, Dataset.open(store) as near:
        same(one, near)
        conditions.asked.clear()
        same(other, near)
        assert conditions.asked == []


def test_ranks_open_a_store_at_once(url: str, store: Path, cached: dict[str, Any], conditions: Conditions) -> None:
    """Each keeps it open until all have; one of them makes the mirror."""
    conditions.latency_s, opened_by = 0.005, {}

    def open_one(number: int) -> None:
        opened_by[number] = Dataset.open(url, **cached)

    in_threads(4, open_one)
    assert conditions.asked.count("/s.ooc/graph/indptr/zarr.json") == 1
    with Dataset.open(store) as near:
        for far in opened_by.values():
            same(far, near)
            far.close()


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda store: shutil.rmtree(store), "there is no store at {url}: it has no zarr.json"),
        (lambda store: (store / "zarr.json").write_text("{"), "{url} is not a finished ooc store"),
        (lambda store: (store / "zarr.json").rename(store / "ooc-upload.json"), "{url} is being uploaded, or its upload was"),
        (lambda store: shard(store, "node/node/x").unlink(), "{url}/node/node/x/c/0/0 is missing"),
        (lambda store: shard(store, "graph/indices").write_bytes(b"short"), "{url}/graph/indices/c/0 cannot be read: "),
    ],
)
def test_what_is_wrong_is_said_in_one_line(store: Path, url: str, cached: dict[str, Any], harm: Any, words: str) -> None:
    harm(store)
    with pytest.raises(StoreError, match=words.format(url=url)) as said:
        Dataset.open(url, **cached)
    assert "\n" not in str(said.value)


def test_a_cache_that_is_too_small_or_cannot_be_written_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=rf"{url}/graph/\w+ takes .* of the cache in .*: give a larger `cache`.* in all$"):
        Dataset.open(url, cache_dir=tmp_path / "cache", cache="100KB")
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=f"cannot write {tmp_path}/file"):
        Dataset.open(url, cache_dir=tmp_path / "file")
    for settings in ({"cache": "much"}, {"cache": 0}):
        with pytest.raises(ConfigError, match=r"`cache`: .* is not a size in bytes"):
            Dataset.open(url, cache_dir=tmp_path / "cache", **settings)  # type: ignore[arg-type]


def test_cache_settings_are_for_urls(store: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"are for stores at a URL, and {store} is on this disk: leave them out"):
        Dataset.open(store, cache="1GB")
    with opened(store) as path:
        assert path == store


def test_googles_storage(
    store: Path, cached: dict[str, Any], conditions: Conditions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a server in its place, which the account names; the bucket is the folder of the store."""
    with serving(store.parent.parent, conditions) as base:
        account = {"gcs_base_url": base, "disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
        (tmp_path / "account.json").write_text(json.dumps(account))
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "account.json"))
        with Dataset.open(f"gs://{store.parent.name}/{store.name}", **cached) as far, Dataset.open(store) as near:
            same(far, near)
        with pytest.raises(StoreError, match=f"there is no store at gs://{store.parent.name}/other.ooc"):
            Dataset.open(f"gs://{store.parent.name}/other.ooc", **cached)


def test_a_file_url_needs_no_server(store: Path, cached: dict[str, Any]) -> None:
    with Dataset.open(f"file://{store}", **cached) as far, Dataset.open(store) as near:
        same(far, near)
    with pytest.raises(OocError, match=f"there is no store at file://{store}.none: check the URL"):
        Dataset.open(f"file://{store}.none", **cached)


KILLED = """
import os, signal, sys
import numpy as np
import ooc.stores.io.remote.client as module
from ooc.stores.dataset import Dataset

url, cache, at = sys.argv[1], sys.argv[2], int(sys.argv[3])
asked = 0

def counted(method):
    def run(*given):
        global asked
        asked += 1
        if asked > at:
            os.kill(os.getpid(), signal.SIGKILL)
        return method(*given)
    return run

module.Client.get, module.Client.range = counted(module.Client.get), counted(module.Client.range)
with Dataset.open(url, cache_dir=cache, cache="1GB") as far:
    far.rows("x").read(np.arange(far.num_nodes), np.empty((far.num_nodes, 32), np.float32))
"""


@pytest.mark.slow
def test_a_process_killed_while_it_opens_and_reads_leaves_a_cache_that_goes_on(
    store: Path, url: str, cached: dict[str, Any]
) -> None:
    codes = []
    for moment in range(12):
        codes.append(Python("-c", KILLED, url, cached["cache_dir"], str(4 * moment)).wait().returncode)
        with Dataset.open(url, **cached) as far, Dataset.open(store) as near:
            same(far, near)
        shutil.rmtree(cached["cache_dir"])
    assert codes[0] == codes[6] == -signal.SIGKILL
    assert codes[-1] == 0


def test_a_mirror_is_kept_while_it_is_open(url: str, tmp_path: Path) -> None:
    settings = CacheSettings(tmp_path / "cache", 10**9)
    with closing(Mirror.open(StoreUrl(url), settings)) as mirror:
        Mirror.open(StoreUrl(url), CacheSettings(tmp_path / "cache", 1)).close()
        assert (mirror.path / "zarr.json").exists()
        mirror.close()
        Mirror.open(StoreUrl(url), CacheSettings(tmp_path / "cache", 1)).close()
