"""What a rank has of exact training: its range of nodes, and the exchange of its halo with the other ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ooc.fullgraph.halo.cuts import balanced_cuts
from ooc.fullgraph.halo.exchange import HaloExchange, HaloLists, SampledHalo
from ooc.fullgraph.halo.local_graph import LocalDataset
from ooc.fullgraph.halo.reach import Choose, HaloEdges, Ints, reach_of
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

    def exchange(self, ranks: Ranks, lists: Sequence[HaloLists]) -> HaloExchange:
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
        """Of memory for rows of earlier epochs that a layer reads. forward, backward: bytes of a row that is exchanged each
        way."""
        if self.kind != "stale":
            return 0
        send, receive = (sum(map(len, each)) for each in (lists.send, lists.receive))
        sent = 0 if self.tolerance is None else send * forward + receive * backward
        return receive * forward + send * backward + sent


EXACT = HaloSettings()
"""all rows in every epoch"""


@dataclass(frozen=True)
class Part:
    """dataset: of the nodes that a rank computes, all of one process; numbering: of these in the whole graph; lists: by layer,
    what is exchanged for it to read, None of one process; recomputed: as of `ModelShape`; nbytes: of memory for what one
    process has in the store."""

    dataset: Dataset
    numbering: Numbering
    lists: list[HaloLists] | None
    recomputed: tuple[int, ...]
    nbytes: int


def part_of(dataset: Dataset, ranks: Ranks, folder: Path | None, shape: ModelShape, choose: Choose) -> Part:
    """The part of this rank, agreed with the others. folder: for edges that do not fit the memory; shape: of the model on the
    whole graph; choose: which rows of the halo are recomputed. Raises ConfigError where there are fewer nodes than ranks,
    StoreError where the disk fails."""
    if ranks.alone:
        return Part(dataset, WHOLE, None, (), 0)
    starts = starts_of(dataset, ranks.world_size)
    first, stop = starts[ranks.rank : ranks.rank + 2].tolist()

    def local() -> LocalDataset:
        edges = HaloEdges(dataset)
        halo = edges.outside(first, stop)
        return LocalDataset(dataset, reach_of(edges, first, stop, halo, len(shape.layers), shape.mapped, choose), folder)

    own = ranks.together(local)
    lists = [HaloLists.agreed(ranks, starts, own.reach, layer) for layer in range(len(shape.layers))]
    return Part(own, own.numbering, lists, own.reach.recomputed, own.nbytes)


def starts_of(dataset: Dataset, count: int) -> Ints:
    """int64[count + 1]: the ranges of nodes of so many ranks. Raises ConfigError where there are fewer nodes."""
    if dataset.num_nodes < count:
        raise ConfigError(f"{dataset.path} has {dataset.num_nodes} nodes for {count} processes: start fewer")
    return balanced_cuts(dataset.graph.indptr, count)
