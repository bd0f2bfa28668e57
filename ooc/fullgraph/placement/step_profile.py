"""A short profile of exact steps before the first: a part of every layer is computed, added up, written and read.

Nothing of it reaches the run: rows are made up, gradients and torch's random numbers are put back. What is measured is what a
chunk takes forward and backward and what autograd keeps of it, what an edge takes, how fast the disk is by itself, and how much
of reading goes on behind computing: both alone, and both at once.
"""

import math
import shutil
import statistics
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ooc.fullgraph.activation_offload import OffloadMemory, PendingChunk
from ooc.fullgraph.executor import Executor, LossOf
from ooc.fullgraph.ops import Moments, StepModules, wanted_of
from ooc.fullgraph.placement.op_costs import OpCost, PackCost, RangeBytes, Speed, StepProfile
from ooc.fullgraph.placement.step_plan import StepPlan, TierRoom, plan_step, predict, settled
from ooc.fullgraph.program import TensorPlacement
from ooc.fullgraph.step import FullGraph
from ooc.graph.aggregation import Kind, RowDecoder
from ooc.layerwise.aggregator import SumKernel
from ooc.layerwise.device_rows import DeviceRows
from ooc.layerwise.device_sums import DeviceSums
from ooc.layerwise.edge_tiles import SlotReader, Tiles, count_entries, piece_rows_of
from ooc.layerwise.executor import NodeScans
from ooc.layerwise.io_stats import IoStats
from ooc.layerwise.ops import RangeOfNodes, Tensors, inputs_of, own_place
from ooc.layerwise.pass_plan import CHUNK_ROWS, Op
from ooc.layerwise.row_files import copy
from ooc.layerwise.shape import GATHERED, device_of, gather_ranges, gathered_bytes, hub_of, parts_of
from ooc.models.dropout import DropoutKeys
from ooc.runtime.buffers import Buffers
from ooc.runtime.range_io import MemoryRows, read_range, write_range
from ooc.runtime.transfer import HostCopy, to_device
from ooc.stores.arrays.encoding import Encoding
from ooc.stores.arrays.mutable_rows import DiskRows
from ooc.stores.arrays.rows import ArrayRows
from ooc.stores.errors import BudgetError
from ooc.stores.graph import Graph

REPEATS = 3
"""of a chunk, after one or more to warm up"""
_ROWS_BYTES = 128 * 2**20
"""of rows that are gathered"""
_SUMS_BYTES = 192 * 2**20
"""of rows that are added up, and of their sums, where the memory for a step has room for them: more than a processor's cache,
or adding takes a third of what it does later"""
_TRIED_EDGES = 1 << 21
_RANGES = 4
"""of destinations, in which their edges are tried once more"""
_BESIDE_SECONDS = 0.4
TRIED_BYTES, _ROUNDS = 128 * 2**20, 5
"""of a file written and read, so many times: a disk may stand still for seconds"""
PIECE_BYTES = 8 * 2**20
_BUS_BYTES = 16 * 2**20
"""moved to a GPU and back"""
_Tried = tuple[PendingChunk, Tensors, "_Results"]
"""a chunk whose forward is done, its inputs, and where its results go"""


def plan_full(full: FullGraph, folder: Path | None, disk: int, loss: LossOf | None = None) -> StepPlan:
    """Where the values of exact steps go, in the room that `full` has and `disk` bytes of disk below `folder`.

    Takes a few seconds; see `profile`. All is on the GPU where that fits. Ranks have the same placements. Raises BudgetError
    where nothing fits.
    """
    there = plan_resident(full, disk if folder else 0, loss)
    if there is not None:
        return there

    def planned(folder: Path | None, disk: int) -> tuple[StepPlan, StepProfile, TierRoom]:
        measured, room = profile(full, folder, loss, disk), TierRoom(full.room, full.device_room, 0 if folder is None else disk)
        return settled(full.program, measured, lambda profile: plan_step(full.program, profile, room)), measured, room

    def in_memory() -> tuple[StepPlan, StepProfile, TierRoom] | None:
        with suppress(BudgetError):
            return planned(None, 0) if full.most_bytes <= full.room else None  # then a disk is of no use
        return None

    made = full.ranks.together(in_memory)
    if not all(full.ranks.gather(made is not None)):
        made = full.ranks.together(lambda: planned(folder, disk))
    assert made is not None
    return _agreed(full, *made)


