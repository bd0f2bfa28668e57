"""Steps of LightGCN over sampled links: an unbiased propagation of the batch's nodes, which changes the rows that it reads.

Links are drawn and rows read ahead of their step. The rows are those of embedding tables, one for each node type, so a step
reads and writes what its sample reaches, however large the tables are.
"""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ooc.config.lightgcn import LightGCNConfig
from ooc.history.embedding_table import TableRows, table_row_bytes
from ooc.history.embedding_tables import FOLDER, EmbeddingTables, bytes_in_ram, bytes_per_node
from ooc.history.history import Growth
from ooc.history.propagated_table import PropagatedRows
from ooc.layerwise.propagation import SymmetricAdjacency
from ooc.layerwise.sampled_propagation import SampledPropagation
from ooc.loading.relation_links import RelationLinks
from ooc.planning.table_plan import Exchanged, TablePlan
from ooc.runtime.clock import Clock
from ooc.runtime.keyed_random import Purpose, key
from ooc.runtime.memory_plan import plan_memory
from ooc.runtime.pipeline import Pipeline, Stage
from ooc.sampling.propagation_sampler import PropagationSampler, SampledLayers
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError
from ooc.stores.io.pages import PAGE_BYTES
from ooc.stores.sizes import format_bytes
from ooc.training.lightgcn_batches import LinkBatch, LinkBatches
from ooc.training.propagation_steps import WORKING, PropagationSteps

_OPTIMIZER = "adam"
_ROW_COPIES = 4
"""of a layer's rows: as they are, scaled, summed, and their gradients"""
_ROWS_AT_ONCE = 2**14


@dataclass(frozen=True)
class SampledLinkBatch:
    """Links of a step with what the rows of their nodes are computed from; `requests` are the rows, by node type."""

    links: LinkBatch
    sampled: SampledLayers
    requests: dict[str, TableRows]


