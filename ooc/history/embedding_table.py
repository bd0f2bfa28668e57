"""An embedding table on disk, for nodes without features: rows that are trained, and the moments of their optimizer.

As `torch.nn.Embedding(sparse=True)` with `torch.optim.SparseAdam`: a step changes the rows of the batch's nodes only. A node's
row and its moments are one row of a `History` with lag 0, so they are read ahead, every step sees the steps before it, and a
checkpoint commits them together with the model. Tables that fit their share of the memory are kept in RAM, where steps change
their rows in place, and written at checkpoints only. Rows that were never written have their initial values, a function of the
seed and the node: a new table writes nothing.
"""

import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from ooc.history.history import History, open_history
from ooc.history.rows import NEVER, PrefetchedRows
from ooc.runtime.keyed_random import keyed_uniform
from ooc.stores.arrays.mutable_rows import DiskRows
from ooc.stores.arrays.rows import AnyArray, Ids
from ooc.stores.errors import StoreError
from ooc.stores.io.atomic import partial_path, publish, remove_tree
from ooc.stores.jit import kernel

BETAS, EPS = (0.9, 0.999), 1e-8
"""of SparseAdam, its defaults"""
_AT_ONCE = 2**24
"""bytes of a table that are copied at once"""
Optimizer = Literal["adam", "sgd"]


@dataclass(frozen=True)
class TableRows:
    """What a batch needs of a table, read ahead."""

    ids: Ids
    """int64[k]: the batch's nodes, each once, ascending if they have a `place`"""
    place: Ids | None
    """int64[n]: where each of the batch's nodes is in `ids`; None where these are the batch's nodes in its order"""
    rows: PrefetchedRows | AnyArray | int
    """for a step of training, or [k, width] to score by; the number of a step whose rows are in RAM already"""


@dataclass(frozen=True)
class _Pulled:
    """The rows of one batch of a step."""

    step: int
    ids: Ids
    packed: AnyArray
    """float32[n, packed width]: the rows with their moments, of the batch's nodes or of all"""
    at: Ids
    """int64[k]: where those of `ids` are in `packed`"""
    rows: Tensor
    """float32[k, width]; its gradient comes with the backward pass"""


Floats = NDArray[np.float32]