def plan_resident(full: FullGraph, disk: int, loss: LossOf | None = None) -> StepPlan | None:
    """The plan of everything on the GPU, in the room that `full` has; None where it does not fit. See `profile`."""
    if full.resident() is None:
        return None
    measured, room = profile(full, None, loss, resident=True), TierRoom(full.room, full.device_room, disk)
    placement = full.resident(measured.nbytes)
    if placement is None:
        return None
    with suppress(BudgetError):
        return settled(full.program, measured, lambda profile: predict(full.program, profile, placement, room))
    return None


def _agreed(full: FullGraph, plan: StepPlan, measured: StepProfile, room: TierRoom) -> StepPlan:
    """Of the placements that the ranks planned, the one with which the slowest of them is fastest, as all go through the same
    ops together."""
    if full.ranks.alone:
        return plan
    offered = [replace(each, ranges={}) for each in full.ranks.gather(plan.placement)]
    found: list[StepPlan | None] = []
    for placement in offered:
        try:
            found.append(settled(full.program, measured, lambda each, at=placement: predict(full.program, each, at, room)))  # type: ignore[misc]
        except BudgetError:
            found.append(None)
    seconds = full.ranks.gather([math.inf if each is None else each.seconds for each in found])
    slowest = [max(each) for each in zip(*seconds, strict=True)]
    best = found[slowest.index(min(slowest))]
    if best is None:
        raise BudgetError("no placement of values fits the memory of all processes: give each more")
    return replace(best, static=plan.static)


def profile(
    full: FullGraph,
    folder: Path | None,
    loss: LossOf | None = None,
    disk: int | None = None,
    *,
    resident: bool = False,
) -> StepProfile:
    """What the ops of a step cost, and how fast the disk below `folder` is (None: there is none to use). loss: of the steps, to
    be tried too; disk: bytes of it that may be taken, None: enough; resident: where everything is on the GPU.

    Takes a few seconds, and memory for a few chunks, or for rows that are added up: at most two thirds of the room, and twice
    192 MB.
    """
    made = full.dataset, full.shape, full.store, (), IoStats(), device_of(full.model)
    node_scans = NodeScans(*made, keyed=True, numbering=full.numbering)
    parts = StepModules(parts_of(full.model), full.shape, DropoutKeys())
    with closing(node_scans), torch.random.fork_rng(devices=[]), _gradients_of(parts.present):
        room = full.device_room if resident else full.room
        trial = _Trial(full.program, parts, full.store, node_scans, None, room, set(), compress=full.compress)
        trial.resident = resident
        return trial.profile(full.dataset.graph, folder, loss, TRIED_BYTES if disk is None else min(disk, TRIED_BYTES))


