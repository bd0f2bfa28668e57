"""Frontier sampling from a graph on disk: many batches together, hop by hop.

The slots a batch samples follow from `indptr` alone, so for each hop the slots of all batches are sampled first, then the union
of their pages is read in file order with many reads in flight, and each batch converts its neighbors to local ids (Ginex does
this for features). The subgraphs equal `NeighborSampler.sample`'s.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ooc.graph.blocks import Subgraph
from ooc.graph.mapped_topology import request_in_edges
from ooc.sampling.in_edge_pass import Expansion, InEdgePass
from ooc.sampling.labor import Key
from ooc.sampling.left_out import LeftOut
from ooc.sampling.neighbor import HopBound, NeighborSampler, SubgraphBuilder, damaged_slot, scratch
from ooc.sampling.node_table import table_bytes
from ooc.sampling.source_draws import SourceDraws
from ooc.stores.arrays.rows import AnyArray, Ids, Rows
from ooc.stores.errors import ConfigError, OocError
from ooc.stores.jit import kernel

AT_ONCE = 2**20
"""ids per call of `Rows.read`, which bounds the memory for planning: about 80 MB"""
_PLAN_BYTES = 72
"""per id while its reads are planned and executed"""
_UNION_BYTES = 16
"""per id in the union of all requests: itself and its position in file order"""


class FrontierRead(NamedTuple):
    """For each request its rows of each array, or the exception that prevented reading them, and the bytes read from disk."""

    values: list[list[AnyArray] | Exception]
    nbytes: int


def read_together(arrays: Sequence[Rows], requests: Sequence[Ids], at_once: int = AT_ONCE) -> FrontierRead:
    """Read the same rows of several arrays (Rows [count]) for several requests (int64[n] each), in file order, each row once.

    If the union cannot be read, each request is read by itself and failing ones return their exception. Needs 16 bytes per id,
    the values, and 72 bytes for each of at most `at_once` ids.
    """
    if not arrays:
        return FrontierRead([[] for _ in requests], 0)
    flat = np.concatenate([np.empty(0, np.int64), *requests])
    try:
        values, nbytes = _read_union(arrays, flat, at_once)
    except Exception as error:
        if len(requests) == 1:
            return FrontierRead([error], 0)
        alone = [read_together(arrays, [request], at_once) for request in requests]
        return FrontierRead([reading.values[0] for reading in alone], sum(reading.nbytes for reading in alone))
    ends = np.cumsum([len(request) for request in requests])
    parts = [np.split(each, ends[:-1]) for each in values]
    return FrontierRead([[part[k] for part in parts] for k in range(len(requests))], nbytes)


def _read_union(arrays: Sequence[Rows], flat: Ids, at_once: int) -> tuple[list[AnyArray], int]:
    """Return the values [n] of the rows `flat` in each array, and the bytes read."""
    order = np.argsort(flat, kind="stable")  # timsort benefits from the slots of a node being sorted
    values = [np.empty(len(flat), rows.dtype) for rows in arrays]
    distinct = np.empty(min(at_once, len(flat)), np.int64)
    begin = nbytes = 0
    while begin < len(flat):
        stop, count = _distinct(flat, order, begin, distinct)
        for rows, out in zip(arrays, values, strict=True):
            got = np.empty(count, rows.dtype)
            nbytes += rows.read(distinct[:count], got)
            _spread(flat, order, begin, stop, distinct, got, out)
        begin = stop
    return values, nbytes


@kernel
def _distinct(flat: Ids, order: Ids, begin: int, distinct: Ids) -> tuple[int, int]:
    """Collect the distinct ids of flat[order[begin:stop]] in distinct[:count], up to its length; returns (stop, count)."""
    count = 0
    for position in range(begin, len(order)):
        value = flat[order[position]]
        if count == 0 or value != distinct[count - 1]:
            if count == len(distinct):
                return position, count
            distinct[count] = value
            count += 1
    return len(order), count


@kernel
def _spread(flat: Ids, order: Ids, begin: int, stop: int, distinct: Ids, got: AnyArray, values: AnyArray) -> None:
    """Set values[i] to the row of id flat[i], for i in order[begin:stop]."""
    at = 0
    for position in range(begin, stop):
        i = order[position]
        at += int(distinct[at] != flat[i])
        values[i] = got[at]


@kernel
def _outside(slot: Ids, first: int, last: int, num_slots: int) -> int:
    """First position in slot[first:last] outside 0..num_slots-1, or -1."""
    for e in range(first, last):
        if slot[e] < 0 or slot[e] >= num_slots:
            return e
    return -1


@kernel
def _adopt(values: AnyArray, num_nodes: int, source: Ids, first: int) -> int:
    """Set source[first + i] = values[i]; returns -1, or the first i without a valid node id."""
    for i in range(len(values)):
        neighbor = int(values[i])
        if neighbor < 0 or neighbor >= num_nodes:
            return i
        source[first + i] = neighbor
    return -1


def frontier_bytes(
    needs: Sequence[HopBound],
    itemsize: int,
    at_once: int = AT_ONCE,
    weighted: bool = False,
    columns: Sequence[int] = (),
    beside: int | None = None,
) -> int:
    """Peak bytes of sampling batches together, with upper bounds `needs` after the current hop.

    Their arrays, the union of the hop's slots and reading it, growing one batch, and one hash table. `columns` are the item
    sizes of columns read with `indices`; `beside` is what a pass over all in-edges takes, after which only columns are read.
    """
    column_bytes = sum(columns)
    per_edge = 16 + 4 * weighted + column_bytes
    arrays = sum(8 * need.num_nodes + per_edge * need.num_edges + 8 * (need.num_expanded + 1) for need in needs)
    sampled, read = sum(need.sampled for need in needs), [*([itemsize] if beside is None else []), *columns]
    union = (_UNION_BYTES + sum(read)) * sampled + (_PLAN_BYTES + max(read)) * min(at_once, sampled) if read else 0
    largest = max((8 * need.num_edges + table_bytes(need.num_nodes) for need in needs), default=0)
    return arrays + union + largest + (beside or 0)


class FrontierBatches(NamedTuple):
    """Batches sampled together: as many of the first ones as fit."""

    batches: list[Subgraph | Exception]
    """each batch's subgraph, or the error `NeighborSampler.sample` would raise"""
    nbytes: int


