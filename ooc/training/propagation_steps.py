"""How a step of LightGCN gets the rows of its batch behind the propagation, and changes the table by their gradients."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, ClassVar

from torch import Tensor

from ooc.config.lightgcn import LightGCNConfig
from ooc.history.history import Growth
from ooc.history.propagated_table import PropagatedRows
from ooc.layerwise.propagation import SymmetricAdjacency
from ooc.loading.relation_links import RelationLinks
from ooc.planning.table_plan import TablePlan
from ooc.runtime.memory_plan import MemoryPlan
from ooc.stores.dataset import Dataset
from ooc.training.lightgcn_batches import LinkBatch, LinkBatches

WORKING = 6
"""blocks' rows that are in memory while one is propagated, beside its own"""


class PropagationSteps(ABC):
    """The table of a run of LightGCN, and its steps: over the whole graph, or over sampled links.

    It is made before anything is written, and raises BudgetError or ConfigError for what does not fit. Then `open`, `prepare`.

    Args:
        config: The settings.
        dataset: The data set.
        links: Its links.
        batches: Of those to train on.
    """

    budget: MemoryPlan
    folders: ClassVar[str]
    """pattern of the folders of the table in the run's directory"""
    adjacency: SymmetricAdjacency
    """of the links to train on, from `prepare` on"""

    def __init__(self, config: LightGCNConfig, dataset: Dataset, links: RelationLinks, batches: LinkBatches) -> None:
        self.config, self.dataset, self.links, self.batches = config, dataset, links, batches

    @property
    @abstractmethod
    def adjacency_room(self) -> int:
        """Bytes of memory that neighbors may take; more of them are in a file."""

    @property
    def neighbor_bytes(self) -> int:
        """Of all neighbors, wherever they are."""
        return 8 * self.batches.num_links

    def adjacency_bytes(self, room: int) -> int:
        """Of the neighbors that are in memory, and of two numbers a node."""
        return 16 * self.links.num_nodes + min(self.neighbor_bytes, room)

    @property
    @abstractmethod
    def spare(self) -> int:
        """Bytes that neither links nor rows take while lists are made."""

    @property
    @abstractmethod
    def described(self) -> str:
        """Where the rows are, for people."""

    @property
    @abstractmethod
    def columns(self) -> list[int]:
        """Of each block in which all rows are propagated, to be scored and written."""

    @abstractmethod
    def predict(self) -> TablePlan:
        """What a run takes, by the numbers that it is divided by."""

    @abstractmethod
    def open(self, saved: dict[str, Any] | None, growth: Growth | None, opened: ExitStack, engine: str) -> None:
        """Make the table's files, or take them up as they were at a checkpoint; `opened` closes them."""

    def prepare(self, adjacency: SymmetricAdjacency) -> None:
        """The links that carry messages are in order."""
        self.adjacency = adjacency

    @abstractmethod
    def of(self, epoch: int, step: int, stop: int) -> Iterator[Any]:
        """What `rows` takes for steps `step` to `stop` of an epoch; the iterator has `close`."""

    @abstractmethod
    def rows(self, batch: Any) -> tuple[LinkBatch, PropagatedRows]:
        """The links of a step, and the rows of their nodes, to compute a loss of."""

    @abstractmethod
    def update(self, lr: float, last: bool) -> None:
        """Change the table by the gradients of the rows that were taken last. last: whether no other step is to follow."""

    @abstractmethod
    def keep_best(self, epoch: int) -> None:
        """Keep the rows as they are after `epoch`, in place of those of an earlier one."""

    @abstractmethod
    def load(self, block: int, best: int | None) -> Tensor:
        """Rows of the table, float32[N, columns of the block]: as they are, or as they were kept after the epoch `best`."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What a checkpoint stores of the table, by keys of the whole checkpoint."""

    @abstractmethod
    def commit(self, best: int | None) -> None:
        """The checkpoint is saved. best: the epoch whose rows it refers to."""

    @abstractmethod
    def counts(self) -> dict[str, Any]:
        """See `Mode.counts`."""

    @property
    @abstractmethod
    def folder(self) -> str:
        """Of the table, in the run's directory."""

    @property
    def numbering(self) -> dict[str, Any]:
        """How rows are numbered."""
        return {"rows": self.links.num_nodes, "first": dict(self.links.first)}