@contextmanager
def _gradients_of(modules: list[nn.Module]) -> Iterator[None]:
    """Parameters' gradients and buffers are afterwards what they were before."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    before = [parameter.grad for parameter in parameters]
    buffers = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers()]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad
        for buffer, value in buffers:
            buffer.copy_(value)


class _Trial(Executor):
    """Tries parts of every op, by the functions that steps are made of. resident: results stay where they are computed, and
    rows are added up there."""

    resident = False

    def profile(self, graph: Graph, folder: Path | None, loss: LossOf | None, nbytes: int) -> StepProfile:
        """See `profile`. nbytes: of a file to try the disk with; a few rows show nothing."""
        if nbytes < 2 * PIECE_BYTES:
            folder = None
        self.graph, self.nodes = graph, self.program.num_nodes
        self._hub = hub_of(graph) if any(op.kind == "gather" for op in self.program.forward) else 0
        self._nbytes: dict[str, int] = {}
        self._packed: dict[str, PackCost] = {}
        self._sums: dict[tuple[Kind, int], tuple[float, float]] = {}
        ops: dict[str, OpCost] = {}
        for op in self.program.forward:
            forward_s, backward_s, kept = self._rows(op, loss if op.computes_loss else None)
            gathering = self._gathering(op, kept) if op.kind == "gather" else {}
            add_s = self._scatter_s(op) if op.kind == "gather" else 0.0
            turned = backward_s + add_s if op.computes_loss else 0.0
            ops[op.name] = OpCost(forward_s + turned, *self._adding(op), **gathering)
            for back in self.program.backward:
                if back.repeats == op.name:
                    ops[back.name] = OpCost(backward_s + add_s, *self._adding(back), **gathering)
        for op in self.program.backward:
            ops.setdefault(op.name, OpCost(0.0, *self._adding(op)))
        tiers = {} if folder is None else {TensorPlacement.DISK: disk_speed(folder, nbytes)}
        if self.modules.device.type != "cpu":
            tiers[TensorPlacement.RETAINED] = bus_speed(self.modules.device)
        hidden = 1.0 if folder is None else self._hidden(folder, nbytes)
        return StepProfile(ops, tiers, hidden, self._nbytes, self._packed)

    def _rows(self, op: Op, loss: LossOf | None) -> tuple[float, float, RangeBytes]:
        """Seconds of the row-wise part of an op for all nodes, forward and backward, with the loss; what autograd keeps of a
        source, and of a destination beside. Notes what it keeps in all."""
        tries, place = self._chunk(op)
        own, sources = place.stop - place.first, len(place.at["sources"]) if op.kind == "gather" else 0
        edges = int(self.graph.indptr[place.stop] - self.graph.indptr[place.first])
        # In-edges of a node on average, itself among them, beside those of the destinations tried.
        usual = (1 + self.program.num_edges / self.nodes) / (1 + edges / own) if sources else 1.0
        forwards, backwards, kept = [], [], RangeBytes()
        for run in tries * (1 + REPEATS // len(tries)):
            begun = perf_counter()
            live, given, results = run()
            forwards.append(perf_counter() - begun)
            shared = live.bytes_of(sources) if sources else 0
            kept = RangeBytes(shared / max(1, sources), (live.nbytes - shared) / own * usual)
            for saved in self._of(op.writes, "saved"):
                self._nbytes[saved] = OpCost(kept=kept).kept_bytes(self.nodes)
                if self._compress is not None:  # of the last run, whose kernels are compiled
                    share, *seconds = live.packing(self._compress)
                    self._packed[saved] = PackCost(share, *(each * self.nodes / own for each in seconds))
            grads = {name: torch.ones_like(rows) for name, rows in live.outputs.items()}
            begun = perf_counter()
            if loss is not None:
                out = live.outputs["out"].requires_grad_()
                value = loss(place.first, out)
                if value is not None:
                    grads["out"] = torch.autograd.grad(value, out)[0]
            results(live.backward(given, grads))
            backwards.append(perf_counter() - begun)
        forward_s, backward_s = (float(np.median(taken[len(tries) :])) for taken in (forwards, backwards))
        return forward_s * self.nodes / own, backward_s * self.nodes / own, kept

    def _chunk(self, op: Op) -> tuple[list[Callable[[], _Tried]], RangeOfNodes]:
        """(runs of an op's part on chunks of made-up rows, where those are). Each run has rows and room for results of its own,
        as no chunk of a step finds its rows in the processor's cache; those that are gathered are more than it holds anyway."""
        inputs = inputs_of(self.shape, op)
        if op.kind == "gather":
            place = self._gathered_place(op)
        else:
            stop = min(CHUNK_ROWS, self.nodes)
            place = own_place(self.graph, 0, stop, self.modules.device, edges=op.kind == "sum")
        generator = torch.Generator().manual_seed(0)
        tries: list[Callable[[], _Tried]] = []
        function, wanted = self._function(op, place), wanted_of(self.shape, op)
        for _ in range(1 if op.kind == "gather" else REPEATS):
            given: Tensors = {}
            for part, name in inputs.items():
                count = len(place.at["sources"]) if part == "rows" else place.stop - place.first
                rows = torch.randn(count, self.program.value(name).columns, generator=generator, dtype=self._dtype)
                given[part] = rows.to(self.modules.device)
            if op.kind == "norm":
                moments = Moments()
                moments.add(given["pre_norm"])
                self.modules.statistics[op.layer] = moments.statistics(self._dtype)
            tries.append(partial(self._run, function, given, wanted, _Results(self.resident)))
        return tries, place

    def _run(self, function: Callable[[Tensors], Tensors], given: Tensors, wanted: list[str], results: "_Results") -> _Tried:
        live = PendingChunk(function, given, wanted, self._own, None)
        results({name: rows for name, rows in live.outputs.items() if name != "out"})
        return live, given, results

    def _gathered_place(self, op: Op) -> RangeOfNodes:
        """The first destinations that a modest memory has room for, with all their sources."""
        memory = max(1, min(self.room // 2, 2 * GATHERED * _ROWS_BYTES))
        first, stop = next(iter(gather_ranges(self.graph, self.shape.layers[op.layer], memory, 0, self.nodes)))
        return self.scans.place(first, stop, False)

    def _scatter_s(self, op: Op) -> float:
        """Seconds to add the gradients of all ranges to those of their sources; to gather rows goes on beside computing."""
        place, dtype = self._gathered_place(op), np.dtype(f"float{8 * self.shape.itemsize}")
        values = np.zeros((len(place.at["sources"]), self.program.value(op.summed).columns), dtype)
        rows, at = np.zeros_like(values), np.random.default_rng(0).permutation(len(values))
        if self.resident:
            return 0.0  # at the rate of its memory

        def add() -> None:
            rows[at] += values

        taken = [_seconds(add) for _ in range(1 + REPEATS)][1:]
        return statistics.median(taken) * self.nodes / (place.stop - place.first)

    def _gathering(self, op: Op, kept: RangeBytes) -> dict[str, Any]:
        """What an op that gathers takes of memory, by the fields of `OpCost`."""
        layer, hub = self.shape.layers[op.layer], self._hub
        own = 4 * layer.out + self.program.num_edges / self.nodes * layer.edge_bytes
        gathered = RangeBytes(GATHERED * layer.source_bytes, GATHERED * own)
        return {"gathered": gathered, "kept": kept, "hub": GATHERED * gathered_bytes(self.graph, layer, hub, hub + 1)}

    def _adding(self, op: Op) -> tuple[float, float]:
        """Seconds of adding an op's rows along all edges: once in all, and once a range of destinations."""
        if not op.summed or op.kind == "gather":
            return 0.0, 0.0
        layer = op.layer + (op.backward and op.kind not in ("map", "add"))
        kind = self.shape.layers[layer].kind
        assert kind is not None
        columns = self.program.value(op.summed).columns
        if (kind, columns) not in self._sums:
            self._sums[kind, columns] = self._sums_of(kind, columns)
        return self._sums[kind, columns]

    def _sums_of(self, kind: Kind, columns: int) -> tuple[float, float]:
        """Some destinations' real edges, over rows of a few pieces: in one range, and in several."""
        dtype, piece_rows = np.dtype(f"float{8 * self.shape.itemsize}"), piece_rows_of(self.shape)
        most = max(1, min(_SUMS_BYTES, self.room // 3) // (columns * dtype.itemsize))
        indptr, cell = self.graph.indptr, self.program.cell_rows
        stop = min(self.nodes, most, max(1, int(np.searchsorted(indptr, _TRIED_EDGES, side="right")) - 1))
        rows = min(self.nodes, most)
        edges = min(int(indptr[stop]), 2 * _TRIED_EDGES)  # of a hub some
        if not edges:
            return 0.0, 0.0
        pointers = np.minimum(np.asarray(indptr[: rows + 1]), edges)
        graph = Graph.from_arrays(pointers, np.asarray(self.graph.indices[:edges]).astype(np.int64) % rows)
        if self.resident:
            return self._sum_there_s(graph, kind, columns, stop) * self.program.num_edges / edges, 0.0
        slots = SlotReader(graph, ArrayRows(graph.indices), None)
        grid = count_entries(slots, piece_rows, cell)
        tiles = Tiles(grid, MemoryRows.create((grid.size,), "int64"), None)
        tiles.fill(slots.parts(), lambda done: None)
        values, sums = MemoryRows.create((rows, columns), dtype), np.empty((stop, columns), dtype)
        code = RowDecoder.of(Encoding.plain(np.dtype(np.float32)))
        with closing(SumKernel(tiles, graph, kind, torch.get_num_threads(), dtype)) as adder:

            def add(step: int) -> None:
                for first in range(0, stop, step):
                    own = sums[first : first + step]
                    adder.add(values, code, first, first + len(own), own)
                    adder.scale(first, own)

            ranges = min(_RANGES, -(-stop // cell))
            step = -(-stop // (ranges * cell)) * cell
            once, several = (statistics.median(_seconds(partial(add, each)) for _ in range(REPEATS)) for each in (stop, step))
        more = -(-stop // step) - 1
        a_pass = max(0.0, several - once) / more if more else 0.0
        share = -(-self.nodes // piece_rows) / grid.num_pieces
        return max(0.0, once - a_pass) * self.program.num_edges / edges, a_pass * share

    def _sum_there_s(self, graph: Graph, kind: Kind, columns: int, stop: int) -> float:
        """Seconds of the sums of destinations :stop of a graph, made on the device."""
        device, dtype = self.modules.device, np.dtype(f"float{8 * self.shape.itemsize}")

        def slots(first: int, last: int) -> tuple[NDArray[np.int64], None]:
            return np.asarray(graph.indices[graph.indptr[first] : graph.indptr[last]]).astype(np.int64), None

        sums = DeviceSums(graph, slots, {kind}, dtype, device, CHUNK_ROWS)
        rows = DeviceRows.plain(torch.ones(graph.num_nodes, columns, dtype=self._dtype, device=device))

        def add() -> None:
            for first in range(0, stop, CHUNK_ROWS):
                last = sums.sum(rows, kind, False, first, min(first + CHUNK_ROWS, graph.num_nodes))
            HostCopy([last[:1]]).tensors()

        return statistics.median([_seconds(add) for _ in range(1 + REPEATS)][1:])

    def _hidden(self, folder: Path, nbytes: int) -> float:
        """Of the shorter of computing and reading, the share that goes on behind the longer."""
        op = next((op for op in self.program.forward if op.kind == "sum"), self.program.forward[0])
        tries = cycle(self._chunk(op)[0])

        def compute() -> None:
            live, given, results = next(tries)()
            results(live.backward(given, {name: torch.ones_like(rows) for name, rows in live.outputs.items()}))

        with tried(folder, nbytes) as rows:
            read_some = piece_reader(rows)
            alone = rate(compute), rate(read_some)
            stop = threading.Event()
            with ThreadPoolExecutor(1, thread_name_prefix="ooc-plan") as pool:
                reading = pool.submit(rate, read_some, stop.is_set)
                try:
                    computing = rate(compute)
                finally:
                    stop.set()
        return float(np.clip(computing / alone[0] + reading.result() / alone[1] - 1, 0.0, 1.0))


class _Results:
    """Where what a chunk leaves is copied to, over and over; or, if it is to stay, what waits for it."""

    def __init__(self, stay: bool = False) -> None:
        self._stay = stay
        self._room: dict[tuple[int, tuple[int, ...]], NDArray[Any]] = {}

    def __call__(self, rows: Tensors) -> None:
        if self._stay:
            HostCopy([each[:1] for each in rows.values()]).tensors()
            return
        for number, values in enumerate(HostCopy([*rows.values()]).arrays()):
            place = number, values.shape
            if place not in self._room:
                self._room[place] = np.empty_like(values)
            copy(values, self._room[place])


def rate(work: Callable[[], None], ended: Callable[[], bool] | None = None) -> float:
    """Times a second, over a while or until it has `ended`; the first time is not counted."""
    work()
    begun, count = perf_counter(), 0
    while not (perf_counter() - begun >= _BESIDE_SECONDS if ended is None else ended()):
        work()
        count += 1
    return count / (perf_counter() - begun)


def _seconds(work: Callable[[], None]) -> float:
    begun = perf_counter()
    work()
    return perf_counter() - begun


def piece_reader(rows: DiskRows) -> Callable[[], None]:
    """What reads the next piece of a file at each call, over and over."""
    step, buffers = max(1, PIECE_BYTES // rows.row_bytes), Buffers(kept=2, direct=True, least_bytes=1)
    starts = cycle(range(0, max(1, rows.shape[0] - step + 1), step))

    def read() -> None:
        first = next(starts)
        read_range(rows, first, min(first + step, rows.shape[0]), buffers)

    return read


@contextmanager
def tried(folder: Path, nbytes: int) -> Iterator[DiskRows]:
    """Rows on the disk for a while."""
    path = folder / "profile"
    shutil.rmtree(path, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    rows = DiskRows.create(path, (nbytes // PIECE_BYTES * PIECE_BYTES // 1024, 256), "float32", "auto")
    try:
        yield rows
    finally:
        rows.close()
        shutil.rmtree(path, ignore_errors=True)


def bus_speed(device: torch.device) -> Speed:
    """Bytes a second that what autograd keeps is moved from and to a GPU, as steps do."""
    rows, offload = torch.ones(_BUS_BYTES, dtype=torch.uint8, device=device), OffloadMemory()
    seconds: list[list[float]] = [[], []]
    for _ in range(1 + REPEATS):
        begun = perf_counter()
        there = offload.put(rows)
        seconds[0].append(perf_counter() - begun)
        begun = perf_counter()
        HostCopy([to_device([there], device)[0][:1]]).arrays()  # which waits until all is there
        seconds[1].append(perf_counter() - begun)
    written, read = (_BUS_BYTES / statistics.median(each[1:]) for each in seconds)
    return Speed(read=read, written=written)


def disk_speed(folder: Path, nbytes: int = TRIED_BYTES) -> Speed:
    """Bytes a second that are read from and written to a folder's disk, in pieces as steps do."""
    buffers = Buffers(kept=4, direct=True, least_bytes=1)
    with tried(folder, nbytes) as rows, ThreadPoolExecutor(2, thread_name_prefix="ooc-plan") as pool:
        step = PIECE_BYTES // rows.row_bytes
        values: NDArray[np.float32] = buffers.empty((step, 256), np.dtype(np.float32))
        values[:] = 1
        starts = range(0, rows.shape[0], step)
        works: tuple[Callable[[int], int], ...] = (
            lambda first: write_range(rows, first, values),
            lambda first: read_range(rows, first, first + step, buffers)[1],
        )
        taken: list[list[float]] = [[], []]
        for _ in range(_ROUNDS):
            for work, rates in zip(works, taken, strict=True):
                begun = perf_counter()
                nbytes = sum(pool.map(work, starts))
                rates.append(nbytes / (perf_counter() - begun))
    written, read = map(statistics.median, taken)
    return Speed(read=read, written=written)
