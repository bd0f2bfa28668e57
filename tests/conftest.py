"""Fixtures shared by all tests: small real stores on disk, and the real graphs where they are at hand."""

import errno
import gc
import hashlib
import os
import pickle
import shutil
import signal
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch is imported: workers share the processors
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import numpy as np
import pytest

from ooc.stores.build import write_store
from ooc.stores.graph import Graph
from ooc.stores.jit import cache_folder
from tests.scale import QUICK, combinations, some, take_fewer_examples

os.environ.setdefault("NUMBA_CACHE_DIR", str(cache_folder()))  # where it is anyway: compiled once, not every session
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="ooc-tests-")  # what was measured on this machine changes no test
if QUICK:  # tests kill processes, not machines: nothing need be on the disk for another process to read it
    os.fsync = os.fstat
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs with it ignored, children inherit that
MakeStore = Callable[..., Path]
_KEPT_BYTES = 2**22
"""larger stores are written where they are wanted"""


def random_edges(num_nodes: int, num_edges: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(src, dst), int64[num_edges] each, uniform, with self-loops and duplicates where they fall."""
    src, dst = np.random.default_rng(seed).integers(0, num_nodes, (2, num_edges))
    return src, dst


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Quick: fewer examples of laws, of tests with several parameters no more cases than show each value once, and of dear ones
    (marked `cases`) a few."""
    if not QUICK:
        return
    cases: dict[str, list[Any]] = defaultdict(list)
    for item in items:
        take_fewer_examples(getattr(item, "obj", None))
        cases[f"{item.parent and item.parent.nodeid}::{getattr(item, 'originalname', item.name)}"].append(item)
    chosen: set[pytest.Item] = set()
    for same in cases.values():
        names = [item.callspec._idlist if hasattr(item, "callspec") else [item.name] for item in same]
        most = same[0].get_closest_marker("cases")
        cases_shown = combinations(names)
        chosen.update(same[i] for i in (some(cases_shown, most.args[0]) if most else cases_shown))
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def pytest_collection_finish() -> None:
    """What is imported by now stays: the collector is not to look through it again in each of the tests that call it."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """What was frozen is taken down in order."""
    gc.unfreeze()


@pytest.fixture
def quick_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where there is room, for what writes very many small files and is about what is in them: syncing them
    to a disk takes most of the time."""
    shared = Path("/dev/shm")
    there = os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > 2**30
    with tempfile.TemporaryDirectory(prefix="ooc-tests-", dir=shared if there else tmp_path) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def written_once(tmp_path_factory: pytest.TempPathFactory) -> MakeStore:
    """`write_store`, whose stores are kept for the session: the same arguments are the same bytes, and copied."""
    folder = tmp_path_factory.mktemp("stores")

    def write(path: Path, arguments: dict[str, Any], graph: dict[str, Any]) -> Path:
        content = pickle.dumps((arguments, graph))
        kept = folder / hashlib.sha256(content).hexdigest()
        if len(content) > _KEPT_BYTES:
            return write_store(path, Graph.from_edges(**graph), **arguments)
        if not kept.exists():
            write_store(kept, Graph.from_edges(**graph), **arguments)
        return Path(shutil.copytree(kept, path))

    return write


@pytest.fixture
def make_store(tmp_path: Path, written_once: MakeStore) -> MakeStore:
    """`make_store(num_nodes=50, num_edges=300, ...)` writes a store below tmp_path and returns its path.

    Random edges, x float32[N, 8], three classes, splits of 60, 20 and 20 percent. src, dst: edges of your own; weight: True for
    random weights, or an array in input order; parts: `Graph.parts`. Any other argument goes
    to `write_store` and replaces the default there.
    """

    def make(
        name: str = "test.ooc",
        num_nodes: int = 50,
        num_edges: int = 300,
        seed: int = 0,
        src: Any = None,
        dst: Any = None,
        weight: Any = None,
        parts: Any = None,
        **arrays: Any,
    ) -> Path:
        rng = np.random.default_rng(seed)
        if src is None:
            src, dst = random_edges(num_nodes, num_edges, seed)
        if weight is True:
            weight = rng.random(len(src), np.float32) + np.float32(0.1)
        columns = {} if weight is None else {"weight": weight}
        order = rng.permutation(num_nodes)
        first, second = int(0.6 * num_nodes), int(0.8 * num_nodes)
        defaults: dict[str, Any] = {
            "x": rng.standard_normal((num_nodes, 8), dtype=np.float32),
            "y": rng.integers(0, 3, num_nodes),
            "task": "multiclass",
            "num_classes": 3,
            "splits": {"train": order[:first], "val": order[first:second], "test": order[second:]},
        }
        graph = {"src": src, "dst": dst, "num_nodes": num_nodes, "parts": parts, **columns}
        return written_once(tmp_path / name, {**defaults, **arrays}, graph)

    return make


@pytest.fixture
def no_o_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that refuses O_DIRECT."""
    real = os.open

    def refuse(path: Any, flags: int, *more: Any, **keywords: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument", str(path))
        return real(path, flags, *more, **keywords)

    monkeypatch.setattr(os, "open", refuse)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real graphs: the environment variable OOC_TEST_DATA, else `shared/data` in a folder beside the checkout."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    path = Path(os.environ.get("OOC_TEST_DATA", beside))
    if not path.is_dir():
        pytest.skip(f"no test data at {path}: set OOC_TEST_DATA")
    return path
