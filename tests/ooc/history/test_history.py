"""Histories against a plain dictionary: what a pull sees is the lag's doing, whatever is read ahead and written when."""

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.history.history import History
from ooc.history.int8_rows import as_int8, numbers_of
from ooc.history.rows import NEVER
from ooc.stores.errors import BudgetError, OocError, StoreError
from tests.waiting import DEADLINE_S, eventually

N, WIDTHS = 60, (4, 7)
PARTS = [(0, 10), (10, 25), (25, 40), (40, 60)]


class Double:
    """Every version of every row, and the step that wrote it."""

    def __init__(self, lag: int) -> None:
        self.lag, self.pushed = lag, []  # type: ignore[var-annotated]

    def push(self, step: int, ids: Any, rows: Any) -> None:
        self.pushed.append((step, dict(zip(ids.tolist(), zip(*rows, strict=True), strict=True))))

    def refresh(self, step: int, rows: Any) -> None:
        self.pushed = [(step - 1 - self.lag - 10**6, dict(enumerate(zip(*rows, strict=True))))]

    def forget(self) -> None:
        self.pushed = []

    def seen(self, step: int, node: int) -> Any:
        found = [(at, rows[node]) for at, rows in self.pushed if node in rows and at < step - self.lag]
        return found[-1] if found else (NEVER, tuple(np.zeros(width) for width in WIDTHS))


def nodes_of(parts: Any) -> Any:
    return np.concatenate([np.arange(*PARTS[p]) for p in sorted(parts)])


def as_kept(rows: Any, dtype: str) -> Any:
    """What comes back of rows that were stored: integers up to 2,000 are exact in floats."""
    return numbers_of(as_int8(rows)) if dtype == "int8" else rows


def check(history: History, double: Double, fetched: Any) -> None:
    rows = history.pull(fetched)
    for i, node in enumerate(fetched.ids.tolist()):
        step, wanted = double.seen(fetched.step, node)
        for own, other in zip(rows, wanted, strict=True):
            np.testing.assert_array_equal(own[i], other)
        if step > -(10**5):
            assert fetched.steps[i] == step


