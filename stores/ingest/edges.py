"""Edges to CSC: they are sorted by (destination, edge id), and the sorted stream is appended to the store.

If both fit 63 bits, they are one key, dst << bits | edge_id, with the source (4 bytes while N < 2**31) beside it, and are
distributed by ranges of keys (`key_sort`); otherwise, and where slots are in order of time, DuckDB sorts. Memory depends
neither on edges nor nodes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import DTypeLike, NDArray

from ooc.stores.array_names import HOMOGENEOUS, EdgeKey, graph_array
from ooc.stores.arrays.zarr_write import Appender
from ooc.stores.errors import InputError
from ooc.stores.graph import index_dtype
from ooc.stores.ingest import duck as sql
from ooc.stores.ingest.duck import Duck, Progress
from ooc.stores.ingest.key_sort import Batch, sorted_by_key

NODE_ROWS = 1 << 20
"""entries of indptr or weight_sum computed at a time"""
Ints = NDArray[np.int64]
Check = Callable[[Ints, NDArray[Any], Ints], None]
"""takes (destinations, sources, edge ids) of some slots; raises for what must not be"""
Where = Callable[[int], str]
"""file and row of an edge's position in the input"""


def pack_bits(num_nodes: int, num_edges: int) -> int | None:
    """Return the low bits of a 63-bit key for the edge id, below the destination; None if both do not fit. Pure.

    >>> pack_bits(8_000_000, 100_000_000), pack_bits(2**40, 2**40)
    (27, None)
    """
    bits = (num_edges - 1).bit_length()
    return bits if (num_nodes - 1).bit_length() + bits <= 63 else None


def directed(relation: str, undirected: bool, drop_self_loops: bool, rest: Sequence[str]) -> str:
    """SQL of the slots of `relation` (src, dst, edge_id, and the columns `rest`): both directions, self-loops once."""
    columns = ", ".join(["edge_id", *rest])
    if drop_self_loops:
        relation = f"SELECT * FROM ({relation}) WHERE src <> dst"
    forth = f"SELECT src, dst, {columns} FROM ({relation})"
    if not undirected:
        return forth
    return f"{forth} UNION ALL SELECT dst, src, {columns} FROM ({relation}) WHERE src <> dst"


def drop_duplicates(duck: Duck, slots: str, total: int, path: Path, progress: Progress) -> tuple[int, int]:
    """Write the first slot of each (source, destination) to the Parquet file `path`; returns the slots before and after.

    Sorts and compares neighbors in bounded memory, unlike grouping in a hash table.
    """
    before, left, done = (-1, -1), 0, 0
    with ExitStack() as files:
        writer: pq.ParquetWriter | None = None
        for batch in duck.stream(f"SELECT * FROM ({slots}) ORDER BY dst, src, edge_id", ordered=False):
            src, dst = (batch.column(key).to_numpy() for key in ("src", "dst"))
            new = np.empty(len(src), bool)
            new[0] = (int(src[0]), int(dst[0])) != before
            new[1:] = (src[1:] != src[:-1]) | (dst[1:] != dst[:-1])
            before = int(src[-1]), int(dst[-1])
            writer = writer or files.enter_context(pq.ParquetWriter(path, batch.schema, use_dictionary=False))
            writer.write_table(pa.Table.from_batches([batch.filter(pa.array(new))]))
            left, done = left + int(new.sum()), done + len(src)
            progress("drop duplicates", done, total)
    return done, left


