"""Resuming an ingest after a kill, and whose `<out>.partial` it is."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ooc.stores.dataset import Dataset
from ooc.stores.errors import InputError, OocWarning, StoreError
from ooc.stores.ingest import IngestSpec, ingest
from ooc.stores.ingest.steps import Steps
from ooc.stores.integrity import verify
from ooc.stores.io.atomic import partial_path
from tests.forked import python
from tests.scale import some_calls
from tools.bench.lib.killed_syscall import run_until


def tree(path: Path) -> dict[str, bytes]:
    return {str(each.relative_to(path)): each.read_bytes() for each in sorted(path.rglob("*")) if each.is_file()}


def table(path: Path, **columns: Any) -> str:
    pq.write_table(pa.table(columns), path)
    return str(path)


KILLED = """
import os, signal, sys
from ooc.stores.ingest import IngestSpec, ingest

out, edges, nodes, x, at = sys.argv[1:6]
seen = 0
def die(*_):
    global seen
    seen += 1
    if seen == int(at):
        os.kill(os.getpid(), signal.SIGKILL)
result = ingest(IngestSpec(out=out, edges=edges, nodes=nodes, features=["x=" + x], drop_duplicates=True), die)
print(len(result.resumed))
"""


def test_a_killed_ingest_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    names = np.array([f"n{i}" for i in range(300)])
    edges = table(tmp_path / "e.parquet", src=names[rng.integers(0, 300, 4000)], dst=names[rng.integers(0, 300, 4000)])
    nodes = table(tmp_path / "n.parquet", id=names)
    np.save(tmp_path / "x.npy", rng.random((300, 5)))

    def run(out: str, at: int) -> subprocess.CompletedProcess[str]:
        return python("-c", KILLED, tmp_path / out, edges, nodes, tmp_path / "x.npy", str(at))

    assert run("want.ooc", 0).stdout.strip() == "0"
    want = tree(tmp_path / "want.ooc")
    resumed, at = [], 1
    while True:
        killed = run("got.ooc", at)
        if killed.returncode == 0:
            break
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert not (tmp_path / "got.ooc").exists()
        again = run("got.ooc", 0)
        assert again.returncode == 0, again.stderr
        resumed.append(int(again.stdout))
        assert tree(tmp_path / "got.ooc") == want
        assert not (tmp_path / "got.ooc.partial").exists()
        subprocess.run(["rm", "-r", str(tmp_path / "got.ooc")], check=True)
        at += 5
    assert max(resumed) >= 4
    assert resumed == sorted(resumed)


def small_spec(folder: Path) -> IngestSpec:
    """Text ids, a time, features and labels: an ingest of all kinds of steps."""
    rng = np.random.default_rng(4)
    names = np.array([f"n{i}" for i in range(8)])
    ends = {name: names[rng.integers(0, 8, 20)] for name in ("src", "dst")}
    edges = table(folder / "e.parquet", **ends, t=np.arange(20))
    nodes = table(folder / "n.parquet", id=names, f=rng.random(8), y=np.arange(8) % 2)
    return IngestSpec(out=folder / "s.ooc", edges=edges, nodes=nodes, time="t", x_cols="f", label="y")


def killed_ingest(spec: IngestSpec, nth: int | None = None, kind: str | None = None) -> tuple[int, list[str]]:
    """What `run_until` says of an ingest killed at a system call."""
    return run_until(lambda: ingest(spec) and 0, spec.out.with_suffix(".log"), nth, kind)


def ingest_again(spec: IngestSpec) -> None:
    """After a kill, the same call resumes, or says that the store is there."""
    if spec.out.exists():
        with pytest.raises(StoreError, match="exists already"):
            ingest(spec)
    else:
        ingest(spec)


@pytest.mark.slow
def test_an_ingest_killed_at_any_call_leaves_nothing_and_resumes_to_the_same_bytes(quick_path: Path) -> None:
    spec = small_spec(quick_path)
    code, calls = killed_ingest(spec)
    assert code == 0
    want = tree(spec.out)
    for k in some_calls(len(calls)):
        shutil.rmtree(spec.out)
        code = killed_ingest(spec, k)[0]
        assert code < 0 or k > len(calls) // 2, "threads of DuckDB make a few calls more or less"
        ingest_again(spec)
        assert tree(spec.out) == want, f"after a kill at call {k} of {calls}"
        assert not partial_path(spec.out).exists(), f"after a kill at call {k} of {calls}"


def test_what_an_ingest_killed_inside_zarr_left_is_not_published(quick_path: Path) -> None:
    """zarr renames what it wrote; until then the array is unwritten for the next attempt, which makes it again."""
    spec, left, nth = small_spec(quick_path), False, 0
    while not left:
        assert killed_ingest(spec, nth, "rename")[0] < 0
        left = any(partial_path(spec.out).rglob("zarr.*.partial"))
        nth += 1
    ingest(spec)
    assert not [each for each in spec.out.rglob("*") if each.suffix in (".partial", ".tmp")]


@pytest.mark.cases(1)
@pytest.mark.parametrize("then", [ingest_again, lambda spec: Dataset.open(spec.out).close(), lambda spec: verify(spec.out)])
@pytest.mark.parametrize("nth", [0, 3, -1])
def test_what_an_ingest_left_beside_the_store_it_published_is_removed(
    quick_path: Path, nth: int, then: Callable[[IngestSpec], Any]
) -> None:
    spec = small_spec(quick_path)
    _, calls = killed_ingest(spec)
    shutil.rmtree(spec.out)
    published = max(at for at, call in enumerate(calls) if call == "rename")
    removals = [number for number, at in enumerate(at for at, call in enumerate(calls) if call == "unlink") if at > published]
    assert killed_ingest(spec, removals[nth], "unlink")[0] < 0
    assert spec.out.exists()
    assert partial_path(spec.out).exists()
    then(spec)
    assert not partial_path(spec.out).exists()


@pytest.fixture
def edges(tmp_path: Path) -> str:
    return table(tmp_path / "e.parquet", src=[0, 1], dst=[1, 2])


def interrupt(spec: IngestSpec, at: str = "sort edges") -> Path:
    """Interrupt an ingest in step `at`; the directory it leaves."""

    def press(step: str, *_: object) -> None:
        if step == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ingest(spec, press)
    return spec.out.with_name(f"{spec.out.name}.partial")


def test_changed_input_begins_anew_and_says_so(tmp_path: Path, edges: str) -> None:
    spec = IngestSpec(out=tmp_path / "s.ooc", edges=edges)
    interrupt(spec)
    table(Path(edges), src=[0, 1, 5], dst=[1, 2, 3])
    with pytest.warns(
        OocWarning, match="discarded: it had other settings or input files than these, and had finished gather, scan, ids"
    ):
        result = ingest(spec)
    assert (result.num_edges, result.resumed, result.notes) == (3, (), ())


def test_changed_settings_begin_anew_and_say_so(tmp_path: Path, edges: str) -> None:
    interrupt(IngestSpec(out=tmp_path / "s.ooc", edges=edges))
    with pytest.warns(OocWarning, match=r"an interrupted ingest in .*s\.ooc\.partial is discarded"):
        result = ingest(IngestSpec(out=tmp_path / "s.ooc", edges=edges, undirected=True))
    assert (result.num_edges, result.resumed) == (4, ())
    assert not (tmp_path / "s.ooc.partial").exists()


def test_an_ingest_interrupted_behind_its_last_step_leaves_the_store_alone(
    tmp_path: Path, edges: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pressed(self: object, manifest: object, partition: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ooc.stores.ingest.build._Build._result", pressed)
    spec = IngestSpec(out=tmp_path / "s.ooc", edges=edges)
    with pytest.raises(KeyboardInterrupt):
        ingest(spec)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["e.parquet", "s.ooc"]


def test_equal_settings_resume_without_a_note(tmp_path: Path, edges: str) -> None:
    interrupt(IngestSpec(out=tmp_path / "s.ooc", edges=edges))
    result = ingest(IngestSpec(out=tmp_path / "s.ooc", edges=edges, memory="1GB"))
    assert (result.resumed, result.notes) == (("gather", "scan", "ids"), ())


def test_a_damaged_journal_is_told_of(tmp_path: Path, edges: str) -> None:
    partial = interrupt(IngestSpec(out=tmp_path / "s.ooc", edges=edges))
    (partial / "steps.json").write_text("{")
    with pytest.warns(OocWarning, match="discarded: .*steps.json, which records what it had finished, is damaged"):
        result = ingest(IngestSpec(out=tmp_path / "s.ooc", edges=edges))
    assert (result.num_edges, result.resumed) == (2, ())


def test_what_is_discarded_is_said_where_the_next_ingest_fails(tmp_path: Path, edges: str) -> None:
    spec = IngestSpec(out=tmp_path / "s.ooc", edges=edges)
    interrupt(spec)
    with pytest.warns(OocWarning, match="is discarded"), pytest.raises(InputError):
        ingest(spec.model_copy(update={"src": "nope"}))


@pytest.mark.parametrize("names", [["thesis.txt"], ["lock"], ["steps.json"], ["store/x", "stage/y"]])
def test_a_directory_of_the_users_is_refused_and_left_alone(tmp_path: Path, edges: str, names: list[str]) -> None:
    for name in names:
        path = tmp_path / "s.ooc.partial" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"fingerprint": "", "done": {}}')
    before = tree(tmp_path)
    for _ in range(2):
        with pytest.raises(StoreError, match=r"s\.ooc\.partial, where .*was not made by an ingest: move it away, or") as caught:
            ingest(IngestSpec(out=tmp_path / "s.ooc", edges=edges))
        assert "\n" not in str(caught.value)
        assert tree(tmp_path) == before


@pytest.mark.parametrize("dangling", [False, True])
def test_a_file_or_dangling_link_in_its_place_is_refused(tmp_path: Path, edges: str, dangling: bool) -> None:
    partial = tmp_path / "s.ooc.partial"
    partial.symlink_to(tmp_path / "gone") if dangling else partial.write_text("mine")
    with pytest.raises(StoreError, match="was not made by an ingest: move it away"):
        ingest(IngestSpec(out=tmp_path / "s.ooc", edges=edges))
    assert os.path.lexists(partial)
    assert dangling or partial.read_text() == "mine"


def test_an_empty_directory_is_taken(tmp_path: Path, edges: str) -> None:
    (tmp_path / "s.ooc.partial").mkdir()
    assert ingest(IngestSpec(out=tmp_path / "s.ooc", edges=edges)).notes == ()
    assert not (tmp_path / "s.ooc.partial").exists()


@pytest.mark.parametrize("ends_well", [True, False])
def test_what_a_user_put_into_it_stays(tmp_path: Path, edges: str, ends_well: bool) -> None:
    spec = IngestSpec(out=tmp_path / "s.ooc", edges=edges)
    (interrupt(spec) / "thesis.txt").write_text("mine")
    if ends_well:
        assert ingest(spec).resumed == ("gather", "scan", "ids")
    else:
        with pytest.raises(InputError):
            ingest(IngestSpec(out=tmp_path / "s.ooc", edges=edges, num_nodes=1))
    assert tree(tmp_path / "s.ooc.partial") == {"thesis.txt": b"mine"}


def test_one_ingest_at_a_time(tmp_path: Path) -> None:
    first = Steps(tmp_path / "s.ooc", "key")
    first.run("scan", lambda: {"edges": 12})
    with pytest.raises(StoreError, match="is in use by another ingest into"):
        Steps(tmp_path / "s.ooc", "other")
    first.close(keep=True)
    again = Steps(tmp_path / "s.ooc", "key")
    assert again.run("scan", dict) == {"edges": 12}
    again.close(keep=False)
    assert not list(tmp_path.iterdir())


def test_steps_of_a_published_store_are_not_trusted(tmp_path: Path, edges: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after the store was renamed, before the rest went; then the store was removed and is built again."""
    spec = IngestSpec(out=tmp_path / "s.ooc", edges=edges)
    with monkeypatch.context() as patch:
        patch.setattr(Steps, "close", lambda steps, keep: os.close(steps._lock))
        ingest(spec)
    want = tree(tmp_path / "s.ooc")
    assert json.loads((tmp_path / "s.ooc.partial" / "steps.json").read_bytes())["done"]
    shutil.rmtree(tmp_path / "s.ooc")
    result = ingest(spec)
    assert (result.resumed, result.notes) == ((), ())
    assert tree(tmp_path / "s.ooc") == want
