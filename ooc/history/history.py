"""Histories: each layer's output for every node when it was last computed, on disk, in the run's directory.

Training on a batch and its one-hop halo takes the halo's rows between two layers from here (GNNAutoScale, Fey et al., 2021).
What a pull sees is configuration, never timing: the pull of step s sees the pushes of all steps before s - lag and none later.
So rows are read ahead while pushes are pending: the disk holds pushes only up to what every later pull may see, and what was
pushed between the reading and the step is patched in from memory, where pushes stay until no rows read before them are waiting.

A step is an optimizer step: batches whose gradients are accumulated, and those of several ranks, see the same histories and
push together. Ranks share one set of files: each hands its rows to all others, which need them to patch what they have read,
and writes those of its own range of nodes, behind an undo log of its own.
"""

import shutil
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ooc.history.int8_rows import as_int8, numbers_of, stored_bytes
from ooc.history.rows import NEVER, HistoryCounts, PrefetchedRows, Push, ResidentRows, ResidentSubset, most_asked
from ooc.history.shares import HistoryShare, open_log, push_of_ranks, ranks_of
from ooc.runtime.ranks import ALONE
from ooc.stores.arrays.mutable_rows import DiskRows
from ooc.stores.arrays.rows import AnyArray, Ids
from ooc.stores.errors import BudgetError, OocError
from ooc.stores.sizes import format_bytes

LateRows = Callable[[], Sequence[AnyArray]]
"""() -> the rows of a push"""


@dataclass(frozen=True)
class Growth:
    """What a resumed run found: a store with more in it than at its checkpoint."""

    touched: Ids
    """int64[k]: nodes whose features or in-edges have changed"""
    epoch: int
    """the epoch that the run goes on with"""
    note: str = ""
    """what a person should know of it, if anything"""


