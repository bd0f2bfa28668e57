"""The process's memory, divided once into a `MemoryPlan`: how many bytes each part of a run or a loader may take.

What stays (the process, the topology's index, the labels, the model) is taken off first; the rest is divided among the
batches alive at once. So a batch's largest size is known before anything is sampled, and the sampler refuses a larger one.
Every share of the memory is a number in this module, with its reason; all but `plan_memory` is pure.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Self

from ooc.stores.arrays.members import Members
from ooc.stores.arrays.zarr_rows import BLOCK_BYTES, ForeignRows
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError
from ooc.stores.io.remote.array import BUFFER_BYTES
from ooc.stores.io.remote.url import StoreUrl
from ooc.stores.sizes import format_bytes

LEAST_BATCH = 2**20
"""bytes: a limit that leaves less than this for a batch is refused"""
RUNTIME_BYTES = 190_000_000
"""for what libraries allocate at first use (kernels they compile, threads' stacks and arenas), after `baseline`, and for 40 MB
of their own pages that come back then (see `ooc.stores.process.release_library_pages`)"""
SCRATCH_BYTES = 64 * 2**20
"""for the buffers of reads in flight; for arrays in other formats, two copies of a block of 16 MiB. More with the engine gds
where kvikio is set to take more beside those of pread, which have 16 MiB"""
SHARES = 5
"""the largest batches that memory must hold at once: one at the model, one sampled ahead, two in flight between them, and
the model's activations, counted as large as a batch: hidden rows are about as wide as features, for fewer nodes each layer"""
TOPOLOGY_SHARE = 3
"""The topology's slots take at most a third of the memory. If those to sample from fit, they are read into memory at the start:
edges on disk cost more than the batches that their memory would hold (measured: twice the seconds a batch)"""
COLUMNS_SHARE = 32
"""If they do not fit, edges stay on disk, and columns that are memory-mapped all the same take at most 1/32"""
SECOND_SHARE = 4
"""A second pipeline over the same rows at the same time has 1/4 of the batches' memory, beyond the first one's"""
PIECE_SHARE = 32
"""A piece of the feature file takes at most 1/32 of a shared scan's memory: three are in memory at once"""
PACKED_PIECE_SHARE = 256
"""A piece of a packed batch takes at most 1/256 of the batches' memory: each of the many batches of a group fills one"""
PACKED_SPAN_SHARE = 1024
"""Reads of packed batches are planned for a row in 1,024 bytes of the batches' memory at once, which takes a twelfth of it"""
SHARED_READS_SHARE = 64
"""Memory in which the ranks of a host share what they read is at most 1/64 of one rank's"""
RANKED_SHARE = 2
"""Groups of sources that are ranked take half of what the memory leaves; the rest is for what torch and the reads take"""
EDGE_LABELS_SHARE = 8
"""Labels of edges are read into memory if they take 1/8 of it at most; else each is read from the mapped file"""
DEVICE_TOPOLOGY_SHARE = 2
"""A topology is sampled on the GPU by itself if it takes at most half of the memory that is free there"""
DEVICE_LIBRARIES_SHARE = 16
"""Kernels' workspaces and holes between torch's blocks have 1/16 of a GPU's memory"""
DEVICE_BATCHES_SHARE = 8
"""Batches and activations have 1/8 of it at least"""
GATHERED_SHARE = 2
"""of an exact step's room, one part is for ranges of a layer that gathers: see `gathered_share`"""
DEVICE_RANGES_SHARE = 2
"""Of what exact training has of a GPU's memory, ranges of layers that gather have half, if there are any"""
SCANNED_BYTES = 2**26
"""Edges that are read through once, a piece at a time, and forgotten behind it take so much at most"""
RANK_EDGES_SHARE = 16
"""Edges of a rank's part of the graph are in memory if they take at most 1/16 of it, otherwise in a file that is mapped"""
_FREED_BYTES, _FREED_SHARE = 80 * 10**6, 10
_HISTORY_SHARE = 4
_TRIAL_BYTES = 2**29


@dataclass(frozen=True)
class TopologyBytes:
    """Bytes of a graph's topology, and how much of it is in memory under a limit."""

    indptr: int = 0
    """of the array of that name"""
    slots: int = 0
    """those that may be mapped at once where there is room"""
    sampled: int = 0
    """those that sampling reads"""

    def under(self, limit: int) -> int:
        """Bytes in memory under a limit of the process."""
        share = TOPOLOGY_SHARE if self.sampled <= limit // TOPOLOGY_SHARE else COLUMNS_SHARE
        return self.indptr + min(self.slots, limit // share)

    def enough(self, memory: int, others: int) -> tuple[int, int]:
        """(the smallest limit, `memory` or more, that holds the topology and `others`; the one to advise).

        others: bytes of everything else. The second is `_ROUND_UP` times the first, and holds what it lets be mapped.
        """
        least = memory
        while True:
            while least < (need := others + self.under(least)):
                least = need
            advised = int(least * _ROUND_UP)
            short = [limit for limit in _near(advised) if limit < others + self.under(limit)]
            if not short:
                return least, advised
            least = short[0]


def _near(memory: int) -> tuple[int, int, int]:
    """What three digits may stand for."""
    return memory - memory // 190, memory, memory + memory // 190


class BatchRoom(int):
    """Bytes that one batch may take, 1/`parts` of what `budget` has for batches; so an error can say how much is enough."""

    parts: int
    budget: "MemoryPlan"

    def __new__(cls, nbytes: int, parts: int, budget: "MemoryPlan") -> "BatchRoom":
        room = super().__new__(cls, nbytes)
        room.parts, room.budget = parts, budget
        return room


_ROUND_UP = 1.02
"""so that the memory that is named, rounded to three digits, is enough, and in another process too"""
_PARTS = {1: "all", 2: "half of what", 5: "a fifth of what", 8: "an eighth of what", 10: "a tenth of what"}
_PARTS |= {SECOND_SHARE: "beside another loader of these rows a quarter of what"}


def words_for(need: int, room: int) -> str:
    """How much is needed of how much: "300 MB of 217 MB", and for a `BatchRoom` why, and how much memory is enough."""
    words = f"{format_bytes(need)} of {format_bytes(room)}"
    if not isinstance(room, BatchRoom):
        return words
    budget = room.budget
    enough = format_bytes(budget.enough_for(budget.batches + room.parts * (need - room)))
    beside = " beside the state of nodes" if budget.states else ""
    share = f"{_PARTS[room.parts]} {format_bytes(budget.memory)} of memory leaves for batches{beside}"
    return f"{words} ({share}; about {enough} would do)"


def smaller_than(seeds: int) -> str:
    """What makes a batch of so many seeds smaller, which a batch of one is not.

    >>> smaller_than(64)
    'a batch size below 64, a smaller fan-out or more memory'
    """
    return f"{f'a batch size below {seeds}, ' if seeds > 1 else ''}a smaller fan-out or more memory"


@dataclass(frozen=True)
class DevicePlan:
    """Bytes of a GPU's memory by purpose. PURE."""

    memory: int
    """all that may be used"""
    libraries: int
    """what kernels take for themselves, and holes between blocks"""
    model: int
    """parameters, gradients and optimizer state"""
    topology: int = 0
    """edges to sample from"""
    batches: int = 0
    """batches on their way and at the model, as they cross the bus"""
    activations: int = 0
    """activations, and feature rows as the model takes them"""
    pool: int = 0
    """feature rows that stay"""
    rows: int = 0
    """of all feature rows there are"""
    states: int = 0
    """rows of histories, or of the memory of nodes, that a batch has there at most"""
    origin: str = ""
    """where `memory` comes from, for people"""

    @classmethod
    def of(cls, memory: int, model: int = 0, origin: str = "") -> Self:
        """The plan before anything is known of batches."""
        return cls(memory, memory // DEVICE_LIBRARIES_SHARE, model, origin=origin)

    def with_topology(self, nbytes: int) -> Self:
        """The plan with edges to sample from, or those it has."""
        return replace(self, topology=max(nbytes, self.topology))

    def with_states(self, nbytes: int) -> Self:
        """The plan with the rows of histories, or of the memory of nodes, that a batch has there at most."""
        return replace(self, states=nbytes)

    def beside(
        self,
        batches: int,
        activations: int,
        wanted: int,
        rows: int,
        *,
        instead: str = "a smaller `batch_size` or a smaller `fanout`",
    ) -> Self:
        """The plan with batches, and with what they leave for feature rows, `wanted` bytes at most.

        Rows that do not all fit leave batches an eighth, as those of scores are larger than those that were sampled. Raises
        BudgetError where the model and its batches are too much; it names what would do. instead: that would do too.
        """
        need = {"the model": self.model, "edges": self.topology, "batches": batches, "activations": activations}
        left, others = self.memory - self.libraries - sum(need.values()), self.libraries + self.model + self.topology
        if left < 0:
            enough = math.ceil(sum(need.values()) * _ROUND_UP * DEVICE_LIBRARIES_SHARE / (DEVICE_LIBRARIES_SHARE - 1))
            named = ", ".join(f"{name} {format_bytes(size)}" for name, size in need.items() if size)
            raise BudgetError(
                f"{format_bytes(self.memory)} of GPU memory {self.origin} is not enough for {named}; give `gpu_memory` at "
                f"least {format_bytes(enough)}, {instead}"
            )
        more = max(0, (self.memory - others) // DEVICE_BATCHES_SHARE - batches - activations)
        return replace(self, batches=batches, activations=activations, pool=min(wanted, max(0, left - more)), rows=rows)

    @property
    def left(self) -> int:
        """What nothing else has: for activations that are kept where there is room."""
        others = self.libraries, self.model, self.topology, self.batches, self.pool, self.states
        return max(0, self.memory - sum(others))

    def without_pool(self) -> Self:
        """The plan where no rows stay."""
        return replace(self, pool=0)

    def parts(self) -> dict[str, int]:
        """As `MemoryPlan.parts`."""
        return {
            f"GPU memory {self.origin}".strip(): self.memory,
            "  GPU libraries": self.libraries,
            "  GPU model": self.model,
            "  GPU edges": self.topology,
            "  GPU batches": self.batches,
            "  GPU activations": self.activations,
            "  GPU feature rows": self.pool,
            **({"  GPU rows of histories or of node memory": self.states} if self.states else {}),
        }


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of memory by purpose; printed, it is a table. Each property is the share of one part of `ooc`."""

    memory: int
    """the whole process"""
    baseline: int
    """interpreter, libraries and what the program already has"""
    topology: int
    """indptr, and as much of the slots as may be mapped at once"""
    labels: int
    """labels, touched at random by every batch, and the splits"""
    model: int
    """parameters, gradients and optimizer state, and what a mode keeps of nodes"""
    runtime: int
    """what libraries allocate at first use"""
    scratch: int
    """buffers of reads in flight"""
    in_flight: int
    """batches being read, collated or waiting: the pipeline's limit"""
    max_batch: int
    """the largest batch; one is at the model, one sampled ahead, and the model's activations are counted as one"""
    origin: str = ""
    """where `memory` comes from, for people"""
    graph: TopologyBytes = field(default_factory=TopologyBytes)
    """what `topology` is part of"""
    states: int = 0
    """what `beside_history` or `beside_tables` has left to histories, to a memory of nodes or to embedding tables"""
    whole: bool = False
    """whether `states` has all rows of embedding tables"""
    buckets: int = 0
    """for buckets of an embedding table, what `beside_buckets` has left to them"""
    model_width: int = 0
    """columns that a model says its layers take for a node of a batch, where they are not as wide as the batch itself"""
    shared: int = 0
    """this process's part of the memory in which the ranks of a host share what they read"""
    activations: float = 1.0
    """those of a batch, of what they are without compression; see `compressed_share`"""
    device: DevicePlan | None = None
    """of the GPU that batches are moved to; None: the CPU, or nothing stays there"""

    def enough_for(self, batches: int) -> int:
        """The memory of the process to advise where batches need so many bytes."""
        whole = math.ceil(batches * (self.batches + self.states) / self.batches)
        return self.graph.enough(self.memory, self.memory - self.topology - self.batches - self.states + whole + SHARES)[1]

    @property
    def batches(self) -> int:
        """For all batches alive at once and the activations; superbatches and scans take what those leave."""
        return self._together(self.in_flight, self.max_batch)

    def _together(self, in_flight: int, max_batch: int) -> int:
        """`batches` of other shares."""
        return in_flight + 2 * max_batch + int(self.activations * max_batch)

    @property
    def step_activations(self) -> int:
        """For the activations of the batch at the model, where these are planned: on the GPU what nothing else has there."""
        return int(self.activations * self.max_batch) if self.device is None else self.device.left

    def _part(self, parts: int) -> BatchRoom:
        """1/parts of `batches`."""
        return BatchRoom(self.batches // parts, parts, self)

    @property
    def batch(self) -> BatchRoom:
        """`max_batch`, for errors."""
        return BatchRoom(self.max_batch, SHARES, self)

    @property
    def graphs(self) -> BatchRoom:
        """For graphs that are read at once: an eighth. One is read, one is ready, and batches are made of two."""
        return self._part(8)

    @property
    def drawn(self) -> BatchRoom:
        """For a batch sampled for a shared scan: half, because a scan holds the aggregates of two batches at least."""
        return self._part(2)

    @property
    def drawn_ahead(self) -> int:
        """For the batches that several threads draw at once, where nobody says how many threads: a quarter of one batch."""
        return self.max_batch // 4

    @property
    def window(self) -> BatchRoom:
        """For a window of events: a tenth; one is read, three are on their way, and one's node states wait to be written."""
        return self._part(10)

    @property
    def windows_in_flight(self) -> int:
        """For the windows on their way to the model: three."""
        return 3 * self.window

    @property
    def window_activations(self) -> BatchRoom:
        """For the activations of the window at the model: half, what the other windows leave."""
        return self._part(2)

    @property
    def window_state(self) -> int:
        """For node states in RAM, and as much again for those that wait to be written: both are one window's tenth."""
        return self.window // 2

    @property
    def resident_rows(self) -> int:
        """For feature rows on disk that all stay in memory, once read: half; more are read again for every shared scan."""
        return self.batches // 2

    def scans(self, spare: int) -> BatchRoom:
        """For shared scans: all, and `spare` bytes beside it."""
        return BatchRoom(self.batches + spare, 1, self)

    @property
    def topology_in_ram(self) -> int:
        """For the topology's slots; larger ones stay on disk."""
        return self.memory // TOPOLOGY_SHARE

    @property
    def frontier(self) -> int:
        """For the batches sampled together while edges stay on disk: a quarter."""
        return self.batches // 4

    @property
    def freed(self) -> int:
        """For freed blocks that the C library caches during shared scans (as measured), if that is a tenth at most; else 0."""
        return _FREED_BYTES if self.batches >= _FREED_SHARE * _FREED_BYTES else 0

    @property
    def history(self) -> int:
        """For rows of histories or of the node memory in RAM, and as much again for those that wait to be written."""
        return self.batches // _HISTORY_SHARE // 2

    @property
    def pairs(self) -> BatchRoom:
        """For the pairs that EdgeBank remembers, or TGB's negatives are drawn from: half, before a model has batches."""
        return self._part(2)

    @property
    def trial_rows(self) -> int:
        """For rows that are read to time it, before training: a quarter."""
        return self.batches // 4

    def trial_batches(self, spare: int = 0) -> int:
        """For batches that are sampled to time it, before training: half. spare: bytes that scans have beyond `batches`."""
        return min(_TRIAL_BYTES, (self.batches + spare) // 2)

    def beside_history(self) -> Self:
        """The plan of batches whose run keeps a history: with the other three quarters of their memory."""
        left = _HISTORY_SHARE - 1
        in_flight, max_batch = self.in_flight * left // _HISTORY_SHARE, self.max_batch * left // _HISTORY_SHARE
        states = self.batches - self._together(in_flight, max_batch)
        return replace(self, in_flight=in_flight, max_batch=max_batch, states=states)

    def beside_tables(self, nbytes: int) -> Self:
        """The plan of batches whose run has embedding tables of so many bytes: they are in RAM if they take a quarter at most,
        and else have as much as a history."""
        if nbytes > self.batches // _HISTORY_SHARE:
            return self.beside_history()
        in_flight, max_batch = (share + -share * nbytes // self.batches for share in (self.in_flight, self.max_batch))
        states = self.batches - self._together(in_flight, max_batch)
        return replace(self, in_flight=in_flight, max_batch=max_batch, states=states, whole=True)

    def beside_slots(self, nbytes: int) -> Self:
        """The plan of batches beside the places, of so many bytes, of rows that stay on the device."""
        shares = (share + -share * nbytes // self.batches for share in (self.in_flight, self.max_batch))
        in_flight, max_batch = shares
        return replace(self, in_flight=in_flight, max_batch=max_batch, states=self.states + nbytes) if nbytes else self

    def beside_buckets(self, least: int) -> Self:
        """The plan whose batches have `least` bytes, and buckets of an embedding table the rest.

        Raises BudgetError where batches alone are too much.
        """
        if least > self.batches:
            raise BudgetError(
                f"{format_bytes(self.memory)} of memory leaves {format_bytes(self.batches)}, and a batch and the edges read "
                f"ahead take {format_bytes(least)}: give at least {format_bytes(self.enough_for(least))}, or a smaller "
                "`batch_size`, `ratio` or `hidden`"
            )
        share = max(LEAST_BATCH, -(-least // SHARES))
        left = self.batches - SHARES * share
        return replace(self, in_flight=2 * share, max_batch=share, buckets=max(0, left))

    @property
    def table_rows(self) -> int:
        """For rows of embedding tables in RAM: what is left to them if it has all of them, else half, and as much again for
        those that wait to be written."""
        return self.states if self.whole else self.states // 2

    def parts(self) -> dict[str, int]:
        """Bytes by purpose, for people; an indented one is part of the one above."""
        return {
            f"memory {self.origin}".strip(): self.memory,
            "  process": self.baseline,
            "  topology": self.topology,
            "  labels": self.labels,
            "  model": self.model,
            "  libraries": self.runtime,
            "  read buffers": self.scratch,
            **({"  blocks shared with ranks": self.shared} if self.shared else {}),
            **({"  buckets of the table": self.buckets} if self.buckets else {}),
            "  batches, superbatches, activations": self.batches,
            "    of it a batch at most": self.max_batch,
            **({} if self.device is None else self.device.parts()),
        }

    def __str__(self) -> str:
        rows = self.parts()
        width = max(map(len, rows))
        return "\n".join(f"{name:<{width}}  {format_bytes(size):>8}" for name, size in rows.items())


def gathered_share(room: int) -> int:
    """Of an exact step's room, for two ranges of a layer that gathers: half; the rest is for what autograd keeps of them."""
    return room // GATHERED_SHARE


def divide(
    memory: int,
    *,
    baseline: int,
    topology: int | TopologyBytes = 0,
    labels: int = 0,
    model: int = 0,
    scratch: int = 0,
    shared: int = 0,
    origin: str = "",
    activations: float = 1.0,
) -> MemoryPlan:
    """Divide `memory` bytes; arguments are bytes, named as in `MemoryPlan`. The parts sum to `memory`, except for rounding.

    Activations larger than a batch (many wide layers) are not counted. Raises BudgetError if what stays leaves no room for
    batches; it names the least memory that is enough, and what that is made of.
    """
    graph = topology if isinstance(topology, TopologyBytes) else TopologyBytes(topology)
    others = {
        "the process": baseline,
        "labels": labels,
        "the model and its state": model,
        "libraries": RUNTIME_BYTES,
        "read buffers": scratch,
        "blocks shared with ranks": shared,
        "the smallest batches": SHARES * LEAST_BATCH,
    }
    fixed, here = sum(others.values()) - SHARES * LEAST_BATCH, graph.under(memory)
    share = int((memory - fixed - here) / (SHARES - 1 + activations))
    if share < LEAST_BATCH:
        least, advised = graph.enough(memory, sum(others.values()))
        parts = {"the process": baseline, "the topology": graph.under(least), **others}
        named = [f"{name} {format_bytes(size)}" for name, size in parts.items() if size]
        raise BudgetError(
            f"{format_bytes(memory)} of memory leaves nothing for batches: {', '.join(named[:-1])} and {named[-1]} take "
            f"{format_bytes(least)}; give at least {format_bytes(advised)}"
        )
    fixed_parts = memory, baseline, here, labels, model, RUNTIME_BYTES, scratch
    return MemoryPlan(*fixed_parts, 2 * share, share, origin, graph, shared=shared, activations=activations)


def compressed_share(kept: float, layers: int, whole: bool) -> float:
    """What activations that stand at once take where those kept for the backward pass are compressed, without that 1.

    A step's peak is then that of a single layer's gradients, which sampled blocks have in the first of their layers: 0.83 to
    0.89 of the bytes as measured with first-layer aggregates, less with rows. Where every layer computes every node of a batch
    (`whole`), two thirds of the rows are kept ones, and six tenths of a layer's more stand at the peak (measured with 3).

    Args:
        kept: Bytes of a kept activation, by those of float32.
        layers: Of the model.
    """
    return min(1.0, (1 + 2 * kept) / 3 + 0.6 / layers) if whole else 0.9


def plan_memory(
    dataset: Dataset,
    model: int = 0,
    columns: Collection[str] | None = None,
    scanned: bool = False,
    activations: float = 1.0,
) -> MemoryPlan:
    """The plan for a run or a loader over a data set; raises BudgetError if nothing is left for batches.

    All plans of a data set divide the same `Dataset.process_memory`, so loaders that are open together keep to one limit.
    `model` is the bytes that training adds to an existing model: gradients, optimizer state, what it keeps for each node.
    `columns` are the graph's columns that batches read, None for all; `scanned`: whether batches read no edges of the graph,
    which is gone through a piece at a time.
    """
    process = dataset.process_memory
    graphs = [dataset.edges(key).graph for key in dataset.edge_types]
    nodes = [dataset.nodes(name) for name in dataset.node_types]
    topology = TopologyBytes(
        sum(graph.indptr.nbytes for graph in graphs),
        sum(graph.mapped_bytes(None if columns is None else set(columns) & graph.columns.keys()) for graph in graphs),
        sum(graph.sampled_bytes() for graph in graphs),
    )
    if scanned:
        topology = replace(topology, slots=min(topology.slots, SCANNED_BYTES), sampled=0)
    labels = sum(each.labels.nbytes for each in nodes if each.labels is not None)
    return divide(
        process.limit,
        baseline=process.baseline,
        topology=topology,
        labels=labels + sum(len(each.splits) * Members.nbytes_for(each.num_nodes) for each in nodes),
        model=model,
        scratch=read_buffer_bytes(dataset.engine) + _request_bytes(dataset) + _large_chunks(dataset),
        shared=0 if dataset.shared is None else dataset.shared.nbytes // dataset.shared.members,
        origin=process.origin,
        activations=activations,
    )


def plan_graph_memory(dataset: Dataset, model: int = 0) -> MemoryPlan:
    """The plan for batches of whole graphs, whose edges are read with their nodes; see `plan_memory`."""
    process, graphs = dataset.process_memory, dataset.graphs
    return divide(
        process.limit,
        baseline=process.baseline,
        topology=graphs.ptr.nbytes + graphs.edge_ptr.nbytes,
        labels=len(graphs.splits) * Members.nbytes_for(len(graphs)),
        model=model,
        scratch=read_buffer_bytes(dataset.engine) + _request_bytes(dataset),
        origin=process.origin,
    )


def beside_scores(room: int) -> int:
    """What exact steps may leave in memory while exact scores are made there too: half of the room of a step."""
    return room // 2


def read_buffer_bytes(engine: str) -> int:
    """Bytes of the buffers of reads in flight by an engine."""
    if engine != "gds":
        return SCRATCH_BYTES
    from ooc.stores.io.engines import gds, pread

    return max(SCRATCH_BYTES, gds.host_bytes() + pread.DEPTH * pread.SCRATCH_BYTES)


def _request_bytes(dataset: Dataset) -> int:
    """Bytes of answers in memory, of a data set at a URL."""
    return BUFFER_BYTES if isinstance(dataset.path, StoreUrl) else 0


def _large_chunks(dataset: Dataset) -> int:
    """Bytes that decoding features takes beyond `SCRATCH_BYTES`: large chunks of other writers are read whole, and copied."""
    nodes = [dataset.nodes(name) for name in dataset.node_types]
    features = [each.stored("x") for each in nodes if each.num_features]
    return max((2 * max(0, x.block_bytes - BLOCK_BYTES) for x in features if isinstance(x, ForeignRows)), default=0)