def sorted_slots(
    duck: Duck,
    slots: str,
    num_nodes: int,
    num_edges: int,
    num_slots: int,
    rest: Mapping[str, DTypeLike],
    sources: int | None = None,
    by_time: bool = False,
    part: range | None = None,
) -> Iterator[tuple[Ints, NDArray[Any], Ints, dict[str, NDArray[Any]]]]:
    """Yield (dst int64, src int32|int64, edge_id int64, the columns `rest` by name) in canonical order, in batches.

    `num_slots` is about how many there are; `sources` is the number of sources of a bipartite graph; `by_time` sorts by the
    column `time` before the edge id, which is its rank by time otherwise; `part` has all destinations, if not all nodes may be
    one. Raises InputError for an end that is no node.
    """
    part = range(num_nodes) if part is None else part
    sources = num_nodes if sources is None else sources
    index = index_dtype(sources)
    payload = ", ".join([f"src::{'INTEGER' if index.itemsize == 4 else 'BIGINT'} AS src", *rest])
    bits = None if by_time else pack_bits(len(part), num_edges)
    if bits is None:
        order = "dst, time, edge_id" if by_time else "dst, edge_id"
        sql_of = f"SELECT dst::BIGINT AS dst, edge_id, {payload} FROM ({slots}) ORDER BY {order}"
        for column in _columns(duck.stream(sql_of, ordered=False)):
            _check_ends(column["dst"], column["src"], num_nodes, sources)
            yield column["dst"], column["src"], column["edge_id"], {name: column[name] for name in rest}
        return
    behind = f"(dst::BIGINT - {part.start})" if part.start else "dst::BIGINT"
    sql_of = f"SELECT {behind} * {1 << bits} + edge_id AS key, {payload} FROM ({slots})"
    keyed = _keyed(_columns(duck.stream(sql_of)), bits, len(part), sources)
    of_keys = {"bits": max(0, len(part) - 1).bit_length() + bits, "low_bits": bits}
    columns = {"src": index, **rest}
    for key, of_slots in sorted_by_key(keyed, columns, num_slots, **of_keys, room=duck.room, spill=duck.scratch("slots")):
        yield (key >> bits) + part.start, of_slots["src"], key & ((1 << bits) - 1), {name: of_slots[name] for name in rest}


def slots_in_order(
    duck: Duck,
    slots: str,
    num_nodes: int,
    rest: Mapping[str, DTypeLike],
    sources: int | None = None,
    by_time: bool = False,
    *,
    where: Where,
) -> Iterator[tuple[Ints, NDArray[Any], Ints, dict[str, NDArray[Any]]]]:
    """Yield the same of slots that come in canonical order, without sorting them; edge ids are positions in the input.

    Raises InputError, naming the row by `where(edge id)`, for the first that is out of order, and for an end that is no node.
    """
    sources = num_nodes if sources is None else sources
    width = "INTEGER" if index_dtype(sources).itemsize == 4 else "BIGINT"
    columns = ", ".join(["dst::BIGINT AS dst", f"src::{width} AS src", "edge_id", *rest])
    last: dict[str, NDArray[Any]] = {}
    for found in _columns(duck.stream(f"SELECT {columns} FROM ({slots})")):
        if not len(found["dst"]):
            continue
        _check_ends(found["dst"], found["src"], num_nodes, sources)
        keys = [
            np.concatenate([last.get(name, found[name][:1]), found[name]])
            for name in (("dst", "time") if by_time else ("dst",))
        ]
        wrong = _descends(keys)
        if wrong >= 0:
            shown = "(destination, time)" if by_time else "destination"
            before, after = (", ".join(str(key[at]) for key in keys) for at in (wrong, wrong + 1))
            raise InputError(
                f"{where(int(found['edge_id'][wrong]))}: {shown} {after} stands behind {before}: sort the edges by it (files "
                "are read in the order of their names), or leave out `sorted`"
            )
        last = {name: found[name][-1:] for name in found}
        yield found["dst"], found["src"], found["edge_id"], {name: found[name] for name in rest}


def _descends(keys: Sequence[NDArray[Any]]) -> int:
    """The first i with keys[i + 1] < keys[i], compared by the first key, then by the next ones; -1 if there is none."""
    less, equal = np.zeros(len(keys[0]) - 1, bool), np.ones(len(keys[0]) - 1, bool)
    for key in keys:
        less |= equal & (key[1:] < key[:-1])
        equal &= key[1:] == key[:-1]
    return int(np.argmax(less)) if less.any() else -1


