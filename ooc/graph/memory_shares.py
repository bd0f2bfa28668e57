"""How the memory of a data set is divided among its loaders."""

import weakref
from collections.abc import Collection

from ooc.graph.mapped_topology import slot_bytes
from ooc.runtime.budget import Budget, divide
from ooc.runtime.machine import available_bytes
from ooc.runtime.memory import resident_bytes
from stores.arrays.members import Members
from stores.arrays.zarr_rows import BLOCK_BYTES, ForeignRows
from stores.dataset import Dataset

SCRATCH_BYTES = 64 * 2**20
"""Allowed for the buffers of the reads under way, of arrays that others wrote for two copies of a block of 16 MiB"""


WARM_SHARE = 3
"""Of the memory, a third at most for the topology's slots; where those to draw from fit, they are read in beforehand: edges on
the disk cost more than the batches their memory would hold (measured: twice the seconds a batch)"""


COLUMNS_SHARE, LOCKSTEP_SHARE = 32, 4
"""Where the slots do not fit, the edges stay on disk: of the memory, 1/32 for columns that are met in the map even so; of the
batches' memory, 1/4 for those that are drawn together"""


_budgets: "weakref.WeakKeyDictionary[Dataset, Budget]" = weakref.WeakKeyDictionary()


def budget_of(ds: Dataset, model: int = 0, columns: Collection[str] | None = None) -> Budget:
    """The division of the data set's memory, made once: all its loaders share it.

    model: bytes that training will add to a model that is there already (gradients, optimizer state). columns: of the graph,
    that loaders will look up; None: all it has.
    Without a limit (`memory=None`) the process may take half of what the machine has available.
    Raises BudgetError where nothing is left for batches.
    """
    if ds not in _budgets:
        baseline, _ = resident_bytes()
        memory, origin = ds.memory, "given"
        if memory is None:
            memory, origin = baseline + available_bytes() // 2, "(half of what is available)"
        labels = 0 if ds.labels is None else ds.labels.nbytes
        met = ds.graph.columns if columns is None else columns
        share = WARM_SHARE if ds.graph.sampled_bytes() <= memory // WARM_SHARE else COLUMNS_SHARE
        _budgets[ds] = divide(
            memory,
            baseline=baseline,
            topology=ds.graph.indptr.nbytes + min(slot_bytes(ds.graph, met), memory // share),
            labels=labels + len(ds.splits) * Members.nbytes_for(ds.num_nodes),
            model=model,
            scratch=SCRATCH_BYTES + _large_chunks(ds),
            origin=origin,
        )
    return _budgets[ds]


def _large_chunks(ds: Dataset) -> int:
    """Bytes that decoding features takes beyond `SCRATCH_BYTES`: chunks that somebody else made large come whole, and twice."""
    x = ds.stored("x") if ds.num_features else None
    return 2 * max(0, x.block_bytes - BLOCK_BYTES) if isinstance(x, ForeignRows) else 0
