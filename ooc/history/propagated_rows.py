"""The rows of a table behind LightGCN's propagation, written by node for what ranks and lists them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from pathlib import Path

import numpy as np
from torch import Tensor

from ooc.layerwise.propagation import SymmetricAdjacency, propagate
from ooc.layerwise.row_norms import with_norms_to
from ooc.stores.arrays.mutable_rows import DiskRows
from ooc.stores.arrays.rows import Ids
from ooc.stores.io.atomic import remove_tree

_ROWS_AT_ONCE = 2**14


def write_propagated(
    path: Path,
    columns: Sequence[int],
    load: Callable[[int], Tensor],
    adjacency: SymmetricAdjacency,
    layers: int,
    norm_power: float = 1.0,
    computing: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> DiskRows:
    """Write all rows behind the propagation; of several blocks of columns, each in a file beside `path` first.

    Args:
        path: A directory to make; what is there goes.
        columns: Of each block.
        load: A block's rows, float32[N, columns].
        adjacency: Of the links that carry messages.
        layers: Of the propagation.
        norm_power: Norms of the rows that are written are raised to it, see `with_norms_to`.
        computing: What everything but `load` is done in.

    Returns:
        float32[N, width], open.

    Raises:
        StoreError: The disk is full.

    >>> write_propagated(run / "embeddings", [32, 32], blocks.rows, adjacency, layers=3).shape
    (70839, 64)
    """
    remove_tree(path)
    paths = [path.with_name(f"{path.name}-{block}") for block in range(len(columns))] if len(columns) > 1 else [path]
    parts: list[DiskRows] = []
    with ExitStack() as opened:
        for block, own in enumerate(paths):
            rows = load(block)
            with computing():
                if len(paths) > 1:
                    opened.callback(remove_tree, own)
                remove_tree(own)
                part = DiskRows.create(own, tuple(rows.shape), "float32")
                opened.enter_context(closing(part))
                found = propagate(adjacency, rows, layers).numpy()
                for node in _pieces(len(found)):
                    part.write(node, with_norms_to(found[node], norm_power if len(paths) == 1 else 1))
                parts.append(part)
        if len(paths) > 1:
            with computing():
                _join(path, parts, norm_power)
    return DiskRows.open(path)


def _join(path: Path, parts: Sequence[DiskRows], norm_power: float) -> None:
    """Write the columns of all parts beside each other; only then their norms are known."""
    rows = parts[0].shape[0]
    with closing(DiskRows.create(path, (rows, sum(part.shape[1] for part in parts)), "float32")) as whole:
        for node in _pieces(rows):
            columns = [np.empty((len(node), part.shape[1]), np.float32) for part in parts]
            for part, out in zip(parts, columns, strict=True):
                part.read(node, out)
            whole.write(node, with_norms_to(np.concatenate(columns, 1), norm_power))


def _pieces(count: int) -> Iterator[Ids]:
    for start in range(0, count, _ROWS_AT_ONCE):
        yield np.arange(start, min(start + _ROWS_AT_ONCE, count))