EVENTS = st.sampled_from(["", "", "", "epoch", "reopen", "refresh", "forget", "slow"])
nodes = st.one_of(  # parts, and any nodes
    st.sets(st.integers(0, 3), min_size=1, max_size=3).map(nodes_of),
    st.sets(st.integers(0, N - 1), max_size=N // 2).map(lambda ids: np.array(sorted(ids), np.int64)),
)


@given(
    st.integers(0, 3),
    st.integers(1, 4),
    st.lists(st.tuples(nodes, EVENTS), min_size=1, max_size=14),
    st.sampled_from(["float16", "float32", "int8"]),
    st.sampled_from([1, 3000, 10**6]),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_a_pull_sees_the_pushes_up_to_the_lag(
    tmp_path_factory: pytest.TempPathFactory, lag: int, ahead: int, steps: Any, dtype: str, max_bytes: int, resident: bool
) -> None:
    path, double = tmp_path_factory.mktemp("run") / "history", Double(lag)
    max_bytes = max(max_bytes, lag * N * (8 + 4 * sum(WIDTHS)))  # as many pushes wait in any case
    options: dict[str, Any] = {"lag": lag, "max_bytes": max_bytes, "engine": "pread", "resident": resident}
    history = History.create(path, N, WIDTHS, dtype, **options)
    rng, waiting = np.random.default_rng(len(steps)), {}
    every = np.arange(N)
    for step, (own, then) in enumerate(steps):
        for later in range(step, min(step + ahead, len(steps))):
            if later not in waiting:
                waiting[later] = history.fetch(later, np.setdiff1d(every[:: 1 + later % 2], steps[later][0]))
        check(history, double, waiting.pop(step))
        rows = [rng.integers(-2000, 2000, (len(own), width)).astype(np.float32) for width in WIDTHS]
        history.push(step, own, rows)
        double.push(step, own, [as_kept(each, dtype) for each in rows])
        if then == "slow":
            time.sleep(0.003)  # the writer may be anywhere
        elif then:
            waiting.clear()
            history.end_epoch()
            if then == "refresh" and not resident:
                fresh = [rng.integers(-2000, 2000, (N, width)).astype(np.float32) for width in WIDTHS]
                history.begin_refresh()
                for layer, values in enumerate(fresh):
                    for first, last in PARTS:
                        history.overwrite(layer, every[first:last], values[first:last])
                history.stamp(every)
                double.refresh(step + 1, [as_kept(each, dtype) for each in fresh])
            elif then == "forget":
                history.forget()
                double.forget()
            elif then == "reopen":
                state = history.state()
                history.commit()
                history.close()
                history = History.open(path, 2, state, **options)
            history.begin_epoch()
    check(history, double, history.fetch(len(steps), every))
    history.close()


def test_what_was_not_committed_is_gone_after_a_crash(tmp_path: Path) -> None:
    history = History.create(tmp_path / "h", N, WIDTHS, "float32", lag=1, max_bytes=10**6, engine="pread")
    for step in range(3):
        history.push(step, nodes_of({0, 1}), [np.full((25, width), step, np.float32) for width in WIDTHS])
    state = history.state()
    history.commit()
    for step in range(3, 9):
        history.push(step, nodes_of({0, 2}), [np.full((25, width), step, np.float32) for width in WIDTHS])
    history.end_epoch()
    history.close()
    again = History.open(tmp_path / "h", 2, state, lag=1, max_bytes=10**6, engine="pread")
    for step in (3, 4):  # the pushes that waited for the lag came with the checkpoint
        rows = again.pull(again.fetch(step, np.arange(N)))
        assert rows[0][:25].tolist() == [[step - 2.0] * 4] * 25
        assert not rows[0][25:].any()
        again.push(step, np.empty(0, np.int64), [np.empty((0, width), np.float32) for width in WIDTHS])
    again.close()


def test_resident_rows_meet_the_disk_at_checkpoints_alone_and_a_crash_loses_what_came_since(tmp_path: Path) -> None:
    options: dict[str, Any] = {"lag": 0, "max_bytes": 10**6, "engine": "pread", "resident": True}
    history = History.create(tmp_path / "h", N, WIDTHS, "float32", **options)
    for step in range(6):
        history.push(
            step, nodes_of({step % 4}), [np.full((len(nodes_of({step % 4})), width), step, np.float32) for width in WIDTHS]
        )
        if step == 3:
            state = history.state()
            written = history.counts.bytes_written
            history.commit()
    found = history.pull(history.fetch(6, np.arange(N)))
    assert found[0][:, 0].tolist() == [4.0] * 10 + [5.0] * 15 + [2.0] * 15 + [3.0] * 20
    assert history.counts.bytes_read == 0
    history.end_epoch()
    assert history.counts.bytes_written == written > 0
    history.close()
    history = History.open(tmp_path / "h", 2, state, **options)
    found = history.pull(history.fetch(4, np.arange(N)))
    assert found[1][:, 6].tolist() == [0.0] * 10 + [1.0] * 15 + [2.0] * 15 + [3.0] * 20
    history.close()


def test_layers_may_be_of_several_types_and_are_forgotten_without_a_write(tmp_path: Path) -> None:
    options: dict[str, Any] = {"lag": 0, "max_bytes": 10**6, "engine": "pread"}
    history = History.create(tmp_path / "h", N, (3, 1), ("float32", "int64"), **options)
    ids, memory, at = np.array([2, 7, 40]), np.full((3, 3), 1 / 3, np.float32), np.array([[2**60 + 1], [-1], [0]])
    history.push(0, ids, [memory, at])
    found = history.pull(history.fetch(1, np.array([2, 3, 7, 40])))
    np.testing.assert_array_equal(found[0], memory[[0, 0, 1, 2]] * [[1], [0], [1], [1]])
    np.testing.assert_array_equal(found[1], [[2**60 + 1], [0], [-1], [0]])
    history.state()  # all is written
    written = history.counts.bytes_written
    history.forget()
    history.push(1, ids[:1], [memory[:1] * 2, at[1:2]])
    state = history.state()
    assert history.counts.bytes_written == 2 * written
    history.commit()
    history.close()
    history = History.open(tmp_path / "h", 2, state, **options)
    found = history.pull(history.fetch(2, ids))
    np.testing.assert_array_equal(found[0], memory * [[2], [0], [0]])
    np.testing.assert_array_equal(found[1], [[-1], [0], [0]])
    history.close()


def test_hot_rows_are_those_asked_for_most_and_need_no_reading(tmp_path: Path) -> None:
    each = 4 * sum(WIDTHS) + 8
    history = History.create(tmp_path / "h", N, WIDTHS, "float32", lag=0, max_bytes=10 * each, engine="pread")
    for step in range(4):
        history.pull(history.fetch(step, np.arange(30 if step else 60, dtype=np.int64)[step * 7 : 10 + step * 20]))
        history.push(step, nodes_of({0, 3}), [np.full((30, width), step + 1, np.float32) for width in WIDTHS])
    history.end_epoch()
    history.begin_epoch()
    assert history._hot is not None
    assert len(history._hot.ids) == 10
    before = history.counts.bytes_read
    rows = history.pull(history.fetch(4, history._hot.ids))
    assert history.counts.bytes_read == before
    np.testing.assert_array_equal(rows[0][:, 0], np.where((history._hot.ids < 10) | (history._hot.ids >= 40), 4, 0))
    history.close()


def test_numbers_that_are_not_finite_are_reported_by_int8(tmp_path: Path) -> None:
    history = History.create(tmp_path / "h", N, WIDTHS, "int8", lag=0, max_bytes=10**6, engine="pread")
    history.push(0, nodes_of({0}), [np.full((10, width), 1e30, np.float32) for width in WIDTHS])
    for number in (np.nan, np.inf):
        with pytest.raises(OocError, match="not finite: lower `lr`"):
            history.push(1, nodes_of({0}), [np.full((10, width), number, np.float32) for width in WIDTHS])
    history.close()


def test_numbers_too_large_for_float16_are_reported(tmp_path: Path) -> None:
    history = History.create(tmp_path / "h", N, WIDTHS, "float16", lag=0, max_bytes=10**6, engine="pread")
    with pytest.raises(OocError, match="use `history_dtype='float32'`"):
        history.push(0, nodes_of({0}), [np.full((10, width), 1e5, np.float32) for width in WIDTHS])
    history.close()


def test_float16_is_numpys_to_the_bit(tmp_path: Path) -> None:
    history = History.create(tmp_path / "h", N, WIDTHS, "float16", lag=0, max_bytes=10**6, engine="pread")
    rng = np.random.default_rng(0)
    scale = 10.0 ** rng.integers(-9, 4, (10, 1))  # numbers that float16 holds only in part, or not at all, among them
    rows = [(rng.normal(size=(10, width)) * scale).astype(np.float32) for width in WIDTHS]
    history.push(0, nodes_of({0}), rows)
    found = history.pull(history.fetch(1, np.arange(10)))
    for own, stored in zip(rows, found, strict=True):
        np.testing.assert_array_equal(stored, own.astype(np.float16))
    history.close()


def test_a_failed_write_reaches_the_trainer_and_leaves_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = History.create(tmp_path / "h", N, WIDTHS, "float32", lag=0, max_bytes=10**6, engine="pread")
    state = history.state()
    history.commit()

    def full(fd: int, buffers: Any, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        history.push(0, nodes_of({0}), [np.ones((10, width), np.float32) for width in WIDTHS])
        with pytest.raises(StoreError, match=r"cannot write .*undo.log: No space left on device; free some space"):
            history.end_epoch()
        with pytest.raises(StoreError, match="No space left"):
            history.push(1, nodes_of({0}), [np.ones((10, width), np.float32) for width in WIDTHS])
    history.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "ooc-history"]
    again = History.open(tmp_path / "h", 2, state, lag=0, max_bytes=10**6, engine="pread")
    assert not again.pull(again.fetch(0, np.arange(N)))[0].any()
    again.close()


def test_pushes_wait_for_the_disk_beyond_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = (8 + 4 * sum(WIDTHS)) * 20
    history = History.create(tmp_path / "h", N, WIDTHS, "float32", lag=0, max_bytes=3 * nbytes, engine="pread")
    gate, real, most = threading.Event(), History._write, []

    def blocked(self: History, push: Any) -> None:
        gate.wait(DEADLINE_S)
        real(self, push)

    monkeypatch.setattr(History, "_write", blocked)

    def push_all() -> None:
        for step in range(8):
            history.push(step, nodes_of({3}), [np.full((20, width), step, np.float32) for width in WIDTHS])
            most.append(step)

    pusher = threading.Thread(target=push_all)
    pusher.start()
    assert eventually(lambda: len(most) == 3)
    time.sleep(0.2)
    assert most == [0, 1, 2]
    gate.set()
    pusher.join(DEADLINE_S)
    rows = history.pull(history.fetch(8, np.arange(40, 60)))
    assert rows[1].tolist() == [[7.0] * 7] * 20
    history.close()


def test_pushes_that_a_lag_holds_back_keep_to_the_memory(tmp_path: Path) -> None:
    rows = [np.zeros((10, width), np.float32) for width in WIDTHS]
    waiting = 3 * (10 * 8 + sum(each.nbytes for each in rows))
    history = History.create(tmp_path / "fits", N, WIDTHS, "float32", lag=3, max_bytes=waiting, engine="pread")
    for step in range(8):
        history.push(step, nodes_of({0}), rows)
    history.close()
    history = History.create(tmp_path / "not", N, WIDTHS, "float32", lag=3, max_bytes=waiting - 1, engine="pread")
    with pytest.raises(BudgetError, match="smaller `history_lag`"):
        history.push(0, nodes_of({0}), rows)
    history.close()


def test_pushes_of_several_batches_keep_to_the_memory(tmp_path: Path) -> None:
    """Batches' memory has room for pushes of one batch, beyond what pushes may take; for those of several it has none."""
    rows = [np.zeros((N, width), np.float32) for width in WIDTHS]
    nbytes = N * (8 + 4 * sum(WIDTHS))
    for lag in (0, 1):
        history = History.create(tmp_path / f"h{lag}", N, WIDTHS, "float32", lag=lag, max_bytes=(1 + lag) * nbytes)
        for step in range(3):
            history.push(step, np.arange(N), rows, batches=2)
        history.close()
        history = History.create(tmp_path / f"h{lag}", N, WIDTHS, "float32", lag=lag, max_bytes=(1 + lag) * nbytes - 1)
        history.push(0, np.arange(N), rows)
        with pytest.raises(BudgetError, match="what the 2 batches of an optimizer step push"):
            history.push(1, np.arange(N), rows, batches=2)
        history.close()