class History:
    """The rows [N, width] of every inner layer, and the step that wrote each; use `create`, `open` or `open_history`.

    Any state of nodes that is pushed step by step is stored like this; the "layers" are then what a node has, maybe of several
    types. `fetch` may run in another thread than the rest, for steps in ascending order. After a failed write every call raises
    its error. Several ranks make it, open it and call `push`, `state`, `commit` and `end_epoch` together.

    >>> fetched = history.fetch(step, halo)            # ahead
    >>> rows = history.pull(fetched)[0]                # when it is the step's turn
    >>> history.push(step, own, [rows_of_layer_0])
    """

    def __init__(
        self,
        path: Path,
        files: Sequence[DiskRows],
        state: dict[str, Any],
        *,
        lag: int,
        max_bytes: int,
        resident: bool = False,
        share: HistoryShare | None = None,
    ) -> None:
        *rows, steps = files
        self.rows, self.steps, self.lag, self._max_bytes = rows, steps, lag, max_bytes
        self.ranks, self.own, self._replicated = share or HistoryShare(ALONE, (0, steps.shape[0]))
        generation = int(state["generation"])
        self.log = open_log(path, files, generation, self.ranks)
        self.counts = HistoryCounts()
        self.next_step = int(state["step"])
        self._floor = int(state["floor"])  # rows of earlier steps are forgotten
        self._written = self.next_step - 1 - lag
        self._of_others = self._written  # what the other ranks have written, as far as is known
        self._pushes: list[Push] = []  # ascending: those pending, and those that rows read before them may need
        for each in state["pending"]:
            pushed = tuple(np.asarray(part) for part in each["rows"])
            self._pushes.append(Push(int(each["step"]), np.asarray(each["ids"]), pushed))
        self._waiting: Counter[int] = Counter()  # versions of rows that are fetched and not pulled
        self._hot: ResidentSubset | None = None
        self._resident: ResidentRows | None = None
        if resident and all(self.ranks.gather(ResidentRows.nbytes(rows, steps) <= max_bytes)):  # alike on all ranks
            self._resident = ResidentRows(rows, steps, empty=generation == 0)
        self._chosen: Ids | None = None  # the hot rows' nodes while their rows are not in memory
        self._asked: NDArray[np.uint16] | None = None if self._resident else np.zeros(steps.shape[0], np.uint16)
        self._late: tuple[int, Ids, LateRows] | None = None  # the last push, whose rows are still on their way
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
        engine: str = "auto",
        **settings: Any,
    ) -> "History":
        """Histories of zeros in the directory `path`, in place of what a run without a checkpoint left there.

        `dtype` is that of all layers, or of each; "int8" has a scale a row (`ooc.history.int8_rows`) and is pulled as float32.
        Settings are `lag`, the steps before a push is seen; `max_bytes`, the limit
        on pushes that wait to be written, and on hot rows, each; `resident`: all rows are in RAM if they fit `max_bytes`, and
        written at a checkpoint only (not for histories that are refreshed); and `share`: of several ranks, they and the nodes
        whose rows this one writes. Raises StoreError if the disk is full.
        """
        dtypes = [dtype] * len(widths) if isinstance(dtype, str) else dtype

        def make() -> None:
            shutil.rmtree(path, ignore_errors=True)
            for layer, (width, kind) in enumerate(zip(widths, dtypes, strict=True)):
                columns = stored_bytes(width, kind) // np.dtype(kind).itemsize
                DiskRows.create(path / f"layer{layer}", (num_nodes, columns), kind, engine).close()
            DiskRows.create(path / "steps", (num_nodes,), "int32", "mmap").close()  # one more than the step is stored

        ranks_of(settings).decided(make)
        state: dict[str, Any] = {"generation": 0, "step": 0, "floor": 0, "pending": []}
        return cls.open(path, len(widths), state, engine=engine, **settings)

    @classmethod
    def open(cls, path: Path, layers: int, state: dict[str, Any], *, engine: str = "auto", **settings: Any) -> "History":
        """Histories as they were when `state` was taken. Raises StoreError where they are absent or damaged."""
        ranks = ranks_of(settings)
        on_one_host = ranks.world_size == ranks.local_world_size  # whose processes see the same pages
        files = [DiskRows.open(path / f"layer{layer}", engine) for layer in range(layers)]
        return cls(path, [*files, DiskRows.open(path / "steps", "mmap" if on_one_host else engine)], state, **settings)

    def fetch(self, step: int, ids: Ids) -> PrefetchedRows:
        """Read the rows of nodes `ids` (int64[k], ascending) for step `step`, ahead of it."""
        with self._changed:
            self._check()
            version = self._on_disk
            self._waiting[version] += 1
        if self._asked is not None:
            self._asked[ids] += self._asked[ids] < np.iinfo(np.uint16).max
        found, steps, nbytes = self._kept(ids)
        self.counts.bytes_read += nbytes
        return PrefetchedRows(step, version, ids, found, steps)

    def read(self, ids: Ids) -> tuple[tuple[AnyArray, ...], Ids]:
        """The rows [k, width] of every layer of nodes `ids` (int64[k], ascending) as they are now, and the step that wrote
        each, int64[k], NEVER before any did; between steps only, and without a lag.
        They are not counted, as no step needs them."""
        assert not self.lag, "pushes that wait for the lag are not on disk"
        self._settle()
        found, steps, _ = self._kept(ids)
        return tuple(map(numbers_of, found)), steps

    def _kept(self, ids: Ids) -> tuple[tuple[AnyArray, ...], Ids, int]:
        """`_read` without what is forgotten, and the steps as numbered."""
        found, kept, nbytes = self._read(ids) if self._resident is None else (*self._resident.read(ids), 0)
        steps = kept.astype(np.int64) - 1
        if (forgotten := steps < self._floor).any():
            steps[forgotten] = NEVER
            for out in found:
                out[forgotten] = 0
        return tuple(found), steps, nbytes

    def _read(self, ids: Ids) -> tuple[list[AnyArray], AnyArray, int]:
        """(every layer's rows, the steps as stored, bytes read from disk); hot rows are in memory."""
        found, nbytes = [], 0
        for layer, rows in enumerate(self.rows):
            out = np.empty((len(ids), *rows.shape[1:]), rows.dtype)
            nbytes += rows.read(ids, out) if self._hot is None else self._hot.read(layer, rows, ids, out)
            found.append(out)
        steps = np.empty(len(ids), np.int32)
        self.steps.read(ids, steps)
        return found, steps, nbytes

    def pull(self, fetched: PrefetchedRows) -> tuple[AnyArray, ...]:
        """[k, width] of every layer: the rows as step `fetched.step` is to see them. Once for each, in the steps' order; all of
        a step before its push."""
        self._push_late()
        with self._changed:
            self._check()
            seen = [push for push in self._pushes if fetched.version < push.step < fetched.step - self.lag]
        for push in seen:
            push.patch(fetched.ids, fetched.rows, fetched.steps)
        with self._changed:
            if self._waiting[fetched.version] > 0:
                self._waiting[fetched.version] -= 1
            self._trim()
        self._count(fetched.step, fetched.steps)
        return tuple(map(numbers_of, fetched.rows))

    def _count(self, step: int, steps: Ids) -> None:
        """Count rows pulled by a step, of which `steps` wrote each."""
        known = steps != NEVER
        self.counts.pulled += len(steps)
        self.counts.written += int(known.sum())
        self.counts.age += int((step - steps[known]).sum())

    @property
    def in_place(self) -> ResidentRows | None:
        """The rows, if all are in RAM and pushes are seen at once: steps may then change them there, without pulls and pushes
        of copies. None: they must not."""
        return None if self.lag else self._resident

    def pull_in_place(self, step: int, ids: Ids) -> tuple[tuple[AnyArray, ...], Ids]:
        """(every layer's rows of all nodes, the step that wrote each of `ids`, int64[k], NEVER before any did), at the turn of
        step `step`. Rows that were never written may have any values."""
        assert self.in_place is not None
        with self._changed:
            self._check()
        steps = self.in_place.steps_of(ids).astype(np.int64) - 1
        steps[steps < self._floor] = NEVER
        self._count(step, steps)
        return self.in_place.all_rows, steps

    def changed_in_place(self, step: int, ids: Ids) -> None:
        """Step `step` has changed the rows of nodes `ids` (int64[n]) in RAM; in place of its push."""
        assert self.in_place is not None
        with self._changed:
            self._check()
            assert step == self.next_step, "steps change rows once each, in order"
            self.in_place.mark(step, ids)
            self.next_step, self._written, self._of_others = step + 1, step, step

    def push(self, step: int, ids: Ids, rows: Sequence[AnyArray] | LateRows, batches: int = 1) -> None:
        """Store the rows of step `step`'s own nodes `ids` (int64[n], ascending), [n, width] a layer, in the background.

        rows: a function gives them later, before the next pull or push: those of a GPU are then copied while it goes on. Of
        several ranks each gives those of its own batches, which no other has, maybe none; or all give all. batches: whose rows
        they are, those of all ranks; the memory of batches has no room for those of several.

        Waits while more than `max_bytes` wait to be written, except for two, which the batches' memory has room for. Raises
        OocError where a number is too large for float16, or not finite for int8, BudgetError where the pushes of `lag` steps,
        or of several batches, do not fit `max_bytes`.
        """
        self._push_late()
        if callable(rows) and self.ranks.alone:
            self._late = step, ids, rows
        else:
            self._push(step, ids, rows() if callable(rows) else rows, batches)

    def _push_late(self) -> None:
        if self._late is not None:
            (step, ids, rows), self._late = self._late, None
            self._push(step, ids, rows())

    def _push(self, step: int, ids: Ids, rows: Sequence[AnyArray], batches: int = 1) -> None:
        stored = [self._as_stored(own, to) for own, to in zip(rows, self.rows, strict=True)]
        push = self._of_all_ranks(Push(step, ids, tuple(stored)))
        if self.lag * push.nbytes > self._max_bytes:
            raise BudgetError(
                f"pushes of {format_bytes(push.nbytes)} wait for {self.lag} steps, in {format_bytes(self._max_bytes)}: "
                "take a smaller `history_lag`, fewer parts a batch, or more memory"
            )
        if batches > 1 and (need := (self.lag + 1) * push.nbytes) > self._max_bytes:
            raise BudgetError(
                f"what the {batches} batches of an optimizer step push takes {format_bytes(need)}, and "
                f"{format_bytes(self._max_bytes)} are there: take fewer batches a step (`accumulate`, processes), fewer parts "
                "a batch, or more memory"
            )
        with self._changed:
            assert step == self.next_step, "steps push once each, in order"
            self._changed.wait_for(lambda: self._failure is not None or self._closed or self._fits(push, batches))
            self._check()
            self._pushes.append(push)
            self.next_step = step + 1
            self._changed.notify_all()

    def _of_all_ranks(self, push: Push) -> Push:
        """The push of all ranks; what each of them has written comes along. Rows that are in every rank's RAM need nothing."""
        if self.ranks.alone or (self._replicated and self._resident is not None):
            return push
        with self._changed:
            written = self._written
        if self._replicated:
            written = min(self.ranks.gather(written))
        else:
            push, written = push_of_ranks(self.ranks, push, written)
        with self._changed:
            self._of_others = written
        return push

    def state(self) -> dict[str, Any]:
        """What a checkpoint stores; the rows it refers to, those of all ranks, are durable. Call `commit` when it is saved, and
        nothing between."""
        self._settle()
        for group in self._resident.writes(self.own) if self._resident is not None else ():
            self.counts.bytes_written += self.log.write(group)
        self.log.sync()
        self._meet()
        pending = [push for push in self._pushes if push.step > self._written]
        kept = [
            {"step": p.step, "ids": torch.from_numpy(p.ids), "rows": [torch.from_numpy(r) for r in p.rows]} for p in pending
        ]
        return {"generation": self.log.generation + 1, "step": self.next_step, "floor": self._floor, "pending": kept}

    def spent(self) -> dict[str, int]:
        return replace(self.counts, bytes_logged=self.log.total).asdict()

    def commit(self) -> None:
        """From now on a crash rolls back to the state taken last; of several ranks once the first one has saved it."""
        self.ranks.barrier()
        self.log.commit()

    def overwrite(self, layer: int, ids: Ids, rows: AnyArray) -> None:
        """Write rows of a layer in place of all pushed before, as a refresh does; between steps only."""
        assert self._resident is None, "what is refreshed is not resident"
        stored = self._as_stored(rows, self.rows[layer])
        self.counts.bytes_written += self.log.write([(self.rows[layer], ids, stored)])

    def begin_refresh(self) -> None:
        """Call before `overwrite`: drops pending pushes and frees the memory of hot rows for the pass."""
        self.make_room()
        self._drop()

    def forget(self) -> None:
        """Reset all rows to zeros, as if never written, without writing; no fetched rows may be waiting."""
        self._settle()
        self._drop()
        self._floor = self.next_step

    def forget_rows(self, ids: Ids) -> None:
        """Reset the rows of nodes `ids` (int64[k], distinct); only before the first push."""
        assert not self._pushes, "pending pushes may have rows of these nodes"
        assert self._resident is None, "rows in RAM would keep theirs"
        ids = ids[(ids >= self.own[0]) & (ids < self.own[1])]
        self.log.write([(self.steps, ids, np.zeros(len(ids), np.int32))])
        self._meet()

    def _drop(self) -> None:
        with self._changed:
            assert not self._waiting.total(), "rows are fetched anew after an epoch's end"
            self._pushes.clear()
            self._written = self._of_others = self.next_step - 1 - self.lag

    def make_room(self) -> None:
        """Free the memory of hot rows between two epochs. Pushes that wait for the lag stay, within `max_bytes`."""
        self._settle()
        if self._hot is not None:
            self._chosen, self._hot = self._hot.ids, None

    def begin_epoch(self) -> None:
        """Read the hot rows where they are not in memory; call before the epoch's first fetch."""
        with self._changed:
            self._waiting.clear()  # fetched for a profile, and not pulled
        if (ids := self._chosen) is None:
            return
        hot = [np.empty((len(ids), *rows.shape[1:]), rows.dtype) for rows in self.rows]
        for rows, out in zip(self.rows, hot, strict=True):
            self.counts.bytes_read += rows.read(ids, out)
        self._hot, self._chosen = ResidentSubset(ids, hot), None

    def stamp(self, ids: Ids) -> None:
        """Record that all layers of these rows were refreshed before the next step."""
        self.counts.bytes_written += self.log.write([(self.steps, ids, np.full(len(ids), self.next_step, np.int32))])

    def end_epoch(self) -> None:
        """Drop rows fetched and not pulled. After the first epoch, choose the hot rows: those fetched most often."""
        self._settle()
        self._meet()
        with self._changed:
            self._waiting.clear()
            self._trim()
        if self._asked is not None and self._asked.any():
            asked, self._asked = self._asked, None
            ids = most_asked(asked, self._max_bytes // (sum(rows.row_bytes for rows in self.rows) + 8))
            self._chosen = ids if len(ids) else None

    def close(self) -> None:
        """Stop the writer, dropping what it has not written, and close the files; idempotent."""
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

    def _fits(self, push: Push, batches: int) -> bool:
        pending = [each for each in self._pushes if each.step > self._written]
        most = self.lag + 2 if batches == 1 else self.lag + 1  # the memory of batches has room for two of one batch
        return len(pending) < most or sum(each.nbytes for each in pending) + push.nbytes <= self._max_bytes

    def _trim(self) -> None:
        """Forget pushes that are on disk and in all rows fetched."""
        oldest = min([self._on_disk, *(version for version, count in self._waiting.items() if count)])
        while self._pushes and self._pushes[0].step <= oldest:
            del self._pushes[0]

    def _due(self) -> Push | None:
        """The next push to write: one that every later pull may see."""
        return next((push for push in self._pushes if self._written < push.step < self.next_step - self.lag), None)

    @property
    def _on_disk(self) -> int:
        """The last step whose rows are on disk, those of all ranks, as far as is known here."""
        return min(self._written, self._of_others)

    def _meet(self) -> None:
        """Wait until all ranks have written what is due."""
        self.ranks.barrier()
        with self._changed:
            self._of_others = self._written

    def _settle(self) -> None:
        self._push_late()
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
                if self.ranks.alone or self._resident is not None:
                    self._of_others = push.step
                self._trim()
                self._changed.notify_all()

    def _write(self, push: Push) -> None:
        if self._resident is not None:
            self._resident.put(push)
            return
        part = slice(*np.searchsorted(push.ids, self.own).tolist())
        ids = push.ids[part]
        stamp = (self.steps, ids, np.full(len(ids), push.step + 1, np.int32))
        layers = [(rows, ids, own[part]) for rows, own in zip(self.rows, push.rows, strict=True)]
        self.counts.bytes_written += self.log.write([*layers, stamp])
        if self._hot is not None:
            push.patch(self._hot.ids, self._hot.rows)

    @staticmethod
    def _as_stored(rows: AnyArray, to: DiskRows) -> AnyArray:
        if to.dtype == np.int8:
            codes = as_int8(rows)
            if codes is None:
                raise OocError("a hidden row holds a number that is not finite: lower `lr`, as the run diverges")
            return codes
        if to.dtype != np.float16:
            return np.ascontiguousarray(rows, to.dtype)
        half = torch.from_numpy(np.ascontiguousarray(rows)).half()  # to the same bits as numpy does, in a ninth of its time
        stored: AnyArray = half.numpy()
        if not np.isfinite(stored).all():
            raise OocError(
                "a hidden row holds a number that float16 cannot: use `history_dtype='float32'`, or lower `lr` if it diverges"
            )
        return stored


def open_history(
    path: Path, num_nodes: int, widths: Sequence[int], dtype: str, state: dict[str, Any] | None, grown: bool, **settings: Any
) -> History:
    """The histories of a run in `path`: new ones, or as they were when `state` was taken; for `settings` see `History.create`.

    If the store has grown, they are extended to `num_nodes`; the rows of new nodes were never written.
    """
    if state is None:
        return History.create(path, num_nodes, widths, dtype, **settings)

    def extend() -> None:
        for name in (*(f"layer{layer}" for layer in range(len(widths))), "steps"):
            DiskRows.extend(path / name, num_nodes)

    if grown:
        ranks_of(settings).decided(extend)
    return History.open(path, len(widths), state, **settings)