class SampledSteps(PropagationSteps):
    """The rows that a batch's sample reaches are changed, by sparse Adam; see `PropagationSteps`."""

    folders = FOLDER

    def __init__(self, config: LightGCNConfig, dataset: Dataset, links: RelationLinks, batches: LinkBatches) -> None:
        super().__init__(config, dataset, links, batches)
        self._shapes = {name: (dataset.nodes(name).num_nodes, config.hidden) for name in links.first}
        self._adjacency_room = plan_memory(dataset).batches // 4
        beside = self.adjacency_bytes(self._adjacency_room)
        self.budget = plan_memory(dataset, beside).beside_tables(bytes_in_ram(self._shapes, _OPTIMIZER))
        self._columns = self._divided()
        self._clocks: dict[str, Clock] = {}
        self._rows_asked = 0

    @property
    def adjacency_room(self) -> int:
        return self._adjacency_room

    @property
    def columns(self) -> list[int]:
        return self._columns

    def _divided(self) -> list[int]:
        """Columns that memory holds of all rows, where all are propagated; BudgetError where it does not hold one."""
        width, one = self.config.hidden, WORKING * 4 * self.links.num_nodes
        fit = [each for each in range(1, width + 1) if width % each == 0 and each * one <= self.budget.batches]
        if not fit:
            need = format_bytes(one - self.budget.batches)
            raise BudgetError(
                f"a column of {self.links.num_nodes:,} rows and the links do not fit the memory: give {need} more"
            )
        return [fit[-1]] * (width // fit[-1])

    @property
    def spare(self) -> int:
        return max(0, self.budget.batches - WORKING * 4 * self.links.num_nodes * self.columns[0])

    @property
    def described(self) -> str:
        return "in memory" if self.budget.whole else f"on disk, {format_bytes(self.budget.table_rows)} of them in memory"

    def predict(self) -> TablePlan:
        """See `PropagationSteps`; of rows the most that a batch reaches."""
        config, rows, steps = self.config, self.links.num_nodes, self.batches.steps_per_epoch
        seeds = reached = self.batches.most_nodes
        expanded = 0
        for fanout in config.hops:
            expanded += reached
            reached = rows if fanout < 0 else min(rows, seeds + reached * fanout)
        row, whole = table_row_bytes(config.hidden, _OPTIMIZER), self.budget.whole
        each = Exchanged(*[0 if whole else steps * reached] * 2)
        return TablePlan(
            budget=self.budget,
            unit="rows",
            rows=rows,
            width=config.hidden,
            row_bytes=row,
            parts=rows,
            part_bytes=row,
            in_memory=rows if whole else min(rows, self.budget.table_rows // row),
            trained=reached,
            steps_per_epoch=steps,
            first=each,
            later=each,
            link_bytes_read=PAGE_BYTES * expanded * steps if self.neighbor_bytes > self.adjacency_room else 0,
            spare=0,
        )

    def open(self, saved: dict[str, Any] | None, growth: Growth | None, opened: ExitStack, engine: str) -> None:
        tables = EmbeddingTables.open(
            self.config.out / FOLDER,
            self._shapes,
            seed=self.config.seed,
            optimizer=_OPTIMIZER,
            max_bytes=self.budget.table_rows,
            state=None if saved is None else saved["tables"],
            grown=growth is not None,
            engine=engine,
            bound=self.config.init,
        )
        self.tables = opened.enter_context(closing(tables))

    def prepare(self, adjacency: SymmetricAdjacency) -> None:
        super().prepare(adjacency)
        rows = bytes_per_node(self._shapes, _OPTIMIZER, max_bytes=self.budget.table_rows)
        self._sampler = PropagationSampler(
            adjacency.indptr,
            adjacency.neighbor,
            adjacency.weight.numpy()[:, 0],
            self.config.hops,
            row_bytes=4 * self.config.hidden * _ROW_COPIES,
            table_bytes=max(rows.values()),
            max_bytes=self.budget.batch,
        )

    def of(self, epoch: int, step: int, stop: int) -> Iterator[SampledLinkBatch]:
        self.tables.end_pass()

        def sample(number: int) -> tuple[LinkBatch, SampledLayers]:
            links = self.batches.of(epoch, number)
            return links, self._sampler.sample(links.node, key(self.config.seed, Purpose.SAMPLE, epoch, number))

        stages = [
            Stage("sample", sample),
            Stage("tables", self._ahead, nbytes=lambda item: self._sampler.nbytes(item[1])),
        ]
        return Pipeline(range(step, stop), stages, self.budget.in_flight, clocks=self._clocks)

    def _ahead(self, item: tuple[LinkBatch, SampledLayers]) -> SampledLinkBatch:
        """Read a batch's rows, whose nodes are in ascending order and so by type."""
        links, sampled = item
        requests = {}
        for name, (count, _) in self._shapes.items():
            first = self.links.first[name]
            begin, end = np.searchsorted(sampled.node, [first, first + count])
            requests[name] = self.tables.tables[name].ahead(sampled.node[begin:end] - first)
        return SampledLinkBatch(links, sampled, requests)

    def rows(self, batch: SampledLinkBatch) -> tuple[LinkBatch, PropagatedRows]:
        self._rows_asked += len(batch.sampled.node)
        pulled = [self.tables.tables[name].pull(each, torch.device("cpu")) for name, each in batch.requests.items()]
        found: Any = SampledPropagation.apply(torch.cat(pulled), batch.sampled)  # type: ignore[no-untyped-call]
        return batch.links, PropagatedRows(*found)

    def update(self, lr: float, last: bool) -> None:
        self.tables.gather()
        self.tables.update(lr)

    def keep_best(self, epoch: int) -> None:
        self.tables.keep_best(epoch)

    def load(self, block: int, best: int | None) -> Tensor:
        if best is not None:
            self.tables.use_best(best)
        own = self.columns[block]
        found, first = torch.empty(self.links.num_nodes, own), block * own
        for name, (count, _) in self._shapes.items():
            for start in range(0, count, _ROWS_AT_ONCE):
                node = np.arange(start, min(start + _ROWS_AT_ONCE, count))
                rows = self.tables.tables[name].rows(node)[:, first : first + own]
                found[self.links.first[name] + torch.from_numpy(node)] = torch.from_numpy(np.ascontiguousarray(rows))
        return found

    def state(self) -> dict[str, Any]:
        return {"tables": self.tables.state()}

    def commit(self, best: int | None) -> None:
        self.tables.commit(best)

    def counts(self) -> dict[str, Any]:
        stages = {name: clock.sums() for name, clock in self._clocks.items()}
        return {**self.tables.spent(), "rows_asked": self._rows_asked, "stages": stages}

    @property
    def folder(self) -> str:
        return FOLDER
