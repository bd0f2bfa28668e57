"""What the pipeline's threads do for a loader: sample, read, collate.

`Work` knows nothing of the loader or the pipeline, so that threads never keep either alive.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch_geometric.data import Data

from ooc.arguments import InputNodes
from ooc.collate import Collator, Drawn, Loaded
from ooc.memory import file_resident_bytes
from ooc.order import Cursor, Purpose, key, seeds_of
from ooc.pipeline import Stage
from ooc.sampling import NeighborSampler
from stores.errors import BudgetError
from stores.graph import Graph
from stores.rows import AnyArray, Rows
from stores.sizes import format_bytes


@dataclass(frozen=True)
class Order:
    """Which seeds a step has, and the keys of its draws: all that a batch depends on besides the cursor."""

    nodes: InputNodes
    batch_size: int
    shuffle: bool
    seed: int
    drop_last: bool
    rank: int
    world: int

    def positions(self, cursor: Cursor) -> NDArray[np.int64]:
        """int64[b]: positions of the seeds among the input nodes."""
        return seeds_of(self.nodes, cursor, self.batch_size, self.shuffle, self.seed, self.drop_last, self.rank, self.world)

    def key(self, cursor: Cursor) -> int:
        """The key of the step's draws."""
        return key(self.seed, Purpose.SAMPLE, cursor.epoch, cursor.step, self.rank)


@dataclass
class Read:
    """What was read so far, for batches not yet delivered too."""

    rows: int = 0
    """feature rows"""
    nbytes: int = 0
    """bytes they took from the disk"""
    lock: Any = field(default_factory=threading.Lock)

    def add(self, rows: int, nbytes: int) -> None:
        with self.lock:
            self.rows += rows
            self.nbytes += nbytes


class Topology:
    """Keeps a memory-mapped graph fast and small: read in once where it fits, and never mapped beyond `max_mapped` bytes.

    max_warm: bytes of page cache that the slots may take; a larger topology is left to page faults.
    """

    def __init__(self, graph: Graph, weight: str | None, max_mapped: int, max_warm: int) -> None:
        self._graph, self._weight = graph, weight
        self._cold = graph.sampled_bytes(weight) <= max_warm
        self._most = file_resident_bytes() + max_mapped
        self._lock = threading.Lock()

    def warm(self) -> None:
        """Before the first draw: a few tenths of a second in sequence save minutes of page faults."""
        with self._lock:
            if self._cold:
                self._cold = False
                self._graph.warm(self._weight)

    def trim(self) -> None:
        """After a draw: give mapped pages back (they stay in the page cache) where they are too many."""
        if file_resident_bytes() > self._most:
            self._graph.forget()


@dataclass(frozen=True)
class Work:
    """The stages of a loader's pipeline. x, y: feature rows and labels [N, ...], None where the store has none."""

    order: Order
    sampler: NeighborSampler
    collator: Collator
    x: Rows | None
    y: AnyArray | None
    row_bytes: int
    """bytes of a node's features and labels in a batch"""
    max_bytes: int
    """of one batch"""
    transform: Callable[[Data], Any] | None
    pin: bool
    topology: Topology
    read: Read = field(default_factory=Read)

    def stages(self, sample_threads: int, read_threads: int, split: bool) -> list[Stage]:
        """The stages behind `cursors` (split=False) or `split_cursors`."""
        sample = [] if split else [Stage("sample", self.sample, sample_threads)]
        return [*sample, Stage("read", self.load, read_threads, nbytes=self.nbytes), Stage("collate", self.collate)]

    def sample(self, cursor: Cursor) -> Drawn:
        """The batch at `cursor`, whole. Raises BudgetError where it does not fit the memory."""
        return self._draw(cursor, self.order.positions(cursor), last=True)

    def _draw(self, cursor: Cursor, position: NDArray[np.int64], last: bool) -> Drawn:
        self.topology.warm()
        subgraph = self.sampler.sample(self.order.nodes.ids(position), self.order.key(cursor))
        self.topology.trim()
        drawn = Drawn(cursor.step, last, position, subgraph)
        need = self.nbytes(drawn)  # the sampler has not counted what collation adds
        if need > self.max_bytes:
            raise BudgetError(
                f"a batch of {len(position)} seeds needs {format_bytes(need)} of {format_bytes(self.max_bytes)}; "
                "take a smaller batch size, a smaller fan-out or more memory"
            )
        return drawn

    def split(self, cursors: Iterator[Cursor]) -> Iterator[Drawn]:
        """Sampled batches; where one does not fit, its halves in order. All parts of a step share its draws."""
        for cursor in cursors:
            parts = [self.order.positions(cursor)]
            while parts:
                position = parts.pop()
                try:
                    drawn = self._draw(cursor, position, last=not parts)
                except BudgetError:
                    if len(position) == 1:
                        raise
                    half = len(position) // 2
                    parts += [position[half:], position[:half]]
                    continue
                yield drawn

    def nbytes(self, drawn: Drawn) -> int:
        """Bytes of the batch from here to the model."""
        return self.collator.nbytes(drawn.subgraph, self.row_bytes)

    def load(self, drawn: Drawn) -> Loaded:
        """Features and labels of a sampled batch."""
        node, x = drawn.subgraph.node, None
        if self.x is not None:
            x = np.empty((len(node), *self.x.shape[1:]), self.x.dtype)  # numpy asks for huge pages, torch does not
            self.read.add(len(node), self.x.read(node, x))
        return Loaded(drawn, x, self.labels(drawn))

    def labels(self, drawn: Drawn) -> AnyArray | None:
        """Labels of a sampled batch's nodes, [n] or [n, C]."""
        if self.y is None:
            return None
        y = np.asarray(self.y[drawn.subgraph.node])
        return y.astype(np.int64) if y.dtype.kind in "iu" else y  # torch's losses take classes so

    def collate(self, loaded: Loaded) -> tuple[int, Any]:
        """(steps done with this batch, the batch)."""
        drawn = loaded.drawn
        batch: Any = self.collator(loaded, self.order.nodes.input_id(drawn.position))
        if self.transform is not None:
            batch = self.transform(batch)
        if self.pin:
            batch = batch.pin_memory()
        return drawn.step + drawn.last, batch