class _Batch:
    """A batch being sampled, or its error."""

    def __init__(
        self, sampler: NeighborSampler, columns: Mapping[str, Rows], seeds: Ids, key: Key, left_out: LeftOut | None
    ) -> None:
        self.sampler, self.key = sampler, key
        self.error: Exception | None = None
        self.need: HopBound | None = None
        dtypes = {name: rows.dtype for name, rows in columns.items()}
        try:
            self.builder: SubgraphBuilder = sampler.begin(seeds, dtypes, left_out)
        except OocError as error:
            self.error = error

    def plan(self, hop: int) -> None:
        try:
            self.need = self.sampler.need(self.builder, hop)
        except OocError as error:
            self.fail(error)

    def draw(self, hop: int) -> None:
        """Step 1: sample the slots of hop `hop` and check their range."""
        assert self.need is not None
        sampler, builder, weight = self.sampler, self.builder, self.sampler.weight
        if weight is not None and sampler.fanout[hop] >= 0:
            request_in_edges(weight, sampler.indptr, builder.nodes.node, *builder.nodes.expanding)
        try:
            sampler.draw(builder, hop, self.key, self.need)
            edges = builder.edges
            wrong = _outside(edges.slot, *edges.drawn, sampler.num_slots)
            if wrong >= 0:
                raise damaged_slot(edges.slot[wrong])
        except OocError as error:
            self.fail(error)

    def expand(self, hop: int) -> Expansion:
        """Step 1 of LABOR: the nodes of hop `hop`, and room for their draws."""
        assert self.need is not None
        nodes, edges, sampler = self.builder.nodes, self.builder.edges, self.sampler
        self.builder.grow(self.need)
        (start, stop), left_out = nodes.expanding, edges.left_out if hop == 0 else None
        room = (edges.drawn[0], edges.slot, edges.source, edges.stands_for)
        return Expansion.of(sampler.indptr, nodes.node[start:stop], sampler.fanout[hop], self.key, left_out, *room)

    def end_draws(self, expansion: Expansion) -> None:
        """Step 2 of LABOR: the draws are in their room."""
        nodes, edges = self.builder.nodes, self.builder.edges
        start, stop = nodes.expanding
        expansion.finish(edges.indptr[start : stop + 1])
        wrong = _outside(edges.source, *edges.drawn, self.sampler.num_sources)
        if wrong >= 0:
            self.fail(damaged_slot(edges.slot[wrong]))

    @property
    def slots(self) -> Ids:
        """The slots sampled in the current hop, int64[k]."""
        first, last = self.builder.edges.drawn
        return self.builder.edges.slot[first:last]

    def number(self, hop: int, values: list[AnyArray] | Exception) -> bool:
        """Steps 3 and 4: local ids from the values of `indices` and the columns at `slots`; with LABOR of the columns alone.
        False where the hop has to be drawn again; see `EdgeSampler.leave_out`."""
        if isinstance(values, Exception):
            self.fail(values)
            return True
        nodes, edges = self.builder.nodes, self.builder.edges
        first, last = edges.drawn
        if self.sampler.by_source is None:
            wrong = _adopt(values.pop(0), self.sampler.num_sources, edges.source, first)
            if wrong >= 0:
                self.fail(damaged_slot(edges.slot[first + wrong]))
                return True
        for column, read in zip(edges.columns.values(), values, strict=True):
            column[first:last] = read
        if not self.sampler.leave_out(nodes, edges, hop, self.key):
            return False
        first, last = edges.drawn
        scratch.refill(min(nodes.size + last - first, len(nodes.node)), nodes.node, nodes.size)
        self.sampler.number(self.builder)
        return True

    def fail(self, error: Exception) -> None:
        """Record the error; the other batches continue."""
        self.error, self.need = error, None
        del self.builder


