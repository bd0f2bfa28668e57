"""Deterministic kernels: what they are switched on for, and where they are not needed.

torch has one switch for the process. A run switches it on for its steps and for forwards whose outputs are scored or stored:

- On CUDA, what adds to one element from several places uses atomics otherwise, in any order: the gradient of `rows[index]`
  and of embeddings, `index_add_`, `scatter_add_`, `index_put_(accumulate=True)`, cumulative sums of floats, and cuBLAS with
  several streams, which `CUBLAS_WORKSPACE_CONFIG` fixes. Aggregations of `ooc` add in the order of the edges in any case.
- On the CPU, several threads otherwise sum the gradient of `rows[index]`, which a user's model may have, in any order; that
  of `rows.index_select(0, index)` needs no such care.

Not needed is it where results do not depend on an order: counts of scores, which are whole numbers (`order_free`). Threads that
load batches change nothing: the switch is the process's, and a step may be under way.

Memory that is allocated is not filled, which torch does with the switch by default: nothing reads it before it is written.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def use_deterministic_kernels(device: torch.device) -> None:
    """Switch them on for the process, with a warning in place of an error where torch has none."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@contextmanager
def order_free() -> Iterator[None]:
    """For operations whose results are the same in any order: any kernel may do them. In the thread of the steps, between them.

    >>> with order_free():
    ...     counts += torch.bincount(cells, minlength=len(counts))
    """
    if not torch.are_deterministic_algorithms_enabled():
        yield
        return
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