def _keyed(columns: Iterator[dict[str, NDArray[Any]]], bits: int, num_nodes: int, sources: int) -> Iterator[Batch]:
    for column in columns:
        key = column.pop("key")
        _check_ends(key >> bits, column["src"], num_nodes, sources)
        yield key, column


def _check_ends(dst: Ints, src: NDArray[Any], num_nodes: int, sources: int) -> None:
    """Raise InputError for ends that are no nodes: they were when edges were read the first time, so the edges have changed."""
    for end, nodes in ((dst, num_nodes), (src, sources)):
        if len(end) and not (end.min() >= 0 and end.max() < nodes):
            wrong = int(end[(end < 0) | (end >= nodes)][0])
            raise InputError(
                f"an edge ends at node {wrong} of {nodes} (0..{nodes - 1}), but did not when edges were read the first time: "
                "give the same edges each time they are read"
            )


def _columns(batches: Iterator[pa.RecordBatch]) -> Iterator[dict[str, NDArray[Any]]]:
    return ({name: batch.column(name).to_numpy() for name in batch.schema.names} for batch in batches)


class CscWriter:
    """Appends slots in canonical order to a store's graph arrays, and derives indptr, weight sums and self-loops.

    Call `add` with batches of non-decreasing destinations. As a context manager, it completes every array on success; after an
    exception it completes none and closes their files.

    Args:
        store: The group.
        num_nodes: Number of nodes, of a bipartite graph that of destinations.
        rest: Names and dtypes of further slot columns; `weight` is also summed.
        key: The edge type.
        sources: Number of sources of a bipartite graph, which has no self-loops.
        edge_ids: Whether the store has the column `edge_id`.
        part: Destinations that are written, all nodes by default; entries of indptr count from its first.

    >>> with CscWriter(store, num_nodes=3, rest={}) as writer:
    ...     writer.add(dst, src, edge_id, {})  # int64[b], int32[b], int64[b]
    """

    def __init__(
        self,
        store: Path,
        num_nodes: int,
        rest: Mapping[str, DTypeLike],
        key: EdgeKey = HOMOGENEOUS,
        sources: int | None = None,
        edge_ids: bool = True,
        part: range | None = None,
    ) -> None:
        self._part = range(num_nodes) if part is None else part
        self.slots = 0
        self.loops = 0
        self._arrays = ExitStack()
        append = partial(self._appender, store, key)
        self._indices = append("indices", index_dtype(num_nodes if sources is None else sources))
        self._edge_id = append("edge_id", np.int64) if edge_ids else None
        self._indptr = append("indptr", np.int64, len(self._part) + 1)
        self._self_loops = append("self_loops", np.int64) if sources is None else None
        self._rest = {name: append(name, dtype) for name, dtype in rest.items()}
        weighted = "weight" in rest
        self._sums = append("weight_sum", np.float32, len(self._part)) if weighted else None
        self._loop_weight = append("loop_weight", np.float32) if weighted and sources is None else None
        self._next = self._part.start  # first node without an entry in indptr
        self._open = self._part.start  # first node whose weight sum is not yet written
        self._carry = 0.0  # its partial sum

    def add(self, dst: Ints, src: NDArray[Any], edge_id: Ints, rest: Mapping[str, NDArray[Any]]) -> None:
        """Append a batch; a node's slots may continue in the next one."""
        if not len(dst):
            return
        loop = np.zeros(len(dst), bool) if self._self_loops is None else dst == src
        self._fill_indptr(dst, int(dst[-1]) + 1)
        self._indices.append(src)
        if self._edge_id is not None:
            self._edge_id.append(edge_id)
        if self._self_loops is not None and loop.any():
            self._self_loops.append(dst[loop])
            self.loops += int(loop.sum())
        for name, column in self._rest.items():
            column.append(rest[name])
        if self._loop_weight is not None:
            self._loop_weight.append(rest["weight"][loop])
        if self._sums is not None:
            self._sum_weights(dst, np.where(loop, 0.0, rest["weight"].astype(np.float64)))
        self.slots += len(dst)

    def __enter__(self) -> "CscWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self._arrays.__exit__(kind, error, trace)
            return
        with self._arrays:
            self._fill_indptr(np.empty(0, np.int64), self._part.stop + 1)
            if self._sums is not None:
                self._sum_weights(np.array([self._part.stop]), np.zeros(1))

    def _appender(self, store: Path, key: EdgeKey, name: str, dtype: DTypeLike, count: int | None = None) -> Appender:
        return self._arrays.enter_context(Appender(store, graph_array(name, key), (), dtype, count=count))

    def _fill_indptr(self, dst: Ints, stop: int) -> None:
        for low in range(self._next, stop, NODE_ROWS):
            nodes = np.arange(low, min(low + NODE_ROWS, stop))
            self._indptr.append(self.slots + np.searchsorted(dst, nodes))
        self._next = max(self._next, stop)

    def _sum_weights(self, dst: Ints, weight: NDArray[np.float64]) -> None:
        """Sum in slot order in float64 independently of the batches, starting from a node's partial sum."""
        assert self._sums is not None
        last = int(dst[-1])
        for low in range(self._open, last + 1, NODE_ROWS):
            high = min(low + NODE_ROWS, last + 1)
            first, end = np.searchsorted(dst, [low, high])
            at = np.concatenate([[0], dst[first:end] - low])
            sums = np.bincount(at, np.concatenate([[self._carry], weight[first:end]]), minlength=high - low)
            done = sums if high <= last else sums[:-1]
            self._sums.append(done.astype(np.float32))
            self._carry = 0.0 if high <= last else float(sums[-1])
        self._open = last


