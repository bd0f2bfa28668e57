"""Atomic writes: after any failure the old state stands and nothing is left over."""

import errno
import os
import re
import subprocess
from pathlib import Path

import pytest

from ooc.stores.errors import StoreError
from ooc.stores.io.atomic import check_absent, disk_errors, partial_path, publish, remove_leftovers, remove_tree, write_file


def test_write_file_replaces_and_leaves_nothing_over(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_file(path, b"old")
    write_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    path = tmp_path / "a.json"
    write_file(path, b"old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, failing, full)
    with pytest.raises(StoreError, match="No space left on device; free some space"):
        write_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_an_error_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "none" / "a.json"
    with pytest.raises(StoreError, match=f"^cannot write {path}: No such file or directory"):
        write_file(path, b"new")


def test_what_killed_writers_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    kept = [f".live.json.{os.getpid()}.tmp", ".init.json.1.tmp", "checkpoint.tmp", ".hidden.tmp", f"{child.pid}.tmp", "a.json"]
    for name in (*kept, f".a.json.{child.pid}.tmp"):
        (tmp_path / name).touch()
    remove_leftovers(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted(kept)


def test_a_tree_is_removed_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree, gone = tmp_path / "tree", tmp_path / "tree.removed"

    def killed(path: Path, ignore_errors: bool) -> None:
        if path.exists():
            raise KeyboardInterrupt

    for _ in range(2):
        tree.mkdir()
        (tree / "a").touch()
        with monkeypatch.context() as patch:
            patch.setattr("shutil.rmtree", killed)
            with pytest.raises(KeyboardInterrupt):
                remove_tree(tree)
        assert gone.exists()
        assert (tree / "a").exists() == tree.exists()
        remove_tree(tree)
        assert os.listdir(tmp_path) == []


def test_publish_moves_a_whole_directory(tmp_path: Path) -> None:
    final = tmp_path / "s.ooc"
    partial = partial_path(final)
    (partial / "graph").mkdir(parents=True)
    (partial / "graph" / "x").write_bytes(b"1")
    assert partial.parent == final.parent
    assert publish(partial, final) == final
    assert (final / "graph" / "x").read_bytes() == b"1"
    assert not partial.exists()


@pytest.mark.parametrize("kind", ["file", "directory", "full directory", "dangling link"])
def test_publish_refuses_a_name_in_use(tmp_path: Path, kind: str) -> None:
    final, partial = tmp_path / "s.ooc", tmp_path / "tmp"
    partial.mkdir()
    (partial / "new").touch()
    if kind == "file":
        final.write_bytes(b"mine")
    elif kind == "dangling link":
        final.symlink_to(tmp_path / "nowhere")
    else:
        final.mkdir()
        if kind == "full directory":
            (final / "mine").touch()
    with pytest.raises(StoreError, match="exists already"):
        check_absent(final)
    with pytest.raises(StoreError, match="exists already"):
        publish(partial, final)
    assert (partial / "new").exists()
    assert not (final / "new").exists()


@pytest.mark.parametrize("kind", ["file", "full directory"])
def test_publish_refuses_a_name_taken_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    final, partial = tmp_path / "s.ooc", tmp_path / "tmp"
    partial.mkdir()
    final.write_bytes(b"mine") if kind == "file" else (final / "mine").mkdir(parents=True)
    monkeypatch.setattr(os.path, "lexists", lambda _: False)
    with pytest.raises(StoreError, match="exists already"):
        publish(partial, final)
    assert final.exists()
    assert partial.exists()


def test_a_file_in_place_of_a_folder_is_told_by_the_name_that_was_given(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match=re.escape(f"cannot write {tmp_path / 'file' / 'x.json'}: Not a directory")):
        write_file(tmp_path / "file" / "x.json", b"1")


def test_disk_errors_become_one_line_that_says_what_to_do() -> None:
    with (
        pytest.raises(StoreError, match=r"cannot write s\.ooc: No space left on device; free some space") as caught,
        disk_errors("s.ooc"),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert "\n" not in str(caught.value)
