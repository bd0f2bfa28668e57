"""The mode "history": batches of parts whose neighbors' inner rows come from histories (`ooc.history.halo`).

Between two epochs the histories' drift is measured, and where it is due they are refreshed.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from ooc.config.nodes import TrainConfig
from ooc.graph.blocks import Subgraph
from ooc.history.drift import Drift, LayerDrift, drift_row_bytes, drift_sample
from ooc.history.halo import FOLDER, Halo, HaloLoader, Turns, open_halo, widths_of
from ooc.history.history import Growth, History
from ooc.history.int8_rows import stored_bytes
from ooc.history.refresh import Refresh, Refresher, refresh
from ooc.history.shares import HistoryShare
from ooc.layerwise.layerwise_pass import LayerwisePass
from ooc.layerwise.node_ranges import node_ranges
from ooc.loading.base import AHEAD
from ooc.planning.choose_mode import ModeTraits
from ooc.planning.measure import lengths_in
from ooc.planning.over_ranks import RanksPlan
from ooc.planning.run_plan import Upkeep
from ooc.planning.simulate_history import STAMP_BYTES, HistoryShape
from ooc.planning.simulate_superbatches import cost_of
from ooc.runtime.keyed_random import Purpose, key
from ooc.runtime.memory_plan import MemoryPlan
from ooc.runtime.ranks import ALONE, Ranks
from ooc.stores.dataset import Dataset
from ooc.stores.errors import BudgetError, ConfigError
from ooc.stores.io.atomic import remove_tree
from ooc.stores.io.pages import PAGE_BYTES
from ooc.stores.io.read_plan import plan_by_cost
from ooc.training.batch_modes import PartMode
from ooc.training.batch_planning import PassCosts
from ooc.training.mode import RunContext, RunState, Scores

REFRESH_FOLDER = "refresh"
"""of the rows of a refresh while it is under way, in the run's directory"""