def write_csc(
    duck: Duck,
    store: Path,
    slots: str,
    num_nodes: int,
    num_edges: int,
    num_slots: int,
    rest: Mapping[str, DTypeLike],
    progress: Progress,
    check: Check | None = None,
    key: EdgeKey = HOMOGENEOUS,
    sources: int | None = None,
    by_time: bool = False,
    edge_ids: bool = True,
    part: range | None = None,
    where: Where | None = None,
) -> dict[str, int]:
    """Sort `slots` (SQL: src, dst, edge_id, and the columns `rest`) and write the graph; returns {"slots", "loops"}.

    `num_edges` is that of the input, one more than the largest edge id; `num_slots` is the expected number, for the progress.
    `check` has (destinations, sources, edge ids) of the slots in turn, and raises for what must not be. For `key`, `sources`,
    `edge_ids` and `part` see `CscWriter`, for `by_time` `sorted_slots`. With `where` the slots are in order already, see
    `slots_in_order`.
    """
    step = "sort edges" if where is None else "pack edges"
    progress(step, 0, num_slots)
    if where is None:
        batches = sorted_slots(duck, slots, num_nodes, num_edges, num_slots, rest, sources, by_time, part)
    else:
        batches = slots_in_order(duck, slots, num_nodes, rest, sources, by_time, where=where)
    with CscWriter(store, num_nodes, rest, key, sources, edge_ids, part) as writer:
        for dst, src, edge_id, columns in batches:
            if check is not None:
                check(dst, src, edge_id)
            writer.add(dst, src, edge_id, columns)
            progress(step, writer.slots, num_slots)
    return {"slots": writer.slots, "loops": writer.loops}


def count_self_loops(duck: Duck, relation: str) -> int:
    """Count the edges of `relation` from a node to itself."""
    return int(duck.one(f"SELECT count_if(src = dst) FROM ({relation})")[0])


def reversed_slots(slots: str, rest: Sequence[str]) -> str:
    """SQL of the slots in the other direction."""
    return f"SELECT dst AS src, src AS dst, {', '.join(['edge_id', *rest])} FROM ({slots})"


def parquet_relation(path: Path) -> str:
    """SQL of the rows of a staged file."""
    return f"SELECT * FROM {sql.parquet([path])}"
