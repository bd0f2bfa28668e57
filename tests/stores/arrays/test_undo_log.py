"""The undo log: rows against a numpy array, and crashes at every moment: of the process, and of the machine."""

import errno
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ooc.stores.arrays.mutable_rows import DiskRows
from ooc.stores.arrays.undo_log import UndoLog
from ooc.stores.errors import StoreError

Array = np.ndarray[Any, Any]
WIDE, STEPS = (700, 33), (700,)  # 66 bytes a row: rows that straddle pages


def make(path: Path) -> tuple[DiskRows, DiskRows]:
    return DiskRows.create(path / "wide", WIDE, "float16", "pread"), DiskRows.create(path / "steps", STEPS, "int64", "pread")


def opened(path: Path) -> list[DiskRows]:
    return [DiskRows.open(path / name, "pread") for name in ("wide", "steps")]


def held(rows: Any) -> list[Array]:
    return [np.array(each.map()) for each in rows]


def close(log: UndoLog, rows: Any) -> None:
    log.close()
    for each in rows:
        each.close()


actions = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 699), st.integers(0, 300), st.integers(0, 2**31)),
        st.sampled_from([("commit",), ("rollback",), ("reopen",)]),
    ),
    max_size=20,
)


@given(actions)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_commits_and_rollbacks_against_arrays(tmp_path_factory: pytest.TempPathFactory, todo: list[Any]) -> None:
    path = tmp_path_factory.mktemp("rows")
    rows: Any = make(path)
    log = UndoLog.open(path / "undo.log", rows)
    double = [np.zeros(WIDE, np.float16), np.zeros(STEPS, np.int64)]
    final = [each.copy() for each in double]
    for action in todo:
        if action[0] == "write":
            ids, rng = np.arange(action[1], min(700, action[1] + action[2])), np.random.default_rng(action[3])
            ids = ids if action[3] % 2 else rng.permutation(ids)[::3]
            values = rng.integers(0, 2000, (len(ids), 33)).astype(np.float16)
            log.write([(rows[0], ids, values), (rows[1], ids, ids * action[3])])
            double[0][ids], double[1][ids] = values, ids * action[3]
        elif action[0] == "commit":
            rows[0].commit()
            final = [each.copy() for each in double]
        else:
            double = [each.copy() for each in final]
            if action[0] == "rollback":
                rows[1].rollback()
            else:
                close(log, rows)
                rows = opened(path)
                log = UndoLog.open(path / "undo.log", rows)
        for one, other in zip(held(rows), double, strict=True):
            np.testing.assert_array_equal(one, other)
    close(log, rows)


def test_a_page_is_saved_once_between_commits(tmp_path: Path) -> None:
    rows = make(tmp_path)
    log = UndoLog.open(tmp_path / "undo.log", rows)
    ids = np.arange(100)
    for step in range(5):
        rows[0].write(ids, np.full((100, 33), step, np.float16))
        assert log.nbytes == 4096 + 2 * 4096  # a head, and the pages of 6,600 bytes
    log.commit()
    assert log.nbytes == 0
    rows[0].write(ids[:1], np.ones((1, 33), np.float16))
    assert log.nbytes == 4096 + 4096
    close(log, rows)


def test_a_commit_elsewhere_decides(tmp_path: Path) -> None:
    """A checkpoint keeps the generation: a crash before it is saved undoes, one after it does not."""
    rows = make(tmp_path)
    log = UndoLog.open(tmp_path / "undo.log", rows, generation=4)
    rows[1].write(np.arange(700), np.arange(700))
    log.sync()  # here a checkpoint would be saved, with log.generation + 1
    close(log, rows)
    rows = opened(tmp_path)
    log = UndoLog.open(tmp_path / "undo.log", rows, generation=5)
    np.testing.assert_array_equal(rows[1].map(), np.arange(700))
    assert log.generation == 5
    rows[1].write(np.arange(700), np.zeros(700, np.int64))
    close(log, rows)
    rows = opened(tmp_path)
    log = UndoLog.open(tmp_path / "undo.log", rows, generation=5)
    np.testing.assert_array_equal(rows[1].map(), np.arange(700))
    close(log, rows)
    with closing(rows[0]), closing(rows[1]):
        for generation in (4, 7):
            with pytest.raises(StoreError, match="one of them belongs to another run"):
                UndoLog.open(tmp_path / "undo.log", rows, generation=generation)
        with pytest.raises(StoreError, match="is of 2 arrays of rows, not 1"):
            UndoLog.open(tmp_path / "undo.log", rows[:1])