class HistoryMode(PartMode):
    """Parts with their halo; see `Mode`."""

    loader: HaloLoader
    checks_step = False
    ranked = True
    traits = ModeTraits(
        1,
        "histories",
        "stale halos: {lost} of a batch's rows",
        "with histories a step needs one hop for all {hops}: {takes}",
        worth=2.0,
    )
    halo: Halo
    """from `open` on"""
    refresh: Refresh | None = None
    """under way, or done behind this epoch's last step"""

    def __init__(self, config: TrainConfig, dataset: Dataset, ranks: Ranks = ALONE) -> None:
        self.a_step = ranks.begun_by or ranks.world_size
        """batches of a step: one for each of the processes that the run began with, however many there are now"""
        if self.a_step > ranks.world_size and self.a_step % ranks.world_size:
            raise ConfigError(
                f"cannot resume {config.out}: it began with {self.a_step} processes, whose batches {ranks.world_size} do not "
                "divide evenly: start a number of processes that does"
            )
        super().__init__(config, dataset, ranks)
        # The host's memory has the rows of `AHEAD` batches.
        self._book_states(self._stored_bytes(self._widths()), self.loader.budget.batch // AHEAD)

    @property
    def node_bytes(self) -> int:
        """See `BatchMode`: the step that wrote its histories, and how often they were pulled."""
        return 6

    def _make_loader(self) -> HaloLoader:
        """Rows pulled and pushed, and those kept in RAM, have their share of the memory."""
        config, dataset = self.config, self.dataset
        width = sum(self._widths())
        return HaloLoader(
            dataset,
            per_batch=config.parts_per_batch,
            halo=True,
            layers=config.layers,
            parts=config.parts,
            shuffle=True,
            train=dataset.members(config.train_split),
            width=width,
            beside=self._stored_bytes(self._widths()) * AHEAD,
            seed=config.seed,
            device=self.device,
            budget=self.budget.beside_history(),
            sample_threads=config.sample_threads or 1,
            together=config.accumulate * self.a_step,
            a_step=self.a_step,
            ranks=self.ranks,
        )

    def _widths(self) -> list[int]:
        return widths_of(self.model, self.dataset.num_features, "weight" in self.dataset.graph.columns)

    def _stored_bytes(self, widths: Sequence[int]) -> int:
        """Of a node's rows in layers of these widths."""
        return sum(stored_bytes(width, self.config.history_dtype) for width in widths)

    @property
    def batch_budget(self) -> MemoryPlan:
        """The loader's."""
        return replace(self.loader.budget, device=self.budget.device)

    @property
    def pending_bytes(self) -> int:
        """Pushes that the lag holds back."""
        return self.loader.kept_bytes if self.config.history_lag else 0

    @property
    def history(self) -> History | None:
        """The histories; None where zeros stand in their place."""
        return self.halo.history

    @property
    def steps_per_epoch(self) -> int:
        return self.loader.steps

    def open(self, run: RunContext, saved: dict[str, Any] | None, growth: Growth | None) -> None:
        """See `Mode`. Several ranks share files, which they open in `prepare`, where they may wait for each other."""
        super().open(run, saved, growth)
        if saved and growth is None:
            self._check_steps(saved)
        self.halo = Halo(self._widths(), None)
        self._files = saved, growth
        if self.ranks.alone:
            self._open_halo(saved, growth)
        if saved and saved.get("refresh") is not None:
            self.refresh = Refresh(**saved["refresh"])

    def _check_steps(self, saved: dict[str, Any]) -> None:
        """Raise ConfigError for a run whose accumulated batches saw each other's histories, as they once did."""
        at, loader, kept = saved["state"], self.loader, (saved["halo"] or {}).get("step")
        steps = at["epoch"] * loader.optimizer_steps + -(-at["step"] // self.accumulate)
        if kept is not None and kept != steps:
            raise ConfigError(
                f"cannot resume {self.config.out}: it began with a version of ooc in which batches of one optimizer step saw "
                "each other's histories: start another run"
            )

    def _open_halo(self, saved: dict[str, Any] | None, growth: Growth | None) -> None:
        config, history, ranks = self.config, None, self.ranks
        settings: dict[str, Any] = {"dtype": config.history_dtype, "lag": config.history_lag, "engine": self.engine}
        if not ranks.alone:
            settings["share"] = HistoryShare(ranks, node_ranges(self.dataset.graph, ranks.world_size)[ranks.rank])
        if config.history != "zero" and self.halo.widths:
            state = saved["halo"] if saved else None
            history = open_halo(self.out / FOLDER, self.loader, self.halo.widths, state, growth, **settings)
            self.opened.enter_context(closing(history))
        self.halo = Halo(self.halo.widths, history, config.accumulate * self.a_step, ranks.alone)

    def prepare(self) -> None:
        super().prepare()
        if not self.ranks.alone:
            self._open_halo(*self._files)

    def batches(self, epoch: int, step: int, stop: int) -> Iterator[Any]:
        self._begin_batches()
        return self.loader.shared(epoch, step, stop)

    def _begin_batches(self) -> None:
        super()._begin_batches()
        if self.history is not None:
            self.history.begin_epoch()
        self.refresh = None

    def notes(self) -> list[str]:
        """See `Mode`; which ranks have no batches."""
        rest, many = self.ranks.world_size - self.a_step, "es" * (self.a_step > 1)
        why = f"a step has {self.a_step} batch{many}, as the run began with {self.a_step} process{many}"
        idle = [f"{rest} of {self.ranks.world_size} processes train on no batches: {why}"] if rest > 0 else []
        return [*super().notes(), *idle]

    def step(self, batch: Any, share: float, last: bool = True) -> Tensor:
        """See `Mode`; of several batches of a step the gradients are those of their mean."""
        if not isinstance(batch, Turns):
            return super().step(batch, share, last)
        left, mean = batch.total, torch.zeros((), device=self.device)
        for each in batch.batches:
            now = min(left, self.ranks.world_size)
            left -= now
            mean += super().step(each, share * batch.total / now, last and left == 0).detach() * (now / batch.total)
        return mean

    def loss(self, batch: Any) -> Tensor:
        """See `BatchMode`. Dropout is that of one process for that batch."""
        if self.a_step > 1:
            torch.manual_seed(key(self.config.seed, Purpose.TORCH, self.run.state.epoch, batch.number) >> 1)
        return super().loss(batch)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """See `Mode`; the batches of an optimizer step push together."""
        super().update(optimizer)
        self.halo.push()

    def computed(self, batch: Any) -> Tensor:
        return self.halo.forward(self.model, batch, self.recomputation(batch))

    def score(self, split: str, epoch: int) -> Scores | None:
        if self.exact is not None and self.history is not None:
            self.history.make_room()
        return super().score(split, epoch)

    def end_epoch(self, scored: bool) -> dict[str, Any]:
        """Measure the drift and refresh where it is due, or go on with a refresh that was interrupted here.

        Where exact scores come next, one layer-wise pass serves both. Returned are the fields of `LayerDrift`, and "refreshed",
        true where the histories were refreshed afterwards.
        """
        if self.history is None:
            return {}
        with self.run.booked("refresh_seconds"):
            self.history.end_epoch()
            if self.refresh is None:
                found = self.ranks.decided(partial(self._drift, self.history))
                line = {} if found is None else found.asdict()
                if not self._is_due(found):
                    return line
                self.refresh = Refresh(line=line)
            if not self.refresh.done:
                self._refresh(self.history, self.refresh, scored)
            remove_tree(self.config.out / REFRESH_FOLDER)  # rank 0's, after the checkpoint that says so
            return {**self.refresh.line, "refreshed": True}

    def _is_due(self, found: LayerDrift | None) -> bool:
        every = self.config.refresh
        if every == "auto":
            return found is not None and found.passes(self.config.drift_tolerance)
        return every is not None and (self.run.state.epoch + 1) % every == 0

    def _drift(self, history: History) -> LayerDrift | None:
        """How far the histories have drifted; None where no node's neighbors fit the memory and nothing depends on it."""
        drift = Drift(self.model, self.dataset, history, self.device, self.config.precision)
        sample = key(self.config.seed, Purpose.DRIFT, self.run.state.epoch)
        try:
            return drift.measure(sample, self.batch_budget.max_batch)
        except BudgetError as error:
            if self.config.refresh == "auto":
                raise
            if not self.halo.drift_reported:
                self.run.watchers.note(f"the histories' drift is not measured: {error}")
            self.halo.drift_reported = True
            return None

    def _refresh(self, history: History, at: Refresh, scored: bool) -> None:
        def commit() -> None:
            self.run.checkpoint()
            self.run.checkpoint_if_due()  # after Ctrl-C

        refresher = Refresher(history, at, commit)
        if scored and self.exact is not None and self.config.val_split in self.exact.splits:
            refresh(self.exact.run, refresher)
            return
        settings: dict[str, Any] = {"budget": self.budget, "upto": len(history.rows), "engine": self.engine}
        settings["ranks"] = self.ranks
        with closing(LayerwisePass(self.model, self.dataset, self.out / REFRESH_FOLDER, **settings)) as scan:
            try:
                refresh(scan.run, refresher)
            finally:
                history.counts.bytes_read += scan.stats.bytes_read
                history.counts.bytes_written += scan.stats.bytes_written

    def progress(self) -> int:
        """Of a refresh."""
        return 0 if self.refresh is None else self.refresh.notes

    def state(self, cursor: RunState) -> dict[str, Any]:
        """See `Mode`. A refresh belongs to the end of its epoch."""
        under_way = asdict(self.refresh) if self.refresh is not None and cursor.step else None
        return {**super().state(cursor), "halo": {} if self.history is None else self.history.state(), "refresh": under_way}

    def commit(self) -> None:
        super().commit()
        if self.history is not None:
            self.history.commit()

    def counts(self) -> dict[str, Any]:
        return {**super().counts(), **self.halo.spent()}

    def _twin(self) -> Self:
        other = super()._twin()
        other.halo, other.a_step = Halo(self.halo.widths, None), 1
        return other

    @property
    def _keeps_histories(self) -> bool:
        return self.config.history == "kept" and len(self.halo.widths) > 0

    def histories(self) -> Sequence[HistoryShape]:
        return [self._shape] if self._keeps_histories else []

    @property
    def _shape(self) -> HistoryShape:
        """What is known of the histories before there are any."""
        config, halo, count = self.config, self.halo, self.dataset.num_nodes
        cost = cost_of(self.loader.strategy.stages.load.x if halo.history is None else halo.history.rows[0])
        return HistoryShape(
            num_nodes=count,
            row_bytes=tuple(self._stored_bytes([width]) for width in halo.widths),
            hot_bytes=self.loader.kept_bytes,
            lag=config.history_lag,
            ahead=AHEAD,
            widest=max(halo.widths) if self.config.history_dtype != "float32" else 0,
            lengths=lambda ids, row_bytes: plan_by_cost(ids, row_bytes, cost, count=count, alignment=PAGE_BYTES).length,
            cost=cost,
            together=config.accumulate * self.a_step,
            mine=config.accumulate * -(-self.a_step // self.ranks.world_size),
        )

    def predict_ranks(self, nproc: int, bandwidth: int) -> RanksPlan:
        """See `Mode`; with the rows that processes push, of batches as large as all are on average."""
        found = super().predict_ranks(nproc, bandwidth)
        if not self._keeps_histories:
            return found
        rows = self.config.accumulate * self.seeds_per_step * (self._shape.node_bytes + 8)
        return replace(found, push_bytes=(nproc - 1) * rows, push_memory=(self.config.history_lag + 1) * nproc * rows)

    def upkeep(self, steps: int, asked: float) -> Upkeep:
        """With refreshes, and the measuring of the drift."""
        base, every = super().upkeep(steps, asked), self._refresh_every()
        if not self._keeps_histories:
            return base
        histories = self._shape
        refreshed = range(every, steps // self.steps_per_epoch + 1, every) if every else range(0)
        apart = sum(not super(HistoryMode, self)._empties_memory(epoch) for epoch in refreshed)
        layers = len(histories.row_bytes)
        read, written = self._refresh_costs(layers) if apart else (0, 0)
        rows = self.dataset.num_nodes * (histories.node_bytes + STAMP_BYTES)
        return replace(
            base,
            lag=histories.lag,
            refresh_read=apart * read,
            refresh_written=apart * written + len(refreshed) * rows,
            drift_read=self._drift_read(histories),
        )

    def _passes(self) -> list[PassCosts]:
        refreshes = [self._pass_costs(REFRESH_FOLDER, len(self._shape.row_bytes))] if self._refresh_every() else []
        return [*super()._passes(), *refreshes]

    def _refresh_costs(self, layers: int) -> tuple[int, int]:
        """Bytes read and written by a refresh of so many layers that shares no pass with scores. Where all features stay in
        memory they are there, as the parts of an epoch have every node."""
        refresh, x = self._pass_costs(REFRESH_FOLDER, layers), self.loader.strategy.disk_rows
        whole = 0 if x is None else x.shape[0] * x.row_bytes
        there = refresh.rows_stay and self.loader.strategy.cache_bytes(self.loader.budget) == whole
        return refresh.read - (whole if there else 0), refresh.written

    def _refresh_every(self) -> int:
        """Epochs between refreshes; 0 where there are none, or it depends on the drift."""
        every = self.config.refresh
        return every if self._keeps_histories and isinstance(every, int) else 0

    def _empties_memory(self, epochs: int) -> bool:
        every = self._refresh_every()
        return bool(every and epochs % every == 0) or super()._empties_memory(epochs)

    def _drift_read(self, histories: HistoryShape) -> int:
        """Bytes that measuring the drift reads: features around some nodes, histories there, and those of the nodes."""
        rows, read = self.loader.strategy.disk_rows, 0
        sample = key(self.config.seed, Purpose.DRIFT, 0)
        row_bytes = drift_row_bytes(self.dataset.num_features, self._widths())
        try:
            layers = len(histories.row_bytes)
            for field in drift_sample(self.dataset.graph, sample, layers, self.batch_budget.max_batch, row_bytes):
                node = np.sort(field.node)
                read += 0 if rows is None else int(lengths_in(rows)(node).sum())
                below = histories.row_bytes[: layers - len(field.num_edges)]
                read += sum(int(histories.lengths(node, each).sum()) for each in below)
                own = np.sort(field.node[: field.num_nodes[0]])
                read += sum(int(histories.lengths(own, each).sum()) for each in histories.row_bytes)
        except BudgetError:
            return 0  # nor will training measure it
        return read

    def met(self, subgraph: Subgraph) -> tuple[int, int]:
        """Rows of nodes that the batch computes, of those that it has."""
        return len(subgraph.node[: subgraph.num_nodes[0]]), len(subgraph.node)
