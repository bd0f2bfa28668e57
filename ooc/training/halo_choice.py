"""Which rows of the halo the processes of exact training compute themselves: as configured, or whichever takes less time.

That is measured once: a run goes on with what it began with, as another choice adds numbers up in another order.
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ooc.fullgraph.halo.exchange import bandwidth_of
from ooc.fullgraph.halo.part import HaloSettings, starts_of
from ooc.fullgraph.halo.reach import Choose
from ooc.fullgraph.halo.recompute import (
    CHOICES,
    HaloRows,
    LayerCost,
    RankRows,
    Way,
    WayName,
    cheapest,
    choice_of,
    compare_ways,
    layer_costs,
    step_seconds,
)
from ooc.fullgraph.placement.step_profile import profile
from ooc.fullgraph.step import FullGraph
from ooc.planning.over_ranks import share_sent
from ooc.runtime.ranks import Ranks
from ooc.stores.io.working import scratch_folder
from ooc.stores.sizes import format_bytes
from ooc.training import checkpoint

FILE = "halo.json"
"""in the run's directory: the choice that it began with"""


@dataclass(frozen=True)
class HaloChoice:
    """name, costs: the way, and the costs by which it tells rows apart; asked: what it was made for; ways: those that were
    compared, none where the choice is an earlier one's."""

    name: WayName
    costs: tuple[LayerCost, ...]
    asked: dict[str, Any]
    ways: tuple[Way, ...] = ()

    @property
    def choose(self) -> Choose:
        """Which rows are recomputed."""
        return choice_of(self.name, self.costs)

    def __str__(self) -> str:
        """In one line, for people."""
        texts = [f"{way.name}: {format_bytes(way.nbytes)} sent, {way.seconds:.3g} s" for way in self.ways]
        return f"rows of neighbors recomputed: {self.name} ({'; '.join(texts)})"

    def keep(self, folder: Path) -> None:
        """Write it into a run's directory."""
        checkpoint.write_json(folder / FILE, asdict(self))


def fixed_choice(name: WayName) -> HaloChoice:
    """One that needs no costs."""
    assert name in CHOICES
    return HaloChoice(name, (), {})


def kept_choice(folder: Path, asked: dict[str, Any]) -> HaloChoice | None:
    """The choice that a run began with, where it is still what is asked for. Raises ConfigError where the file is damaged."""
    found = checkpoint.read_json(folder / FILE, "delete it")
    if found is None or found.get("asked") != asked:
        return None
    costs = tuple(LayerCost(each["row"], each["edge"], each["sent"], tuple(each["nbytes"])) for each in found["costs"])
    return HaloChoice(found["name"], costs, asked)


def measured_choice(
    make: Callable[[Path], FullGraph], ranks: Ranks, out: Path, halo: HaloSettings, bandwidth: int | None, asked: dict[str, Any]
) -> HaloChoice:
    """The way that takes the least time, by a profile of a few seconds; the same on all ranks.

    Args:
        make: Exact training in a folder, all of whose rows are sent.
        ranks: The processes of the run.
        out: A folder on the disk where values may stand.
        halo: How rows are exchanged.
        bandwidth: Bytes a second that a process sends, None: measured.
        asked: What the choice is made for.
    """
    with scratch_folder(out, "ooc-halo") as folder, closing(make(folder)) as full:
        on_disk = full.most_bytes > full.room
        measured = ranks.together(lambda: profile(full, folder if on_disk else None))
        speed = float(bandwidth or bandwidth_of(ranks))
        own = layer_costs(full.shape, full.program, measured, speed, share_sent(halo, full.shape), on_disk)
        base = ranks.gather(step_seconds(full.program, measured))
        costs = average(ranks.gather(own))
        starts = starts_of(full.whole, ranks.world_size)
        rows = ranks.together(lambda: HaloRows(full.whole, starts, ranks.rank, full.shape))

        def rows_of(name: WayName, limit: float) -> list[RankRows] | None:
            found = ranks.gather(ranks.together(lambda: rows.of(name, costs, limit - base[ranks.rank])))
            return None if any(each is None for each in found) else found

        ways = compare_ways(rows_of, costs, base, speed)
    return HaloChoice(cheapest(ways).name, costs, asked, tuple(ways))


def average(costs: list[tuple[LayerCost, ...]]) -> tuple[LayerCost, ...]:
    """Of the ranks' costs, by layer."""
    found = []
    for each in zip(*costs, strict=True):
        row, edge = (float(np.mean([getattr(cost, name) for cost in each])) for name in ("row", "edge"))
        found.append(LayerCost(row, edge, each[0].sent, each[0].nbytes))
    return tuple(found)