class _Placed(torch.autograd.Function):
    """rows[place], `place` a permutation, None for the order they have. The gradient is gathered too: torch adds it up row by
    row, as places may repeat."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, place: Tensor | None) -> Tensor:
        ctx.save_for_backward(place)
        return rows.detach() if place is None else rows.index_select(0, place)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (place,) = ctx.saved_tensors
        if place is None:
            return grad, None
        inverse = torch.empty_like(place)
        inverse[place] = torch.arange(len(place), device=place.device)
        return grad.index_select(0, inverse), None


@kernel
def _take_rows(packed: Floats, at: Ids, rows: Floats) -> None:
    """rows[i] = the beginning of packed[at[i]]: float32 [n, packed width], int64[k], float32 [k, width]."""
    for i in range(len(at)):
        for j in range(rows.shape[1]):
            rows[i, j] = packed[at[i], j]


@kernel
def _add_to_moments(packed: Floats, ids: Ids, gradient: Floats, square: Floats, first: float, second: float) -> None:
    """The first half of a step of SparseAdam on rows `ids` of float32 [n, 3 * width], by their gradient [k, width].

    first, second: the weights of the gradient and its square in the moments; square [k, width] receives the second one.
    """
    width = gradient.shape[1]
    for i in range(len(gradient)):
        row = packed[ids[i]]
        for j in range(width):
            found, average, other = gradient[i, j], row[width + j], row[2 * width + j]
            row[width + j] = average + (found - average) * first
            other += (found * found - other) * second
            row[2 * width + j], square[i, j] = other, other


@kernel
def _add_to_rows(packed: Floats, ids: Ids, root: Floats, step: float, eps: float) -> None:
    """The second half: root [k, width] of the second moment; step: the learning rate, corrected for the moments' bias, with a
    minus sign."""
    width = root.shape[1]
    for i in range(len(root)):
        row = packed[ids[i]]
        for j in range(width):
            row[j] += step * (row[width + j] / (root[i, j] + eps))


class EmbeddingTable:
    """Trained rows float32 [N, width]; see the module. `ahead` may run in another thread than the rest.

    >>> request = table.ahead(node)                 # ahead of the step, in the steps' order
    >>> x = table.pull(request, device)             # [n, width], differentiable
    >>> loss_of(model(x)).backward()
    >>> table.gather(); table.update(lr=0.01)
    """

    def __init__(
        self,
        history: History,
        path: Path,
        width: int,
        stream: int,
        state: Mapping[str, Any] | None,
        bound: float | None = None,
    ) -> None:
        self.history, self.width, self._path = history, width, path
        self.num_rows = history.steps.shape[0]
        bound = math.sqrt(6 / (self.num_rows + width)) if bound is None else bound
        self._stream, self._bound = np.uint64(stream), np.float32(bound)
        self.updates = 0 if state is None else int(state["updates"])
        """optimizer steps in which the table had a gradient"""
        self._next = history.next_step
        self._pulled: list[_Pulled] = []
        self._kept: DiskRows | None = None
        self.merged: Tensor | None = None
        """float32[k, width] between `gather` and `update`: the rows of the step's batches, each once, with their gradient"""

    @classmethod
    def open(
        cls,
        path: Path,
        shape: tuple[int, int],
        stream: int,
        optimizer: Optimizer,
        state: Mapping[str, Any] | None,
        *,
        grown: bool = False,
        max_bytes: int,
        engine: str = "auto",
        bound: float | None = None,
    ) -> "EmbeddingTable":
        """A new table in the directory `path`, or the one there as it was when `state` was taken.

        Args:
            path: The directory.
            shape: Numbers of rows and columns.
            stream: Key of the initial values.
            optimizer: "adam" keeps two moments for every row.
            state: What `state` returned, or None.
            grown: Whether the store has more nodes since.
            max_bytes: Limit on the rows in RAM, all of which are changed there if they fit; else on the most asked for, and on
                rows that wait to be written, each.
            engine: How rows are read.
            bound: Rows begin uniform in [-bound, bound); None: as Glorot and Bengio (2010) do.

        Raises:
            StoreError: If the disk is full, or rows are missing or damaged.
        """
        count, width = shape
        packed = table_row_bytes(width, optimizer) // 4
        if state is not None and not path.is_dir():
            raise StoreError(
                f"{path} is missing: without its embedding tables the run cannot go on; put the folder back, or start another "
                "run with another `out`"
            )
        options: dict[str, Any] = {"lag": 0, "max_bytes": max_bytes, "engine": engine, "resident": True}
        history = open_history(path, count, (packed,), "float32", None if state is None else state["rows"], grown, **options)
        return cls(history, path, width, stream, state, bound)

    @classmethod
    def trial(cls, shape: tuple[int, int], stream: int, optimizer: Optimizer) -> "EmbeddingTable":
        """A table without files, whose rows have their initial values at every step; for the arguments see `open`."""
        history: Any = _Forgotten(shape[0], table_row_bytes(shape[1], optimizer) // 4)
        return cls(history, Path(), shape[1], stream, None)

    @property
    def _adam(self) -> bool:
        return bool(self.history.rows[0].shape[1] > self.width)

    def _begun(self, packed: AnyArray, ids: Ids, steps: Ids) -> AnyArray:
        """Packed rows as read, with the initial values of those that were never written."""
        if (new := steps == NEVER).any():
            first = np.empty((int(new.sum()), self.width), np.float32)
            keyed_uniform(self._stream, ids[new], self._bound, first)
            packed[new, : self.width] = first
        return packed

    def ahead(self, node: Ids) -> TableRows:
        """Read the rows of a batch's nodes (int64[n]) for the next step of training; call for every batch in order."""
        ids, place = np.unique(node, return_inverse=True)
        step, self._next = self._next, self._next + 1
        if self.history.in_place is None:
            return TableRows(ids, place, self.history.fetch(step, ids))
        return TableRows(node, None, step) if len(ids) == len(node) else TableRows(ids, place, step)

    def look_up(self, node: Ids) -> TableRows:
        """Read the rows of nodes (int64[n]) as they are between two steps, or the kept ones (`use`)."""
        ids, place = np.unique(node, return_inverse=True)
        return TableRows(ids, place, self.rows(ids))

    def rows(self, ids: Ids) -> AnyArray:
        """The rows float32 [k, width] of nodes `ids` (int64[k], ascending), between two steps; or the kept ones (`use`)."""
        if self._kept is not None:
            out = np.empty((len(ids), self.width), np.float32)
            self._kept.read(ids, out)
            return out
        (packed,), steps = self.history.read(ids)
        return self._begun(packed, ids, steps)[:, : self.width]

    def pull(self, request: TableRows, device: torch.device) -> Tensor:
        """The rows [n, width] of a batch's nodes, differentiable in training; once for each request, in the steps' order."""
        place = None if request.place is None else torch.from_numpy(request.place).to(device)
        if isinstance(request.rows, np.ndarray):
            assert place is not None, "rows to score by are ascending"
            return torch.from_numpy(np.ascontiguousarray(request.rows)).to(device).index_select(0, place)
        step = request.rows if isinstance(request.rows, int) else request.rows.step
        packed, at = self._packed(request)
        rows = self._rows_of(packed, at).to(device).requires_grad_()
        self._pulled.append(_Pulled(step, request.ids, packed, at, rows))
        if place is not None and len(request.ids) < len(place):
            return rows.index_select(0, place)
        placed: Tensor = _Placed.apply(rows, place)  # type: ignore[no-untyped-call]
        return placed

    def _packed(self, request: TableRows) -> tuple[AnyArray, Ids]:
        """Rows with their moments, of the request's nodes or of all, and where its nodes' are: int64[k]."""
        if isinstance(request.rows, PrefetchedRows):
            (packed,) = self.history.pull(request.rows)
            return self._begun(packed, request.ids, request.rows.steps), np.arange(len(request.ids))
        assert isinstance(request.rows, int)
        (packed,), steps = self.history.pull_in_place(request.rows, request.ids)
        new = request.ids[steps == NEVER]
        if len(new):
            first = np.empty((len(new), self.width), np.float32)
            keyed_uniform(self._stream, new, self._bound, first)
            packed[new, : self.width] = first
        return packed, request.ids

    def _rows_of(self, packed: AnyArray, at: Ids) -> Tensor:
        """The rows float32 [k, width] without their moments: a copy."""
        rows = torch.empty(len(at), self.width)
        _take_rows(packed, at, rows.numpy())
        return rows

    def gather(self) -> None:
        """Add up the gradients of the batches pulled since the last step, into `merged`. None of them: it stays None."""
        found = [each for each in self._pulled if each.rows.grad is not None]
        if not found:
            return
        if len(found) == 1:
            self.merged = found[0].rows
            return
        ids, in_ram = np.unique(np.concatenate([each.ids for each in found])), self.history.in_place is not None
        packed = found[0].packed if in_ram else np.empty((len(ids), found[0].packed.shape[1]), np.float32)
        gradient = torch.zeros(len(ids), self.width, device=found[0].rows.device)
        for each in found:
            at = np.searchsorted(ids, each.ids)
            if not in_ram:
                packed[at] = each.packed
            own: Any = each.rows.grad
            gradient.index_add_(0, torch.from_numpy(at).to(gradient.device), own)
        at = ids if in_ram else np.arange(len(ids))
        rows = self._rows_of(packed, at).to(gradient.device)
        rows.grad = gradient
        self._pulled[-1] = _Pulled(self._pulled[-1].step, ids, packed, at, rows)
        self.merged = rows

    def update(self, lr: float) -> None:
        """Make an optimizer step with `merged`, and store its rows; one of Adam to the bits of `torch.optim.SparseAdam`."""
        pulled, self._pulled, merged, self.merged = self._pulled, [], self.merged, None
        none = np.empty(0, np.int64)
        last = next((each for each in pulled if each.rows is merged), None)
        if last is not None:
            self.updates += 1
            gradient: Any = last.rows.grad
            self._step(last, gradient.cpu(), lr)
        for each in pulled:
            ids = none if last is None or each is not pulled[-1] else last.ids
            if self.history.in_place is None:
                packed = each.packed[:0] if last is None or each is not pulled[-1] else last.packed
                self.history.push(each.step, ids, [packed])
            else:
                self.history.changed_in_place(each.step, ids)

    @torch.no_grad()
    def _step(self, last: _Pulled, gradient: Tensor, lr: float) -> None:
        """Change the packed rows of a step by their gradient [k, width]."""
        if not self._adam:
            last.packed[last.at] = torch.from_numpy(last.packed[last.at]).add_(gradient, alpha=-lr).numpy()
            return
        square = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        weights: Any = map(np.float32, (1 - BETAS[0], 1 - BETAS[1]))
        _add_to_moments(last.packed, last.at, gradient.contiguous().numpy(), square.numpy(), *weights)
        first, second = (1 - beta**self.updates for beta in BETAS)
        numbers: Any = map(np.float32, (-(lr * math.sqrt(second) / first), EPS))
        _add_to_rows(last.packed, last.at, square.sqrt_().numpy(), *numbers)  # torch's root, which need not be IEEE's

    def end_pass(self) -> None:
        """Discard rows read ahead, after an epoch or one that was interrupted."""
        self._pulled = []
        self.history.end_epoch()
        self.history.begin_epoch()
        self._next = self.history.next_step

    def state(self) -> dict[str, Any]:
        """What a checkpoint stores; see `History.state`."""
        return {"rows": self.history.state(), "updates": self.updates}

    def keep(self, name: str) -> None:
        """Copy the rows as they are to a file of that name, durably; `use` reads them again."""
        path = self._path / name
        partial = partial_path(path)
        for each in (path, partial):
            remove_tree(each)
        piece = max(1, _AT_ONCE // self.history.rows[0].row_bytes)
        with closing(DiskRows.create(partial, (self.num_rows, self.width), "float32")) as kept:
            for ids in self._pieces(piece):
                kept.write(ids, self.rows(ids))
        publish(partial, path)

    def use(self, name: str) -> None:
        """From now on `rows` and `look_up` give the rows that were kept under that name. Raises StoreError without them."""
        if self._kept is not None:
            self._kept.close()
        self._kept = DiskRows.open(self._path / name)

    def end(self, name: str, kept: str | None) -> None:
        """Have the rows that were kept under the name `kept`, or those as they are, under a further one, unless it exists."""
        path = self._path / name
        if path.exists():
            return
        if kept is None:
            self.keep(name)
            return
        partial = partial_path(path)
        remove_tree(partial)
        shutil.copytree(self._path / kept, partial, copy_function=_linked)  # kept rows do not change
        publish(partial, path)

    def drop_kept(self, but: str) -> None:
        """Remove the rows that were kept under other names of the same kind: "best-3" stays, and "best-1" goes."""
        for path in self._path.glob(f"{but.partition('-')[0]}-*"):
            if path.name != but:
                remove_tree(path)

    def _pieces(self, size: int) -> Iterator[Ids]:
        return (np.arange(first, min(first + size, self.num_rows)) for first in range(0, self.num_rows, size))

    def close(self) -> None:
        """Close the files; idempotent."""
        self.history.close()
        if self._kept is not None:
            self._kept.close()


class _Forgotten:
    """What an `EmbeddingTable` uses of a `History`, of rows that were never written and are forgotten when they are pushed."""

    def __init__(self, num_rows: int, width: int) -> None:
        self.rows = [np.broadcast_to(np.float32(0), (num_rows, width))]
        self.steps = np.broadcast_to(np.int32(0), (num_rows,))
        self.next_step = 0
        self.in_place = None

    def read(self, ids: Ids) -> tuple[tuple[AnyArray, ...], Ids]:
        return (np.zeros((len(ids), self.rows[0].shape[1]), np.float32),), np.full(len(ids), NEVER)

    def fetch(self, step: int, ids: Ids) -> PrefetchedRows:
        rows, steps = self.read(ids)
        return PrefetchedRows(step, step - 1, ids, rows, steps)

    def pull(self, fetched: PrefetchedRows) -> tuple[AnyArray, ...]:
        return fetched.rows

    def push(self, step: int, ids: Ids, rows: Sequence[AnyArray]) -> None:
        self.next_step = step + 1


def table_row_bytes(width: int, optimizer: str) -> int:
    """Bytes that a table stores of a row float32 [width]: the row and, of Adam, its two moments."""
    return 4 * width * (1 if optimizer_kind(optimizer) == "sgd" else 3)


def optimizer_kind(optimizer: str) -> Optimizer:
    """What a table is trained by in a run with that optimizer: embedding tables have no weight decay."""
    return "sgd" if optimizer == "sgd" else "adam"


def _linked(source: str, target: str) -> None:
    """Give a file another name; a copy of it where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