class OnDiskFrontier:
    """Samples batches together while the graph's edges stay on disk. Stateless: any number of threads may share one.

    `indptr` should be in memory (8 bytes per node). Weights are read through the graph's column, because sampling reads every
    in-edge's weight; if it is memory-mapped, pages are requested in advance (measured: 6 times faster). With LABOR, `weight`
    has their rows, which are read with the in-edges.

    `sampler` and its `max_bytes` apply to each batch, `max_bytes` to one call, including the subgraphs. `indices` (int32|int64
    Rows [E]) and `columns`, further Rows [E] to read for the sampled edges (`Subgraph.columns`), are read `at_once` ids at a
    time. Raises ConfigError if they do not belong to the sampler's graph.
    """

    def __init__(
        self,
        sampler: NeighborSampler,
        indices: Rows,
        columns: Mapping[str, Rows] | None = None,
        max_bytes: int | None = None,
        at_once: int = AT_ONCE,
        weight: Rows | None = None,
    ) -> None:
        if indices.shape != (sampler.num_slots,) or indices.dtype.kind not in "iu" or at_once < 1:
            raise ConfigError(
                f"sampling from disk needs the graph's {sampler.num_slots} source nodes as integer rows and at_once >= 1, "
                f"not {indices.dtype}{list(indices.shape)} and {at_once}"
            )
        self.columns = dict(columns or {})
        for name, rows in self.columns.items():
            if rows.shape != (sampler.num_slots,):
                raise ConfigError(
                    f"column {name!r} has shape {list(rows.shape)}: it needs one for each of {sampler.num_slots} edges"
                )
        self.sampler, self.indices, self.max_bytes, self.at_once = sampler, indices, max_bytes, at_once
        self.weight = weight
        self._pass: InEdgePass | None = None
        if sampler.by_source is not None:
            if not isinstance(sampler.by_source, SourceDraws):
                raise ConfigError("layer-wise sampling reads edges through memory maps, batch by batch: it has no frontier")
            if (weight is None) != (sampler.weight is None) or sampler.by_source.labor.iterations != 0:
                raise ConfigError("LABOR from disk needs the rows of the weights that it draws by, and has no importance")
            self._pass = InEdgePass(sampler.by_source, indices, weight, at_once)

    def sample(
        self, seeds: Sequence[Ids], keys: Sequence[Key], left_out: Sequence[LeftOut | None] | None = None
    ) -> FrontierBatches:
        """Sample as many of the first batches (seeds int64[b], a key and what is left out of each) as fit `max_bytes`, at least
        one.

        A failing batch returns its exception (as raised by `NeighborSampler.sample`, or by reading its slots).
        """
        given = zip(seeds, keys, left_out or [None] * len(seeds), strict=True)
        batches = [_Batch(self.sampler, self.columns, *each) for each in given]
        nbytes = 0
        try:
            for hop in range(len(self.sampler.fanout)):
                batches = self._fitting(batches, hop)
                live = [batch for batch in batches if batch.error is None]
                if self._pass is None:
                    for batch in live:
                        batch.draw(hop)
                else:
                    nbytes += self._draw_by_source(self._pass, live, hop)
                nbytes += self._read(batches, hop)
        finally:
            scratch.trim()
        return FrontierBatches([batch.error or batch.builder.finish() for batch in batches], nbytes)

    def within(self, max_bytes: int) -> "OnDiskFrontier":
        """The same within another limit."""
        return OnDiskFrontier(self.sampler, self.indices, self.columns, max_bytes, self.at_once, self.weight)

    def _draw_by_source(self, in_edges: InEdgePass, batches: list[_Batch], hop: int) -> int:
        """Draw a hop by LABOR; returns the bytes read. What one batch fails on does not keep the others from theirs."""
        nbytes = 0
        try:
            expansions = [batch.expand(hop) for batch in batches]
            nbytes, bad = in_edges.draw(expansions, self.sampler.fanout[hop], hop)
            self.sampler.check_drawn(bad)
        except Exception as error:
            if len(batches) == 1:
                batches[0].fail(error)
                return nbytes
            return nbytes + sum(self._draw_by_source(in_edges, [batch], hop) for batch in batches)
        for batch, expansion in zip(batches, expansions, strict=True):
            batch.end_draws(expansion)
        return nbytes

    def _read(self, batches: list[_Batch], hop: int) -> int:
        """Read the edges that the batches have drawn in a hop, and again those of batches that draw more; returns the bytes."""
        arrays, nbytes = [*([self.indices] if self._pass is None else []), *self.columns.values()], 0
        while live := [batch for batch in batches if batch.error is None]:
            reading = read_together(arrays, [batch.slots for batch in live], self.at_once)
            nbytes += reading.nbytes
            batches = [batch for batch, values in zip(live, reading.values, strict=True) if not batch.number(hop, values)]
            for batch in batches:
                batch.plan(hop)
                if batch.error is None:
                    batch.draw(hop)
        return nbytes

    def _fitting(self, batches: list[_Batch], hop: int) -> list[_Batch]:
        """The first batches that fit while hop `hop` is sampled; the others free their memory."""
        needs: list[HopBound] = []
        itemsize, columns = self.indices.dtype.itemsize, [rows.dtype.itemsize for rows in self.columns.values()]
        for k, batch in enumerate(batches):
            if batch.error is None:
                batch.plan(hop)
            if batch.need is not None and self.max_bytes is not None:
                needs.append(batch.need)
                beside = None
                if self._pass is not None:
                    expanded, degree = sum(each.num_expanded for each in needs), max(each.degree for each in needs)
                    beside = self._pass.nbytes(expanded, degree, hop, self.sampler.fanout)
                need = frontier_bytes(needs, itemsize, self.at_once, self.sampler.weighted, columns, beside)
                if need > self.max_bytes and len(needs) > 1:
                    return batches[:k]
        return batches
