"""How the memory and the disk of a run of tables are divided: batches, buckets in memory, slots on disk."""

from dataclasses import dataclass
from typing import Self

from ooc.config.tables import TableConfig
from ooc.history.bucket_table import TableShape
from ooc.loading.bucket_edges import PART_EDGES
from ooc.planning.table_plan import TablePlan, exchanges
from ooc.runtime.memory_plan import MemoryPlan
from ooc.sampling.bucket_order import beta_swaps, least_swaps
from ooc.stores.arrays.bucket_rows import BucketRows
from ooc.stores.errors import BudgetError, ConfigError
from ooc.stores.sizes import format_bytes

RANKING_BYTES = 2**26
"""for the queries that are ranked in one pass over the table, and what is known of them"""
_MOST_LISTS = 2**30
SORT_BYTES = 2**30
"""for edges that are sorted in memory, at most: more does not make it faster"""
RESIDENT = 8
"""buckets trained at a time, where the memory decides: with more, few of an epoch's exchanges are saved"""
MOST_BUCKETS = 1024
EPOCHS_PLANNED = 4
"""of which a plan says what the first and the last one exchange: from the second on they are about alike"""
_ROW_COPIES = 5
"""of a batch's rows: as gathered, their gradients, and what the formula makes of them"""
_SCORE_COPIES = 6
"""of a batch's scores: as they are, masked, their exponents and gradients"""
_LINK_BYTES = 200
"""of a batch's link, beside its rows and scores"""
_SCORED_LINK_BYTES = 100
"""of a link that is ranked"""


