"""The embedding tables of a run, by node type: opened, trained and kept together, and the memory that they take."""

from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from torch import Tensor

from ooc.history.embedding_table import EmbeddingTable, optimizer_kind, table_row_bytes
from ooc.history.rows import STEP_BYTES
from ooc.runtime.keyed_random import Purpose, key
from ooc.stores.arrays.mutable_rows import DiskRows
from ooc.stores.errors import StoreError

FOLDER = "tables"


class EmbeddingTables:
    """The embedding tables of a run, by node type; none in a run whose nodes all have features.

    >>> tables = EmbeddingTables.open(Path("run/tables"), {"author": (1000, 64)}, seed=0, optimizer="adam", max_bytes=2**28)
    >>> tables.ahead(batch)    # for each batch in order, ahead of training; `look_up` for one to score by
    >>> tables.pull(batch)     # at the batch's turn: batch["author"].x
    >>> tables.gather(); tables.update(lr=0.01)
    """

    def __init__(self, tables: Mapping[str, EmbeddingTable] | None = None) -> None:
        self.tables = dict(tables or {})

    @classmethod
    def open(
        cls,
        folder: Path,
        shapes: Mapping[str, tuple[int, int]],
        *,
        seed: int,
        optimizer: str,
        max_bytes: int,
        state: Mapping[str, Any] | None = None,
        grown: bool = False,
        engine: str = "auto",
        bound: float | None = None,
    ) -> "EmbeddingTables":
        """New tables in `folder`, or those there as they were when `state` was taken; see `EmbeddingTable.open`.

        Args:
            folder: A directory with one for each table.
            shapes: Node type -> numbers of rows and columns.
            seed: Of the initial values.
            optimizer: "adam", "adamw" or "sgd"; embedding tables have no weight decay.
            max_bytes: Limit for all tables together; see `EmbeddingTable.open`.
            state, grown, engine, bound: As of `EmbeddingTable.open`.
        """
        options: dict[str, Any] = {"grown": grown, "engine": engine, "bound": bound}
        found: dict[str, EmbeddingTable] = {}
        with ExitStack() as refused:
            rooms = shares_of_tables(shapes, max_bytes)
            for number, (name, shape) in enumerate(shapes.items()):
                stream, own = key(seed, Purpose.TABLE, number), None if state is None else state[name]
                path, kind = _folder_of(folder, number, name), optimizer_kind(optimizer)
                made = EmbeddingTable.open(path, shape, stream, kind, own, max_bytes=rooms[name], **options)
                found[name] = refused.enter_context(closing(made))
            refused.pop_all()
        return cls(found)

    @classmethod
    def trial(cls, shapes: Mapping[str, tuple[int, int]], seed: int, optimizer: str) -> "EmbeddingTables":
        """Tables without files, to measure steps by: rows have their initial values at every step. See `open`."""
        kind = optimizer_kind(optimizer)
        return cls(
            {
                name: EmbeddingTable.trial(shape, key(seed, Purpose.TABLE, number), kind)
                for number, (name, shape) in enumerate(shapes.items())
            }
        )

    def __bool__(self) -> bool:
        return bool(self.tables)

    def ahead(self, item: tuple[int, Any]) -> tuple[int, Any]:
        """Read a batch's rows for a step of training; a stage of a loader's pipeline."""
        return self._requested(item, {name: table.ahead for name, table in self.tables.items()})

    def look_up(self, item: tuple[int, Any]) -> tuple[int, Any]:
        """The same for a batch to score by."""
        return self._requested(item, {name: table.look_up for name, table in self.tables.items()})

    @staticmethod
    def _requested(item: tuple[int, Any], read: Mapping[str, Any]) -> tuple[int, Any]:
        batch = item[1]
        batch.table_rows = {name: each(batch[name].n_id.numpy()) for name, each in read.items()}
        return item

    def pull(self, batch: Any) -> None:
        """Give the batch the rows of its nodes without features, as `batch[node_type].x`."""
        for name, table in self.tables.items():
            batch[name].x = table.pull(batch.table_rows[name], batch[name].n_id.device)

    def gather(self) -> None:
        """See `EmbeddingTable.gather`."""
        for table in self.tables.values():
            table.gather()

    @property
    def gathered(self) -> list[Tensor]:
        """The rows of the step's batches, with their gradients."""
        return [table.merged for table in self.tables.values() if table.merged is not None]

    def update(self, lr: float) -> None:
        for table in self.tables.values():
            table.update(lr)

    def end_pass(self) -> None:
        for table in self.tables.values():
            table.end_pass()

    def state(self) -> dict[str, Any]:
        return {name: table.state() for name, table in self.tables.items()}

    def spent(self) -> dict[str, int]:
        """What was read and written; none without tables. See `History.spent`."""
        each = [table.history.spent() for table in self.tables.values()]
        return {name: sum(spent[name] for spent in each) for name in (each[0] if each else ())}

    def commit(self, best_epoch: int | None) -> None:
        """The checkpoint is saved; `best_epoch` is the one whose rows it refers to."""
        for table in self.tables.values():
            table.history.commit()
            table.drop_kept(_best(best_epoch))

    def keep_best(self, epoch: int) -> None:
        """Copy the rows as they are after `epoch`, the best so far."""
        for table in self.tables.values():
            table.keep(_best(epoch))

    def keep_ended(self, best_epoch: int | None, total_steps: int) -> str:
        """Keep the rows of the model that a run ends with: those of its best epoch or, without one, as they are now.

        Returns:
            The name that `kept_rows` takes.
        """
        name = _ended(total_steps)
        for table in self.tables.values():
            table.end(name, None if best_epoch is None else _best(best_epoch))
        return name

    def drop_ended(self, total_steps: int) -> None:
        """The model that a run ended with after so many steps is saved; those of earlier ends are not needed any more."""
        for table in self.tables.values():
            table.drop_kept(_ended(total_steps))

    def use_best(self, epoch: int) -> None:
        """Score by the rows of `epoch`."""
        for table in self.tables.values():
            table.use(_best(epoch))

    def close(self) -> None:
        """Close the files; idempotent."""
        with ExitStack() as closed:
            for table in self.tables.values():
                closed.callback(table.close)


