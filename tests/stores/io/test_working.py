"""Folders that go with a block."""

import fcntl
import os
from pathlib import Path

from ooc.stores.io.working import scratch_folder


def test_folders_of_killed_processes_go_and_those_in_use_stay(tmp_path: Path) -> None:
    left, mine, of_another = (tmp_path / name for name in (".ooc-plan-x7.tmp", "ooc-plan-notes", ".another-x7.tmp"))
    for folder in (left, mine, of_another):
        (folder / "run").mkdir(parents=True)
    with scratch_folder(tmp_path, "ooc-plan") as first:
        assert {*tmp_path.iterdir()} == {first, mine, of_another}
        with scratch_folder(tmp_path, "ooc-plan") as second:
            assert {*tmp_path.iterdir()} == {first, second, mine, of_another}
    assert {*tmp_path.iterdir()} == {mine, of_another}


def test_a_folder_is_locked_as_long_as_it_is_used(tmp_path: Path) -> None:
    with scratch_folder(tmp_path, "ooc-plan") as folder:
        lock = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        finally:
            os.close(lock)
    raise AssertionError("it is not locked")