def test_a_damaged_head_is_told(tmp_path: Path) -> None:
    rows = make(tmp_path)
    UndoLog.open(tmp_path / "undo.log", rows).close()
    data = bytearray((tmp_path / "undo.log").read_bytes())
    data[9] ^= 1
    (tmp_path / "undo.log").write_bytes(data)
    with pytest.raises(StoreError, match="not an undo log, or damaged"):
        UndoLog.open(tmp_path / "undo.log", rows)
    for each in rows:
        each.close()


@pytest.mark.parametrize("full", ["undo.log", "wide/rows.bin"])
def test_a_full_disk_damages_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str) -> None:
    """The log's disk before anything is overwritten; the rows' (copy-on-write file systems) in the middle of it."""
    rows = make(tmp_path)
    log = UndoLog.open(tmp_path / "undo.log", rows)
    ids, real = np.arange(700), os.pwritev
    log.write([(rows[0], ids, np.ones(WIDE, np.float16)), (rows[1], ids, ids)])
    log.commit()
    before = held(rows)

    def fail(fd: int, buffers: Any, offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(full):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail)
        with pytest.raises(StoreError, match=rf"cannot write .*{full}: No space left on device; free some space"):
            log.write([(rows[1], ids, ids + 1), (rows[0], ids, np.zeros(WIDE, np.float16))])
    if full == "undo.log":
        for one, other in zip(held(rows), before, strict=True):
            np.testing.assert_array_equal(one, other)
    log.rollback()
    for one, other in zip(held(rows), before, strict=True):
        np.testing.assert_array_equal(one, other)
    log.write([(rows[1], ids, ids + 1)])
    np.testing.assert_array_equal(rows[1].map(), ids + 1)
    close(log, rows)
    with pytest.raises(StoreError, match="closed"):
        log.write([(rows[1], ids, ids + 1)])


class Disk:
    """Records what is written and synced, so that a power cut can be played: of what was not synced, any pages may be lost."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trace: list[tuple[str, str, int, bytes]] = []
        write, sync = os.pwritev, os.fdatasync

        def pwritev(fd: int, buffers: Any, offset: int) -> int:
            self.trace.append(("write", os.readlink(f"/proc/self/fd/{fd}"), offset, bytes(buffers[0])))
            return write(fd, buffers, offset)

        def fdatasync(fd: int) -> None:
            sync(fd)
            self.trace.append(("sync", os.readlink(f"/proc/self/fd/{fd}"), 0, b""))

        monkeypatch.setattr(os, "pwritev", pwritev)
        monkeypatch.setattr(os, "fdatasync", fdatasync)

    def after_a_cut(self, moment: int, images: dict[str, bytes], chance: random.Random) -> dict[str, bytes]:
        """Files' contents where power failed before operation `moment`; images: what they held at first."""
        found = {path: bytearray(image) for path, image in images.items()}
        for position, (kind, path, offset, data) in enumerate(self.trace[:moment]):
            if kind == "sync":
                continue
            synced = any(k == "sync" and p == path for k, p, _, _ in self.trace[position:moment])
            for page in range(0, len(data), 4096):
                if synced or chance.random() < 0.5:
                    end = offset + page + 4096
                    found[path].extend(bytes(max(0, end - len(found[path]))))
                    found[path][offset + page : end] = data[page : page + 4096]
        return {path: bytes(image) for path, image in found.items()}


