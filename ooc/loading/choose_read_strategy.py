"""Which read strategy a loader has: decided here and nowhere else, by where its rows are and what they become."""

from ooc.graph.aggregation import PreAggregation
from ooc.loading.batch_bytes import BatchBytes, ScanBytes
from ooc.loading.load_stage import BatchStages
from ooc.loading.read_strategy import InMemory, ReadStrategy
from ooc.loading.shared_scan import SharedScans
from ooc.loading.superbatch import Superbatches
from stores.arrays.rows import ArrayRows, Rows


def in_memory(x: Rows | None) -> bool:
    """Whether there are feature rows, in memory."""
    return isinstance(x, ArrayRows)


def on_disk(x: Rows | None) -> bool:
    """Whether feature rows are read from disk."""
    return x is not None and not in_memory(x)


def scan_pays(rows: Rows, pool: int) -> bool:
    """Whether to read rows on disk again for every scan; not where all of them fit into memory and stay there."""
    return rows.shape[0] * rows.row_bytes > pool // 2


def outgrows(x: Rows | None, pool: int) -> bool:
    """Whether feature rows are on disk and do not fit into memory. pool: bytes for all batches."""
    return x is not None and on_disk(x) and scan_pays(x, pool)


def scans(x: Rows | None, pre_aggregation: PreAggregation | None, pool: int) -> bool:
    """Whether batches' aggregates are made in shared scans of the file. pool: bytes for all batches."""
    return pre_aggregation is not None and outgrows(x, pool)


def choose_strategy(stages: BatchStages, memory: BatchBytes | ScanBytes, read_threads: int = 2) -> ReadStrategy:
    """The strategy for these stages.

    Args:
        stages: Of the loader.
        memory: Of a batch, or of a shared scan where `scans` says so.
        read_threads: That gather rows in memory.
    """
    if isinstance(memory, ScanBytes):
        return SharedScans(stages, memory)
    return Superbatches(stages, memory) if on_disk(stages.load.x) else InMemory(stages, memory, read_threads)
