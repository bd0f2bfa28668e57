"""What a rank has of exact training: its range of nodes, and the exchange of its halo with the other ranks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ooc.fullgraph.halo.cuts import balanced_cuts
from ooc.fullgraph.halo.exchange import HaloExchange, HaloLists, SampledHalo
from ooc.fullgraph.halo.local_graph import LocalDataset
from ooc.fullgraph.halo.stale import StaleHalo
from ooc.layerwise.numbering import WHOLE, Numbering
from ooc.layerwise.pass_plan import FEATURES, ModelShape
from ooc.runtime.ranks import Ranks
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError


@dataclass(frozen=True)
class HaloSettings:
    """How rows of the halo are exchanged. kind: all of them ("exact"), a share `rate` that each epoch draws anew ("sampled"),
    or those that are `every` epochs old or drifted by more than `tolerance` ("stale"); see `FullConfig`."""

    kind: Literal["exact", "sampled", "stale"] = "exact"
    rate: float = 1.0
    every: int = 1
    tolerance: float | None = None

    def exchange(self, ranks: Ranks, lists: HaloLists) -> HaloExchange:
        """What exchanges them so."""
        if self.kind == "sampled":
            return SampledHalo(ranks, lists, self.rate)
        return HaloExchange(ranks, lists) if self.kind == "exact" else StaleHalo(ranks, lists, self.every, self.tolerance)

    def check(self, shape: ModelShape) -> None:
        """Raise ConfigError for a layer that cannot do without rows."""
        for index, layer in enumerate(shape.layers):
            if self.kind == "sampled" and layer.kind is None and shape.rows(index) != FEATURES:
                raise ConfigError(f"halo = 'sampled': layer {index} does not add up its neighbors' rows; choose exact or stale")

    def kept_bytes(self, lists: HaloLists, forward: int, backward: int) -> int:
        """Of memory for rows of earlier epochs. forward, backward: bytes of a row of all values that are exchanged each way."""
        if self.kind != "stale":
            return 0
        send, receive = (sum(map(len, each)) for each in (lists.send, lists.receive))
        sent = 0 if self.tolerance is None else send * forward + receive * backward
        return receive * forward + send * backward + sent


EXACT = HaloSettings()
"""all rows in every epoch"""


@dataclass(frozen=True)
class Part:
    """dataset: of the nodes that a rank computes, all of one process; numbering: of these in the whole graph; lists: of its
    halo, None of one process; nbytes: of memory for what one process has in the store."""

    dataset: Dataset
    numbering: Numbering
    lists: HaloLists | None
    nbytes: int


def part_of(dataset: Dataset, ranks: Ranks, folder: Path | None) -> Part:
    """The part of this rank, agreed with the others. folder: for edges that do not fit the memory. Raises ConfigError where
    there are fewer nodes than ranks, StoreError where the disk fails."""
    if ranks.alone:
        return Part(dataset, WHOLE, None, 0)
    if dataset.num_nodes < ranks.world_size:
        raise ConfigError(f"{dataset.path} has {dataset.num_nodes} nodes for {ranks.world_size} processes: start fewer")
    starts = balanced_cuts(dataset.graph.indptr, ranks.world_size)
    first, stop = starts[ranks.rank : ranks.rank + 2].tolist()
    local = ranks.together(lambda: LocalDataset(dataset, first, stop, folder))
    return Part(local, local.numbering, HaloLists.agreed(ranks, starts, local.node), local.nbytes)