def test_a_power_cut_at_any_moment_leads_back_to_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = make(tmp_path)
    log = UndoLog.open(tmp_path / "undo.log", rows)
    rng, ids = np.random.default_rng(0), np.arange(700)
    log.write([(rows[0], ids, rng.integers(0, 99, WIDE).astype(np.float16)), (rows[1], ids, ids)])
    log.commit()
    final = held(rows)
    paths = [rows[0].path / "rows.bin", rows[1].path / "rows.bin", tmp_path / "undo.log"]
    images = {str(path.resolve()): path.read_bytes() for path in paths}
    disk = Disk(monkeypatch)
    for first, last in ((0, 200), (150, 300), (0, 700), (20, 600)):
        part = rng.permutation(ids[first:last])
        log.write([(rows[0], part, np.full((len(part), 33), first, np.float16)), (rows[1], part, part * 2)])
    close(log, rows)
    monkeypatch.undo()
    assert sum(kind == "sync" for kind, *_ in disk.trace) == 3  # the fourth group's pages are all saved
    chance = random.Random(0)
    for moment in range(len(disk.trace) + 1):
        for path, image in disk.after_a_cut(moment, images, chance).items():
            Path(path).write_bytes(image)
        found = opened(tmp_path)
        back = UndoLog.open(tmp_path / "undo.log", found)
        for one, other in zip(held(found), final, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=f"at operation {moment}")
        close(back, found)


WRITERS = """
import os, sys
from pathlib import Path
import numpy as np
from ooc.stores.arrays.undo_log import UndoLog
from tests.stores.arrays.test_undo_log import close, make, opened

def write(path, generation, seed, writes):
    rows = opened(path)
    log = UndoLog.open(path / "undo.log", rows, generation)
    rng = np.random.default_rng(seed)
    for number in range(writes):
        ids = rng.permutation(700)[: rng.integers(1, 700)]
        log.write([(rows[0], ids, rng.integers(0, 999, (len(ids), 33)).astype(np.float16)), (rows[1], ids, ids * seed)])
        if number == 0:
            os.write(1, f"{os.getpid()}\\n".encode())
    close(log, rows)

for each in make(Path(sys.argv[1])):  # kernels are loaded, and no thread is left, before the first fork
    each.close()
write(Path(sys.argv[1]), 0, 0, 1)
for line in sys.stdin:
    path, generation, seed = line.split()
    child = os.fork()
    if child == 0:
        write(Path(path), int(generation), int(seed), 10**9)
    os.waitpid(child, 0)
"""


def kill_while_writing(path: Path, kills: int) -> None:
    """Every kill leads back to the bytes of the last commit, which itself moves on after each third of them."""
    rows: Any = make(path)
    log = UndoLog.open(path / "undo.log", rows, 0)
    final, generation = held(rows), 0
    close(log, rows)
    chance = random.Random(kills)
    command = [sys.executable, "-c", WRITERS, str(path / "warm")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writers:
        assert writers.stdin is not None
        assert writers.stdout is not None
        writers.stdout.readline()
        for number in range(kills):
            print(path, generation, number, file=writers.stdin, flush=True)
            child = int(writers.stdout.readline())
            time.sleep(chance.random() * 0.03)
            os.kill(child, signal.SIGKILL)
            while Path(f"/proc/{child}").exists():
                time.sleep(0.001)
            rows = opened(path)
            log = UndoLog.open(path / "undo.log", rows, generation)
            for one, other in zip(held(rows), final, strict=True):
                np.testing.assert_array_equal(one, other)
            if number % 3 == 2:
                rows[0].write(np.arange(700), np.full(WIDE, number, np.float16))
                log.commit()
                final, generation = held(rows), log.generation
            close(log, rows)
        writers.stdin.close()


def test_a_killed_writer_leads_back_to_the_commit(tmp_path: Path) -> None:
    kill_while_writing(tmp_path, 6)


@pytest.mark.slow
def test_a_hundred_killed_writers(tmp_path: Path) -> None:
    kill_while_writing(tmp_path, 100)
