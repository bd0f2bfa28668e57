"""Work on flat arrays by all of torch's threads."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch

from ooc.runtime.crew import in_pieces

LEAST = 2**20
"""elements for which another thread is worth its waking"""


def in_parts(work: Callable[[int, int], None], size: int, unit: int = 1) -> None:
    """Call work(begin, end) for consecutive parts of 0..size, one for each of torch's threads.

    For kernels that release the GIL and treat elements independently. Small sizes are one part, in the calling thread.

    Args:
        work: Called in several threads at once.
        size: Number of elements.
        unit: Numbers in an element, such as the columns of a row.

    >>> in_parts(lambda begin, end: add_one(x[begin:end]), len(x))
    """
    threads = max(1, min(torch.get_num_threads(), size * unit // LEAST))
    if threads == 1:
        work(0, size)
        return
    bounds = [size * i // threads for i in range(threads + 1)]
    in_pieces([partial(work, *part) for part in pairwise(bounds)])
