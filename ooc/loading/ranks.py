"""The seed and the share of the input nodes of a loader: as given, else from torch's generator and process group."""

import operator
from typing import Any, NamedTuple

import torch

from ooc.runtime.messages import warn_user
from ooc.runtime.ranks import ranks_now
from ooc.stores.errors import ConfigError

WHOLE: dict[str, Any] = {"rank": 0, "world_size": 1, "edge_ids": False, "split_masks": False}
"""Options of the loaders of runs and passes: they have all nodes, also in a process group, and batches without what no model
reads"""


class SeedShare(NamedTuple):
    """Which part of each step's seeds a loader has, and the seed of their order and of the draws."""

    seed: int
    rank: int
    world_size: int
    seed_drawn: bool
    """whether torch's generator gave the seed, so that a loader may take that of a state it continues from"""


def share_of(
    seed: int | None, rank: int | None, world_size: int | None, *, own_ids: bool = False, in_order: bool = False
) -> SeedShare:
    """The share of a loader with these arguments, None where its user left one out.

    Without `rank` and `world_size` they are those of torch's process group, where one is initialized. Without `seed`, a loader
    of one rank draws it from torch's generator, as torch's DataLoader does, so that `torch.manual_seed` decides it; with
    several ranks, which must agree on the order, it is 0, as in torch's DistributedSampler.

    Args:
        own_ids: Whether the input nodes are an array, which a script may have divided among the ranks already.
        in_order: Whether the input nodes come in their order, as for evaluation; a share of them is then warned about.

    Raises:
        ConfigError: For a seed that is not a whole number, one of `rank` and `world_size` without the other, and an array of
            input nodes in a process group, if the two are left out.
    """
    if (rank is None) != (world_size is None) and (world_size or 2) > 1:
        raise ConfigError("give rank and world_size together, or neither of them")
    if rank is None and world_size is None:
        rank, world_size = _of_group(own_ids, in_order)
    rank, world_size = rank or 0, 1 if world_size is None else world_size
    if seed is None:
        drawn = world_size == 1
        return SeedShare(int(torch.empty((), dtype=torch.int64).random_()) if drawn else 0, rank, world_size, drawn)
    try:
        return SeedShare(operator.index(seed), rank, world_size, False)
    except TypeError:
        raise ConfigError(f"seed must be a whole number or None, not {seed!r}") from None


def _of_group(own_ids: bool, in_order: bool) -> tuple[int, int]:
    now = ranks_now()
    rank, size = now.rank, now.world_size
    if now.alone:
        return 0, 1
    if own_ids:
        raise ConfigError(
            f"input_nodes are an array and the process group has {size} ranks: give rank={rank}, world_size={size} if it is "
            "the same on all ranks, to be divided among them, or rank=0, world_size=1 if it holds the nodes of this rank only"
        )
    if in_order:
        warn_user(
            f"this loader has the share of rank {rank} of {size} in the process group; give rank=0, world_size=1 for all nodes"
        )
    return rank, size
