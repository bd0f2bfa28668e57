"""Appends and compactions killed as they enter any call that changes files: all or nothing, and the same call goes on."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ooc.stores.array_names import DELTA
from ooc.stores.dataset import Dataset
from ooc.stores.growth.append import append
from ooc.stores.growth.compact import compact
from ooc.stores.info import describe
from ooc.stores.integrity import verify
from tests.scale import some_calls
from tests.stores.growth.test_rules import E, more, store
from tools.bench.lib.killed_syscall import run_until


def leftovers(path: Path) -> list[str]:
    """What a killed process may leave in a store."""
    return [each.name for each in path.rglob("*") if each.suffix in (".partial", ".removed", ".tmp")]


def kill_everywhere(path: Path, run: Callable[[], object], check: Callable[[Path], None]) -> None:
    """Kill `run` on copies of a store at `some_calls` that it makes, and `check` what is there."""
    kept, log = path.with_suffix(".kept"), path.with_suffix(".log")
    shutil.copytree(path, kept)

    def child() -> int:
        run()
        return 0

    code, calls = run_until(child, log)
    assert code == 0, log.read_text()
    for k in some_calls(len(calls)):
        shutil.rmtree(path)
        shutil.copytree(kept, path)
        code, made = run_until(child, log, k)  # it ends where its threads make fewer calls than those of the first run
        assert code < 0 or len(made) <= k, log.read_text()
        try:
            check(path)
        except Exception as error:
            raise AssertionError(f"after a kill at call {k} of {calls}") from error


def test_the_first_append_killed_at_its_first_write_leaves_the_store_as_it_was(quick_path: Path) -> None:
    path = store(quick_path)
    spec = more(path)
    code, calls = run_until(lambda: append(spec) and 0, quick_path / "log", 0, "write")  # LMDB's first two pages
    assert (code, calls[-1]) == (-9, "write")
    assert verify(path) == []
    assert append(spec).appended.edges == 10
    assert describe(path)["appends"] == 1


@pytest.mark.slow
def test_an_append_killed_at_any_call_leaves_the_store_as_it_was(quick_path: Path) -> None:
    path = store(quick_path)
    spec = more(path)

    def check(path: Path) -> None:
        assert verify(path) == []
        if not describe(path)["appends"]:
            append(spec)
        with Dataset.open(path) as ds:
            assert ds.num_edges == E + 10
        assert compact(path).appended.edges == 10
        assert leftovers(path) == []

    kill_everywhere(path, lambda: append(spec), check)


@pytest.mark.slow
def test_a_compaction_killed_at_any_call_is_completed_by_the_next(quick_path: Path) -> None:
    path = store(quick_path)
    append(more(path))

    def check(path: Path) -> None:
        assert verify(path) == []
        with Dataset.open(path) as ds:
            assert ds.num_edges == E + 10
        compact(path)
        assert describe(path)["num_edges"] == E + 10
        assert leftovers(path) == []

    kill_everywhere(path, lambda: compact(path), check)


def test_a_store_whose_first_append_was_killed_by_an_earlier_ooc_is_a_store(quick_path: Path) -> None:
    """It made the file in place, so that a kill left it empty."""
    path = store(quick_path)
    (path / DELTA).mkdir()
    (path / DELTA / "data.mdb").touch()
    assert verify(path) == []
    assert describe(path)["appends"] == 0
    append(more(path))
    with Dataset.open(path) as ds:
        assert ds.num_edges == E + 10


def test_a_killed_process_is_reported_with_the_calls_it_made(tmp_path: Path) -> None:
    def run() -> int:
        for name in "abc":
            (tmp_path / name).write_text("text")
        (tmp_path / "a").read_text()
        (tmp_path / "a").unlink()
        return 5

    calls = ["open", "write"] * 3 + ["unlink"]
    assert run_until(run, tmp_path / "log") == (5, calls)
    assert run_until(run, tmp_path / "log", 1, "write") == (-9, calls[:4])
    assert (tmp_path / "a").read_text() == "text"
    assert (tmp_path / "b").read_text() == ""
    assert run_until(run, tmp_path / "log", 100) == (5, calls)
    with pytest.raises(FileNotFoundError):
        (tmp_path / "a").stat()
