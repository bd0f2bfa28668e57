"""Histories: what a layer gave for every node when it was last computed, on disk, in the run's directory.

Training on a batch and its one-hop halo takes the halo's rows between two layers from here (GNNAutoScale, Fey et al., 2021).
What a pull sees is configuration, never timing: the pull of step s sees the pushes of all steps before s - lag and none later.
So rows are read ahead while pushes are pending: the disk holds pushes only up to what every later pull may see, and what was
pushed between the reading and the step is patched in from memory, where pushes stay until no rows read before them are waiting.
"""

import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ooc.history.rows import NEVER, HistoryCounts, PrefetchedRows, Push, ResidentRows, ResidentSubset, most_asked
from stores.arrays.mutable_rows import DiskRows
from stores.arrays.rows import AnyArray, Ids
from stores.arrays.undo_log import UndoLog
from stores.errors import BudgetError, OocError
from stores.sizes import format_bytes


class History:
    """The rows [N, width] of every inner layer, and the step that wrote each; use `create` or `open`.

    Any state of nodes is kept so, that is pushed step by step: "layers" are then what a node has, maybe of several types.
    lag: see above; max_bytes: of pushes that wait to be written, and of hot rows, each. `fetch` may run in another thread than
    the rest, for steps in ascending order. After a failed write every call raises it.

    >>> fetched = history.fetch(step, halo)            # ahead
    >>> rows = history.pull(fetched, layer=0)          # when it is the step's turn
    >>> history.push(step, own, [rows_of_layer_0])
    """

    def __init__(
        self,
        rows: Sequence[DiskRows],
        steps: DiskRows,
        log: UndoLog,
        lag: int,
        max_bytes: int,
        step: int,
        floor: int = 0,
        resident: ResidentRows | None = None,
    ) -> None:
        self.rows, self.steps, self.log, self.lag = rows, steps, log, lag
        self.counts = HistoryCounts()
        self._max_bytes = max_bytes
        self._next = step  # the step whose push comes next
        self._floor = floor  # rows of earlier steps are forgotten
        self._written = step - 1 - lag
        self._pushes: list[Push] = []  # ascending: those pending, and those rows read before them may want
        self._waiting: dict[int, int] = {}  # step -> version of the rows fetched for it
        self._hot: ResidentSubset | None = None
        self._resident = resident
        self._chosen: Ids | None = None  # the hot rows' nodes while their rows are not in memory
        self._asked: NDArray[np.uint16] | None = np.zeros(steps.shape[0], np.uint16) if resident is None else None
        self._changed = threading.Condition()
        self._closed = False
        self._failure: BaseException | None = None
        self._writer = threading.Thread(target=self._write_all, name="ooc-history", daemon=True)
        self._writer.start()

    @classmethod
    def create(
        cls,
        path: Path,
        num_nodes: int,
        widths: Sequence[int],
        dtype: str | Sequence[str],
        *,
        lag: int,
        max_bytes: int,
        engine: str = "auto",
        resident: bool = False,
    ) -> "History":
        """Histories of zeros in the directory `path`, in place of what a run without a checkpoint left there.

        dtype: of all layers, or of each. resident: keep all rows in RAM where `max_bytes` has room for them, and write them at
        a checkpoint only (not for histories that are refreshed). Raises StoreError where the disk has no room for N x
        sum(widths) numbers.
        """
        shutil.rmtree(path, ignore_errors=True)
        dtypes = [dtype] * len(widths) if isinstance(dtype, str) else dtype
        rows = [
            DiskRows.create(path / f"layer{layer}", (num_nodes, width), kind, engine)
            for layer, (width, kind) in enumerate(zip(widths, dtypes, strict=True))
        ]
        steps = DiskRows.create(path / "steps", (num_nodes,), "int32", "mmap")  # one more than the step is kept
        log = UndoLog.open(path / "undo.log", [*rows, steps], 0)
        kept = ResidentRows(rows, steps, empty=True) if resident and ResidentRows.nbytes(rows, steps) <= max_bytes else None
        return cls(rows, steps, log, lag, max_bytes, 0, resident=kept)

    @classmethod
    def open(
        cls,
        path: Path,
        layers: int,
        state: dict[str, Any],
        *,
        lag: int,
        max_bytes: int,
        engine: str = "auto",
        resident: bool = False,
    ) -> "History":
        """Histories as they were when `state` was taken. Raises StoreError where they are absent or damaged."""
        rows = [DiskRows.open(path / f"layer{layer}", engine) for layer in range(layers)]
        steps = DiskRows.open(path / "steps", "mmap")
        log = UndoLog.open(path / "undo.log", [*rows, steps], int(state["generation"]))
        kept = ResidentRows(rows, steps, empty=False) if resident and ResidentRows.nbytes(rows, steps) <= max_bytes else None
        history = cls(rows, steps, log, lag, max_bytes, int(state["step"]), int(state["floor"]), kept)
        for each in state["pending"]:
            pushed = tuple(np.asarray(part) for part in each["rows"])
            history._pushes.append(Push(int(each["step"]), np.asarray(each["ids"]), pushed))
        return history

    @property
    def next_step(self) -> int:
        """The step that pushes next."""
        return self._next

    def fetch(self, step: int, ids: Ids) -> PrefetchedRows:
        """Read the rows of nodes `ids` (int64[k], ascending) for step `step`, ahead of it."""
        with self._changed:
            self._check()
            version = self._waiting[step] = self._written
        if self._asked is not None:
            self._asked[ids] += self._asked[ids] < np.iinfo(np.uint16).max
        found, kept = self._read(ids) if self._resident is None else self._resident.read(ids)
        steps = kept.astype(np.int64) - 1
        if (forgotten := steps < self._floor).any():
            steps[forgotten] = NEVER
            for out in found:
                out[forgotten] = 0
        return PrefetchedRows(step, version, ids, tuple(found), steps)

    def _read(self, ids: Ids) -> tuple[list[AnyArray], AnyArray]:
        """(every layer's rows, the steps as stored), from the disk, but for hot rows."""
        found = []
        for layer, rows in enumerate(self.rows):
            out = np.empty((len(ids), *rows.shape[1:]), rows.dtype)
            self.counts.bytes_read += rows.read(ids, out) if self._hot is None else self._hot.read(layer, rows, ids, out)
            found.append(out)
        steps = np.empty(len(ids), np.int32)
        self.steps.read(ids, steps)
        return found, steps

    def pull(self, fetched: PrefetchedRows) -> tuple[AnyArray, ...]:
        """[k, width] of every layer: the rows as step `fetched.step` is to see them. Once for each, in the steps' order."""
        with self._changed:
            self._check()
            seen = [push for push in self._pushes if fetched.version < push.step < fetched.step - self.lag]
        for push in seen:
            push.patch(fetched.ids, fetched.rows, fetched.steps)
        with self._changed:
            self._waiting.pop(fetched.step, None)
            self._trim()
        known = fetched.steps != NEVER
        self.counts.pulled += len(fetched.ids)
        self.counts.written += int(known.sum())
        self.counts.age += int((fetched.step - fetched.steps[known]).sum())
        return fetched.rows

    def push(self, step: int, ids: Ids, rows: Sequence[AnyArray]) -> None:
        """Give the rows of step `step`'s own nodes `ids` (int64[n], ascending), [n, width] a layer; written in the background.

        Waits while more than `max_bytes` wait to be written, but for two, which the batches' memory has room for. Raises
        OocError where a number is too large for float16, BudgetError where the pushes of `lag` steps do not fit `max_bytes`.
        """
        push = Push(step, ids, tuple(self._as_stored(own, to) for own, to in zip(rows, self.rows, strict=True)))
        if self.lag * push.nbytes > self._max_bytes:
            raise BudgetError(
                f"pushes of {format_bytes(push.nbytes)} wait for {self.lag} steps, in {format_bytes(self._max_bytes)}: "
                "take a smaller --history-lag, fewer parts a batch, or more memory"
            )
        with self._changed:
            assert step == self._next, "steps push once each, in order"
            self._changed.wait_for(lambda: self._failure is not None or self._closed or self._fits(push))
            self._check()
            self._pushes.append(push)
            self._next = step + 1
            self._changed.notify_all()

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps; all it stands for is durable. Call `commit` when it is saved, and nothing between."""
        self._settle()
        for group in self._resident.writes() if self._resident is not None else ():
            self.counts.bytes_written += self.log.write(group)
        self.log.sync()
        pending = [push for push in self._pushes if push.step > self._written]
        kept = [
            {"step": p.step, "ids": torch.from_numpy(p.ids), "rows": [torch.from_numpy(r) for r in p.rows]} for p in pending
        ]
        return {"generation": self.log.generation + 1, "step": self._next, "floor": self._floor, "pending": kept}

    def commit(self) -> None:
        """The state taken last is what a crash leads back to from now on."""
        self.log.commit()

    def overwrite(self, layer: int, ids: Ids, rows: AnyArray) -> None:
        """Write rows of a layer in place of all that was pushed before, as a refresh does; between steps only."""
        assert self._resident is None, "what is refreshed is not resident"
        stored = self._as_stored(rows, self.rows[layer])
        self.counts.bytes_written += self.log.write([(self.rows[layer], ids, stored)])

    def begin_refresh(self) -> None:
        """Before `overwrite`: what is pending is not to be seen any more, and hot rows make room for the pass."""
        self.make_room()
        self._drop()

    def forget(self) -> None:
        """From the next step on all rows are as if never written: zeros. Nothing is rewritten, and no rows fetched may wait."""
        self._settle()
        self._drop()
        self._floor = self._next

    def forget_rows(self, ids: Ids) -> None:
        """The rows of nodes `ids` (int64[k], distinct) are as if never written, before the first step of all."""
        assert not self._pushes, "what waits to be written may be theirs"
        assert self._resident is None, "rows in RAM are others"
        self.log.write([(self.steps, ids, np.zeros(len(ids), np.int32))])

    def _drop(self) -> None:
        """Nobody is to see what was pushed and is not on disk."""
        with self._changed:
            assert not self._waiting, "rows are fetched anew after an epoch's end"
            self._pushes.clear()
            self._written = self._next - 1 - self.lag

    def make_room(self) -> None:
        """Between two epochs: hot rows leave the memory to a pass. Pushes that the lag holds back stay, of `max_bytes`."""
        self._settle()
        if self._hot is not None:
            self._chosen, self._hot = self._hot.ids, None

    def begin_epoch(self) -> None:
        """Before rows are fetched: the hot ones are read, where they are not in memory any more or were chosen anew."""
        if self._chosen is not None:
            self._hot, self._chosen = self._read_hot(self._chosen), None

    def stamp(self, ids: Ids) -> None:
        """Note that all layers of these rows were refreshed before the next step."""
        self.counts.bytes_written += self.log.write([(self.steps, ids, np.full(len(ids), self._next, np.int32))])

    def end_epoch(self) -> None:
        """No rows fetched are waiting any more. After the first epoch the hot rows are chosen: those asked for most often."""
        self._settle()
        with self._changed:
            self._waiting.clear()
            self._trim()
        if self._asked is not None and self._asked.any():
            asked, self._asked = self._asked, None
            ids = most_asked(asked, self._max_bytes // (sum(rows.row_bytes for rows in self.rows) + 8))
            self._chosen = ids if len(ids) else None

    def _read_hot(self, ids: Ids) -> ResidentSubset:
        kept = [np.empty((len(ids), *rows.shape[1:]), rows.dtype) for rows in self.rows]
        for rows, out in zip(self.rows, kept, strict=True):
            self.counts.bytes_read += rows.read(ids, out)
        return ResidentSubset(ids, kept)

    def close(self) -> None:
        """End the writer, without what it has not written, and give everything back; idempotent."""
        with self._changed:
            first, self._closed = not self._closed, True
            self._changed.notify_all()
        if first:
            self._writer.join()
            self.log.close()
            for each in (*self.rows, self.steps):
                each.close()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        assert not self._closed, "a history is used after close"

    def _fits(self, push: Push) -> bool:
        pending = [each for each in self._pushes if each.step > self._written]
        return len(pending) < self.lag + 2 or sum(each.nbytes for each in pending) + push.nbytes <= self._max_bytes

    def _trim(self) -> None:
        """Forget pushes that are on disk and in all rows that were fetched."""
        oldest = min([self._written, *self._waiting.values()])
        while self._pushes and self._pushes[0].step <= oldest:
            del self._pushes[0]

    def _due(self) -> Push | None:
        """The push to be written next: one that every later pull may see."""
        return next((push for push in self._pushes if self._written < push.step < self._next - self.lag), None)

    def _settle(self) -> None:
        """Wait until all is written that may be."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or self._due() is None)
            self._check()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._due() is not None)
                push = None if self._closed else self._due()
            if push is None:
                return
            try:
                self._write(push)
            except BaseException as error:  # the trainer gets it
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._written = push.step
                self._trim()
                self._changed.notify_all()

    def _write(self, push: Push) -> None:
        if self._resident is not None:
            self._resident.put(push)
            return
        stamp = (self.steps, push.ids, np.full(len(push.ids), push.step + 1, np.int32))
        layers = [(rows, push.ids, own) for rows, own in zip(self.rows, push.rows, strict=True)]
        self.counts.bytes_written += self.log.write([*layers, stamp])
        if self._hot is not None:
            push.patch(self._hot.ids, self._hot.rows)

    @staticmethod
    def _as_stored(rows: AnyArray, to: DiskRows) -> AnyArray:
        if to.dtype != np.float16:
            return np.ascontiguousarray(rows, to.dtype)
        half = torch.from_numpy(np.ascontiguousarray(rows)).half()  # to the same bits as numpy does, in a ninth of its time
        stored: AnyArray = half.numpy()
        if not np.isfinite(stored).all():
            raise OocError(
                "a hidden row holds a number that float16 cannot: use --history-dtype float32, or lower --lr if it diverges"
            )
        return stored
