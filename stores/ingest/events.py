"""The steps of an ingest with edge times: stores the edges also as events in time order.

An event's number, its rank by (time, position in the input), is its edge id. So a slot of the CSC leads to the event's time,
ends and features, a time window is one range of every array, and the canonical order (destination, edge id) is (destination,
time, position). If the input is already in time order, as logs are, the number is the position and nothing is sorted.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.lib.format import open_memmap
from numpy.typing import DTypeLike, NDArray

from ooc.stores import array_names as names
from ooc.stores.arrays.zarr_write import Appender
from ooc.stores.errors import InputError
from ooc.stores.graph import index_dtype
from ooc.stores.ingest import edges as csc
from ooc.stores.ingest.arrange import Arranging, MakeSink, Sink
from ooc.stores.ingest.duck import Duck, Progress
from ooc.stores.ingest.ids import EdgeColumns
from ooc.stores.ingest.renumber import ARRANGE_SHARE
from ooc.stores.ingest.shards import Shard
from ooc.stores.ingest.spec import IngestSpec
from ooc.stores.ingest.steps import Steps
from ooc.stores.manifest import Time

INPUT = "input"
"""the array of events' input positions, if those are not their numbers"""


class Events:
    """One ingest's events. Each method is a resumable step or two; call `relation` first."""

    def __init__(
        self,
        spec: IngestSpec,
        steps: Steps,
        duck: Duck,
        progress: Progress,
        columns: EdgeColumns,
        num_nodes: int,
        part: Shard,
    ) -> None:
        self.spec, self.steps, self.duck, self.progress = spec, steps, duck, progress
        self.store, self.stage = steps.store, steps.stage
        self.columns, self.num_nodes, self.part = columns, num_nodes, part
        self._staged = self.stage / "events.parquet"
        self._position, self._number = self.stage / "position.npy", self.stage / "number.npy"
        self.count = 0
        self.sorted = False
        self._placed: MakeSink | None = None

    def relation(self, relation: str, given: int, left: int, in_order: bool) -> str:
        """Steps order and events: SQL of the edges of `relation` (src, dst, edge_id, weight, time) with event numbers as edge
        ids.

        `given` are the edges of the input, `left` those in `relation`; `in_order` says whether it is in input order.
        """
        ascending = bool(self.steps.run("time order", self._look)["ascending"])
        self.sorted = ascending and left == given
        if self.part.count > 1 and not self.sorted:
            what = "times decrease" if not ascending else "edges were dropped"
            raise InputError(
                f"{self.columns.table.shown}: {what}, so events are numbered by the whole input, of which `shard` has a part: "
                "sort the table by time without such edges, or leave out `shard`"
            )
        straight = ascending and in_order
        outputs = [self.store / names.EVENTS, self.store / names.CHECKSUMS / names.EVENTS, self._staged]
        self.steps.run("events", lambda: self._write(relation, left, straight), outputs)
        self.count = left
        return relation if self.sorted else csc.parquet_relation(self._staged)  # a position in time order is the number

    def _look(self) -> dict[str, Any]:
        """{ascending}: whether the input's times never decrease."""
        time, table = self.columns.time, self.columns.table
        assert time is not None
        before, ascending = None, True
        for batch in self.duck.stream(f"SELECT {time.sql(table)} AS time FROM {table.relation()}"):
            found = batch.column(0).to_numpy()
            if not len(found):
                continue
            if (before is not None and found[0] < before) or bool((found[1:] < found[:-1]).any()):
                ascending = False
                break
            before = found[-1]
        return {"ascending": ascending}

    def _write(self, relation: str, left: int, straight: bool) -> dict[str, Any]:
        rest = self.columns.rest
        query = f"SELECT {', '.join(['src', 'dst', 'edge_id', *rest])} FROM ({self.part.where(relation, 'edge_id', left)})"
        if not straight:
            query += " ORDER BY time, edge_id"
        index = index_dtype(self.num_nodes)
        kinds: dict[str, np.dtype[Any]] = {"src": index, "dst": index, **rest}
        if not self.sorted:
            kinds[INPUT] = np.dtype(np.int64)
        done = 0
        with _Arrays(self.store, kinds) as arrays, ExitStack() as files:
            staged = None if self.sorted else files.enter_context(_Staged(self._staged, kinds))
            for batch in self.duck.stream(query, ordered=straight):
                found = {name: batch.column(name).to_numpy() for name in batch.schema.names}
                found[INPUT] = found["edge_id"]
                held = {name: found[name].astype(kind, copy=False) for name, kind in kinds.items()}
                arrays.append(held)
                if staged is not None:
                    staged.append(held, done)
                done += batch.num_rows
                self.progress("order events", done, len(self.part.range(left)))
        return {"events": done}

    def sink(self) -> MakeSink:
        """Return the sink for an array with one row per input edge, which writes one row per event."""
        if self.sorted:
            return Appender
        if self._placed is None:  # run the step once: a second run would look like a killed ingest's
            self.steps.run("event places", self._write_places, [self._position, self._number])
            position, number = (np.load(path, mmap_mode="r") for path in (self._position, self._number))
            arranging = Arranging(number, self.stage / "arranged", self.spec.memory_bytes // ARRANGE_SHARE)
            self._placed = partial(_placed, arranging, position)
        return self._placed

    def _write_places(self) -> dict[str, Any]:
        """position.npy, number.npy: int64[events], each event's input position, ascending, and its number."""
        paths = self._position, self._number
        files = [open_memmap(path, "w+", np.int64, (self.count,)) for path in paths]
        done = 0
        query = f'SELECT "{INPUT}", edge_id FROM ({csc.parquet_relation(self._staged)}) ORDER BY "{INPUT}"'
        for batch in self.duck.stream(query, ordered=False):
            for file, column in zip(files, batch.columns, strict=True):
                file[done : done + batch.num_rows] = column.to_numpy()
            done += batch.num_rows
            self.progress("place events", done, self.count)
        for file in files:
            file.flush()
        return {}

    def described(self) -> Time:
        """The manifest's entry."""
        time = self.columns.time
        assert time is not None
        dtype: Any = time.dtype.name
        return Time(events=self.count, dtype=dtype, unit=time.unit, sorted=self.sorted)


class _Staged:
    """A Parquet file of the events by number; a context manager, like its writer."""

    def __init__(self, path: Path, kinds: Mapping[str, np.dtype[Any]]) -> None:
        numbered = {**kinds, "edge_id": np.dtype(np.int64)}
        self._schema = pa.schema([(name, pa.from_numpy_dtype(kind)) for name, kind in numbered.items()])
        self._writer = pq.ParquetWriter(path, self._schema, use_dictionary=False)

    def append(self, columns: Mapping[str, NDArray[Any]], first: int) -> None:
        """Append events first, first + 1, ..."""
        number = np.arange(first, first + len(columns["src"]))
        self._writer.write_table(pa.table({**columns, "edge_id": number}, schema=self._schema))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._writer.close()


class _Arrays:
    """The events' arrays, appended together; a context manager that completes all, or none after an exception."""

    def __init__(self, store: Path, kinds: Mapping[str, DTypeLike]) -> None:
        self._open = ExitStack()
        self._arrays = {
            name: self._open.enter_context(Appender(store, names.event_array(name), (), kind)) for name, kind in kinds.items()
        }

    def append(self, columns: Mapping[str, NDArray[Any]]) -> None:
        for name, array in self._arrays.items():
            array.append(columns[name])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._open.__exit__(kind, error, trace)


def _placed(
    arranging: Arranging,
    position: NDArray[np.int64],
    group_path: Path,
    name: str,
    row_shape: tuple[int, ...],
    dtype: DTypeLike,
    attributes: Mapping[str, Any] | None = None,
    *,
    count: int,
) -> Sink:
    """A sink for rows in input order; `position` (int64[events], ascending) are those that became events."""
    inner = arranging.sink(group_path, name, row_shape, dtype, attributes, count=len(position))
    return inner if len(position) == count else _Kept(inner, position)


class _Kept:
    """Passes on the rows at `position` (int64[k], ascending) of all rows appended."""

    def __init__(self, inner: Sink, position: NDArray[np.int64]) -> None:
        self._inner, self._position = inner, position
        self._rows = self._done = 0

    def append(self, rows: NDArray[Any]) -> None:
        """Append the next rows [b, *row_shape]."""
        wanted = np.asarray(self._position[self._done : self._done + len(rows)]) - self._rows  # at most one per row
        wanted = wanted[wanted < len(rows)]
        self._inner.append(rows[wanted])
        self._rows += len(rows)
        self._done += len(wanted)

    def __enter__(self) -> Self:
        self._inner.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._inner.__exit__(kind, error, trace)