def kept_rows(folder: Path, shapes: Mapping[str, tuple[int, int]], kept: int | str) -> dict[str, DiskRows]:
    """Open the rows that `EmbeddingTables.keep_best` kept of an epoch, or `keep_ended` of the end, by node type; the caller
    closes them.

    Args:
        folder, shapes: As of `EmbeddingTables.open`.
        kept: The epoch, or the name that `keep_ended` returned.

    Raises:
        StoreError: If there are none, they are damaged, or have another shape.

    >>> kept_rows(Path("run/tables"), {"author": (1000, 64)}, 3)["author"].shape
    (1000, 64)
    """
    found: dict[str, DiskRows] = {}
    with ExitStack() as refused:
        for number, (name, shape) in enumerate(shapes.items()):
            path = _folder_of(folder, number, name) / (kept if isinstance(kept, str) else _best(kept))
            found[name] = refused.enter_context(closing(DiskRows.open(path)))
            if found[name].shape != shape:
                raise StoreError(f"{path} has rows of shape {found[name].shape}, not {shape}: it is not of this run's store")
        refused.pop_all()
    return found


def shares_of_tables(shapes: Mapping[str, tuple[int, int]], max_bytes: int) -> dict[str, int]:
    """The bytes of each table of what all have together: in proportion to their sizes, so that all are in RAM if they fit.

    >>> shares_of_tables({"author": (3000, 64), "venue": (1000, 64)}, 4000)
    {'author': 3000, 'venue': 1000}
    """
    sizes = {name: bytes_in_ram({name: shape}, "adam") for name, shape in shapes.items()}
    return {name: max_bytes * size // max(1, sum(sizes.values())) for name, size in sizes.items()}


def _folder_of(folder: Path, number: int, name: str) -> Path:
    return folder / f"{number}-{name}"


def bytes_per_node(
    shapes: Mapping[str, tuple[int, int]], optimizer: str, accumulate: int = 1, max_bytes: int = 0
) -> dict[str, int]:
    """Bytes of memory that a batch takes of the tables for each of its nodes, by node type.

    They are the rows that the model has of each batch of an optimizer step, and their gradients; and unless the table is in
    RAM, the packed rows as read ahead, being stored, and of each of these batches.

    Args:
        shapes, optimizer: As of `EmbeddingTables.open`.
        accumulate: Batches of an optimizer step.
        max_bytes: As of `EmbeddingTables.open`.

    >>> bytes_per_node({"author": (1000, 64)}, "adam"), bytes_per_node({"author": (1000, 64)}, "adam", max_bytes=10**6)
    ({'author': 3328}, {'author': 1024})
    """
    rooms, found = shares_of_tables(shapes, max_bytes), {}
    for name, (count, width) in shapes.items():
        in_ram = bytes_in_ram({name: (count, width)}, optimizer) <= rooms[name]
        packed = 0 if in_ram else (2 + accumulate) * table_row_bytes(width, optimizer)
        found[name] = packed + (2 + 2 * accumulate) * 4 * width
    return found


def bytes_in_ram(shapes: Mapping[str, tuple[int, int]], optimizer: str) -> int:
    """The bytes of tables in RAM, with the step that wrote each row; shapes, optimizer: as of `EmbeddingTables.open`.

    >>> bytes_in_ram({"author": (1000, 64)}, "adam")
    773000
    """
    return sum(count * (table_row_bytes(width, optimizer) + STEP_BYTES) for count, width in shapes.values())


def _best(epoch: int | None) -> str:
    return f"best-{epoch}"


def _ended(total_steps: int) -> str:
    return f"ended-{total_steps}"
