"""PURE: how many threads of a loader sample batches and gather rows in memory, where nobody says.

Batches do not depend on it. With two cores one samples and two gather, as the model takes the rest; a GPU is fed by half of
the cores. More threads than those that keep up sleep: a stage's queue is bounded.
"""

from collections.abc import Sequence
from typing import NamedTuple

MOST = 8
_CORES_BESIDE, _CORES_FED = 4, 2
"""a thread for so many cores, where the model computes on them, and where a GPU does"""
_EDGE_BYTES = 64
"""of an edge being drawn, hash tables included (see `SampleStage.drawing_bytes`)"""


class LoaderThreads(NamedTuple):
    """Threads that sample batches, and that gather rows in memory; None: as many as `settled` finds."""

    sample: int | None
    read: int | None

    @property
    def given(self) -> dict[str, int]:
        """Those that somebody has said, by the names of the loaders' arguments."""
        named = {"sample_threads": self.sample, "read_threads": self.read}
        return {name: number for name, number in named.items() if number is not None}

    def settled(self, cores: int, on_gpu: bool, room: int, edges: int | None) -> tuple[int, int]:
        """(threads that sample, threads that gather).

        Args:
            cores: Cores that the process may use.
            on_gpu: Whether the model computes on a GPU.
            room: Bytes of memory for the batches being drawn (`MemoryPlan.drawn_ahead`).
            edges: Edges of a batch at most; None where that is not known, or a thread keeps draws: one thread samples.

        >>> LoaderThreads(None, None).settled(cores=16, on_gpu=True, room=10**8, edges=500_000)
        (3, 8)
        """
        helpers = min(MOST, cores // (_CORES_FED if on_gpu else _CORES_BESIDE))
        fitting = 1 if edges is None else room // max(1, _EDGE_BYTES * edges)
        sample = max(1, min(helpers, fitting)) if self.sample is None else self.sample
        return sample, max(2, helpers) if self.read is None else self.read


def most_edges(seeds: int, fanouts: Sequence[Sequence[int]], edges: int, replace: bool = False) -> int:
    """Edges of a batch at most, of a graph with `edges`.

    fanouts: neighbors drawn per hop, of several edge types those of each; replace: whether an edge may be drawn again.

    >>> most_edges(10, [[3, 2]], edges=1000)
    90
    """
    total, nodes = 0, seeds
    for counts in zip(*fanouts, strict=True):
        drawn = nodes * sum(counts)
        nodes = edges if -1 in counts else drawn if replace else min(edges, drawn)
        total += nodes
    return total