@dataclass(frozen=True)
class TableMemory:
    """The division. PURE, but for `is_full` and `check_free`.

    budget: of the process; shape: of the table; resident: buckets trained at a time; disk: bytes for the table, None for any.
    """

    budget: MemoryPlan
    shape: TableShape
    resident: int
    disk: int | None

    @classmethod
    def of(cls, config: TableConfig, plan: MemoryPlan, rows: int, edges: int, scored: int, candidates: int) -> Self:
        """Divide the memory, and the table where that is not configured.

        Args:
            config: The settings.
            plan: Of the process, with all that is left to batches.
            rows: Of the table.
            edges: To train on.
            scored: Links that are ranked at once.
            candidates: Rows that every batch has, of 1-vs-all.

        Raises:
            BudgetError: The memory does not hold a batch, or the buckets of a visit and one to read ahead.
            ConfigError: The disk space does not hold the table.
        """
        part = min(edges, PART_EDGES) * 3 // 2
        ahead = 3 * part * (2 * 4 * (2 + config.has_relations) + 8)
        least = max(batch_bytes(config, candidates) + ahead, RANKING_BYTES + scored * _SCORED_LINK_BYTES)
        budget = plan.beside_buckets(least)
        shape, resident = _divided(config, rows, edges, budget.buckets)
        found = cls(budget, shape, resident, config.disk_bytes)
        found._check(config)
        return found

    @property
    def room(self) -> int:
        """Buckets that memory has room for, not more than there are."""
        return min(self.shape.buckets, self.budget.buckets // self.shape.bucket_bytes)

    @property
    def described(self) -> str:
        """The table and where it is, for people."""
        shape, p, c = self.shape, self.shape.buckets, self.resident
        size = format_bytes(p * shape.bucket_bytes)
        own = f"table: {shape.rows:,} rows of {shape.width} float32, {size} with the state of {shape.optimizer}"
        if self.room >= p:
            return f"{own}, {'in memory' if p == 1 else f'in {p} buckets, all of them in memory'}"
        place = f"in {p} buckets of {format_bytes(shape.bucket_bytes)}, {self.room} of them in memory and {c} trained at a time"
        return f"{own}, {place}; an epoch exchanges {beta_swaps(p, c):,} (no order less than {least_swaps(p, c):,})"

    def planned(self, seed: int, steps: int, link_bytes: int) -> TablePlan:
        """The plan of a run. steps: of an epoch; link_bytes: of training links that it reads."""
        shape, resident = self.shape, self.resident
        first, *_, later = exchanges(shape.buckets, resident, self.room, seed, EPOCHS_PLANNED)
        return TablePlan(
            budget=self.budget,
            unit="buckets",
            rows=shape.rows,
            width=shape.width,
            row_bytes=4 * shape.packed,
            parts=shape.buckets,
            part_bytes=shape.bucket_bytes,
            in_memory=self.room,
            trained=resident,
            steps_per_epoch=steps,
            first=first,
            later=later,
            link_bytes_read=link_bytes,
            spare=self.spare,
            facts={"swaps": beta_swaps(shape.buckets, resident), "least_swaps": least_swaps(shape.buckets, resident)},
        )

    @property
    def spare(self) -> int:
        """Bytes for buckets that no bucket takes."""
        return max(0, self.budget.buckets - self.room * self.shape.bucket_bytes)

    @property
    def sort_bytes(self) -> int:
        """For edges that are sorted, before any bucket is in memory."""
        return min(SORT_BYTES, (self.budget.buckets + self.budget.batches) // 2)

    def _check(self, config: TableConfig) -> None:
        shape, need = self.shape, _needed(self.shape.buckets, self.resident)
        if config.loss == "all" and shape.buckets > 1:
            raise ConfigError(
                "loss = all scores all nodes in every step, and their table of "
                f"{format_bytes(shape.bucket_bytes * shape.buckets)} does not fit the memory: give more, or use loss = softmax"
            )
        if self.room < need:
            enough = self.budget.enough_for(self.budget.batches + need * shape.bucket_bytes - self.budget.buckets)
            raise BudgetError(
                f"{format_bytes(self.budget.memory)} of memory leaves {format_bytes(self.budget.buckets)} for buckets, and "
                f"{need} of {format_bytes(shape.bucket_bytes)} are needed: give at least {format_bytes(enough)}, or a "
                "larger `buckets`"
            )
        if self.disk is not None and self._slots <= shape.buckets + self._unsaved:
            least = (shape.buckets + self._unsaved + 1) * shape.bucket_bytes
            raise ConfigError(
                f"disk = {config.disk}: the table and what is exchanged between checkpoints take {format_bytes(least)} at "
                "least: give more, or leave it out"
            )

    @property
    def _slots(self) -> int:
        """Slots that the disk space has."""
        return 0 if self.disk is None else self.disk // self.shape.bucket_bytes

    def is_full(self, files: BucketRows) -> bool:
        """Whether a checkpoint is due, as it frees slots: the disk space is used up, and the next exchange needs one."""
        return self.disk is not None and self._used_up(files)

    def check_free(self, files: BucketRows) -> None:
        """Raise ConfigError where a checkpoint has freed no slot: the rows of the best model take the rest."""
        if self._used_up(files):
            raise ConfigError(
                f"disk = {format_bytes(self.disk or 0)} holds the table, its last checkpoint and the best model's rows, and no "
                "more: go on by `resume=True` with more `disk`"
            )

    @property
    def _unsaved(self) -> int:
        """Slots that may be written before a checkpoint has freed others: all that is in memory, and an exchange on its way."""
        return self.room + 2

    def _used_up(self, files: BucketRows) -> bool:
        return self._slots - files.slots + files.spare < self._unsaved


def lists_bytes(spare: int) -> int:
    """For the sources that are ranked in one pass over a table, their lists and known links: more where memory is spare."""
    return min(_MOST_LISTS, RANKING_BYTES + spare // 2)


def batch_bytes(config: TableConfig, candidates: int) -> int:
    """Bytes of a step: rows of links and candidates, and their scores."""
    b, ways = config.batch_size, 1 + config.both_ways
    chunks = -(-b // min(b, config.chunk or b))
    shared = candidates if config.loss == "all" else config.ratio
    rows = 2 * b + ways * (candidates or chunks * shared)
    return 4 * config.hidden * _ROW_COPIES * rows + 4 * _SCORE_COPIES * ways * b * shared + _LINK_BYTES * b


def _divided(config: TableConfig, rows: int, edges: int, room: int) -> tuple[TableShape, int]:
    """The table's shape, and how many buckets are trained at a time."""

    def shape_of(buckets: int) -> TableShape:
        return TableShape(rows, config.hidden, config.optimizer, buckets)

    if config.buckets is not None:
        shape = shape_of(config.buckets)
        fits = room // shape.bucket_bytes
        chosen = config.buckets if fits >= config.buckets else max(2, fits - 1)
        return shape, min(config.buckets, chosen if config.resident is None else config.resident)
    if config.loss == "all" or shape_of(1).bucket_bytes <= room:
        return shape_of(1), 1
    for resident in range(RESIDENT, 1, -1):
        buckets = next((p for p in range(resident + 1, MOST_BUCKETS + 1) if _fits(shape_of(p), resident, room)), None)
        if buckets is not None and (edges // buckets**2 >= config.batch_size or resident == 2):
            return shape_of(buckets), resident
    return shape_of(MOST_BUCKETS), 2


def _fits(shape: TableShape, resident: int, room: int) -> bool:
    return _needed(shape.buckets, resident) * shape.bucket_bytes <= room


def _needed(buckets: int, resident: int) -> int:
    """Buckets that memory must hold: those of a visit, and one that is read ahead or written behind."""
    return min(buckets, resident + 1)
