"""`ClusterLoader` and `SaintLoader`: batches that are subgraphs with every edge between their nodes.

Every node of a batch is computed in every layer, so a batch has one block, the same for all layers, and nothing is drawn per
layer. They go through the same pipeline as sampled neighborhoods.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch_geometric.data import Data

from ooc.graph.blocks import Sampler, Subgraph
from ooc.loading.arguments import InputNodes, check_pyg_arguments, renamed
from ooc.loading.base import PREFETCH
from ooc.loading.collate import Collator, LoadedBatch, SampledBatch
from ooc.loading.feature_gather import Gather
from ooc.loading.part_loader import MakeSampler, PartCollate, SubgraphLoader, part_sampler
from ooc.loading.sample_stage import Order, ReadCounts, SampleStage
from ooc.runtime.keyed_random import Cursor
from ooc.runtime.memory_plan import MemoryPlan
from ooc.runtime.transfer import pins
from ooc.sampling.cluster import Edges, parts_of
from ooc.sampling.saint import Draw, Kind, SaintSampler, check
from ooc.sampling.saint_norm import Normalisation
from stores.arrays.members import Members
from stores.dataset import Dataset
from stores.errors import ConfigError


@dataclass(frozen=True)
class SubgraphCollate(PartCollate):
    """Collates induced subgraphs.

    Args:
        train: Nodes whose labels count, None: all.
        norm: Of GraphSAINT's.
    """

    train: Members | None = None
    norm: Normalisation | None = None

    def data(self, loaded: LoadedBatch) -> Data:
        """The batch before `transform`."""
        batch, node = super().data(loaded), loaded.drawn.subgraph.node
        if self.train is not None:
            batch.input_mask = torch.from_numpy(self.train.contains(node))
        if self.norm is not None:
            self._normalise(batch, node, self.norm)
        return batch

    def _normalise(self, batch: Data, node: NDArray[np.int64], norm: Normalisation) -> None:
        block = batch.blocks[0]
        degree = block.degree[: block.num_dst].float()
        block = block._replace(share=block.stands_for / degree[block.edge_index[1]])
        batch.blocks = [block] * self.layers
        batch.edge_norm = block.stands_for
        count = len(self.train) if self.train is not None else len(norm.counts().nodes)
        batch.node_norm = torch.from_numpy(norm.counts().weights(node) / np.float32(count))


class _InducedLoader(SubgraphLoader):
    """What the two loaders share: PyG's arguments."""

    def __init__(
        self,
        data: Dataset,
        order: Order,
        make_sampler: MakeSampler,
        arguments: dict[str, Any],
        *,
        induced: bool,
        input_nodes: str | None,
        num_layers: int,
        transform: Callable[[Data], Any] | None,
        pin_memory: bool,
        prefetch_factor: int | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        edge_ids: bool,
        width: int,
        budget: MemoryPlan | None,
        sample_threads: int,
    ) -> None:
        own = list(inspect.signature(type(self)).parameters)
        check_pyg_arguments(arguments, own, type(self).__name__)
        numbers = (order.batch_size, order.world_size, order.rank, num_layers, sample_threads)
        if not all(isinstance(n, Integral) for n in numbers):
            raise ConfigError(
                f"batch_size, world_size, rank, num_layers and sample_threads must be whole numbers, not {numbers}"
            )
        if not 0 <= order.rank < order.world_size or min(num_layers, sample_threads) < 1:
            raise ConfigError("world_size, num_layers and sample_threads must be 1 or more, and rank one of 0..world_size-1")
        place = None if device is None else torch.device(device)
        pin = pins(pin_memory) and not (place is not None and place.type == "cuda")
        train = None if input_nodes is None else data.members(input_nodes)
        gather = Gather(data.encoding("x"), dtype) if data.num_features else None
        collator = Collator(data.graph, gather, edge_ids=edge_ids, induced=induced)
        super().__init__(
            data,
            order,
            make_sampler,
            SubgraphCollate(collator, order.nodes, transform, pin, layers=int(num_layers), train=train),
            train=train,
            width=width,
            device=place,
            budget=budget,
            prefetch=max(1, prefetch_factor or PREFETCH),
            sample_threads=sample_threads,
        )


class ClusterLoader(_InducedLoader):
    """Mini-batches of Cluster-GCN (Chiang et al., 2019): `batch_size` parts each, with all edges between their nodes.

    An epoch has every part once, grouped anew in a keyed random order where `shuffle` says so. Parts are those of the store
    (`ooc ingest --parts`), or `num_parts` equal ranges of node ids where it has none. As in the paper and in PyG, a batch
    counts as a graph of its own: degrees (`blocks[0].degree`) and sums of weights are the batch's.
    input_nodes: the split to train on. `y` of any other node is then unknown (-1, NaN), so that a loss which leaves those out
    trains on the split alone, and `input_mask` (bool[n]) tells them apart. num_layers: `blocks` has so many, one and the same.
    PyG's and DataLoader's other arguments are taken as NeighborLoader takes them, and so are seed, rank, world_size, device,
    dtype, edge_ids, budget and sample_threads; width: of all rows that the model makes for a node, which memory is then kept
    for.

    A batch is a `Data` with x [n, f], y [n], edge_index int64[2, e], n_id int64[n] (ascending), e_id int64[e], edge_weight
    of a weighted graph, batch_size (n), input_id (n_id), and `blocks`. Features of a part are read front to back.
    Raises ConfigError for an argument that does not fit; while iterating, BudgetError for a batch that does not fit.

    >>> loader = ClusterLoader(ds, batch_size=20, shuffle=True, input_nodes="train")
    >>> for batch in loader:
    ...     loss = F.cross_entropy(model(batch.x, batch.edge_index)[batch.input_mask], batch.y[batch.input_mask])
    """

    @renamed(world="world_size")
    def __init__(
        self,
        data: Dataset,
        batch_size: int = 1,
        shuffle: bool = False,
        num_parts: int | None = None,
        input_nodes: str | None = None,
        num_layers: int = 1,
        transform: Callable[[Data], Any] | None = None,
        drop_last: bool = False,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        *,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        edge_ids: bool = True,
        width: int = 0,
        budget: MemoryPlan | None = None,
        sample_threads: int = 1,
        **arguments: Any,
    ) -> None:
        self.parts = parts_of(data.graph, num_parts)
        count = len(self.parts) - 1
        if not isinstance(batch_size, Integral) or not 1 <= batch_size <= count:
            raise ConfigError(f"a batch of {batch_size} parts: give 1 to {count}, as many as there are")
        super().__init__(
            data,
            Order(InputNodes(count), int(batch_size), shuffle, seed, drop_last, rank, world_size),
            part_sampler(data.graph, self.parts, False),
            {"num_workers": num_workers, **arguments},
            induced=True,
            input_nodes=input_nodes,
            num_layers=num_layers,
            transform=transform,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
            device=device,
            dtype=dtype,
            edge_ids=edge_ids,
            width=width,
            budget=budget,
            sample_threads=sample_threads,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.parts) - 1} parts, {self._order.batch_size} a batch)"

    def _identity(self) -> dict[str, Any]:
        return {**super()._identity(), "mode": "cluster", "parts": len(self.parts) - 1}


@dataclass(frozen=True)
class _KeyedSampler:
    """GraphSAINT's sampler as the pipeline calls it: a step's key is all that a subgraph depends on."""

    sampler: SaintSampler
    counts: ReadCounts

    def counting(self, counts: ReadCounts) -> "_KeyedSampler":
        """The same sampler, whose bytes are counted in `counts`."""
        return replace(self, counts=counts)

    def sample(self, seeds: NDArray[np.int64], key: int) -> Subgraph:
        found = self.sampler.draw(key)
        self.counts.add_topology(found.nbytes)
        return found.subgraph


@dataclass(frozen=True)
class SaintSampleStage(SampleStage):
    """Draws GraphSAINT's subgraphs, with what their edges stand for."""

    norm: Normalisation | None = None

    def sample(self, cursor: Cursor) -> SampledBatch:
        """The batch at `cursor`."""
        assert self.norm is not None
        drawn = super().sample(cursor)
        stands_for, nbytes = self.norm.counts().stands_for(drawn.subgraph)
        self.counts.add_topology(nbytes)
        return replace(drawn, subgraph=replace(drawn.subgraph, stands_for=stands_for))


class SaintLoader(_InducedLoader):
    """Mini-batches of GraphSAINT (Zeng et al., 2020): random subgraphs, normalised so that they stand for the whole graph.

    sampler: "walk" (`batch_size` roots, `walk_length` steps each), "node" (`batch_size` draws of nodes) or "edge" (of edges);
    see `ooc.sampling.saint`. num_steps: subgraphs an epoch; None: as many as draw N nodes. Before the first batch subgraphs are
    drawn until they have `sample_coverage` times N nodes, and what they count is kept in `save_dir` (None: until the loader
    goes). `node_norm` (float32[n]) then makes sum(node_norm * loss of each node) of the input nodes the mean loss over all of
    them, on average; `edge_norm` (float32[e]) makes sums over in-edges those of the whole graph: our models take it from
    `blocks` (mean and GCN's sum alike; attention has no such coefficient), degrees there are the whole graph's.
    Other arguments, the fields of a batch and the errors: as ClusterLoader's.

    >>> loader = SaintLoader(ds, "walk", batch_size=2000, walk_length=2, input_nodes="train", num_layers=3)
    >>> for batch in loader:
    ...     each = F.cross_entropy(model(batch.x, batch.blocks), batch.y, ignore_index=-1, reduction="none")
    ...     loss = (each * batch.node_norm).sum()
    """

    @renamed(world="world_size")
    def __init__(
        self,
        data: Dataset,
        sampler: Kind = "walk",
        batch_size: int = 2000,
        walk_length: int = 2,
        num_steps: int | None = None,
        sample_coverage: float = 50,
        save_dir: Path | str | None = None,
        input_nodes: str | None = None,
        num_layers: int = 1,
        transform: Callable[[Data], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        *,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        edge_ids: bool = True,
        width: int = 0,
        budget: MemoryPlan | None = None,
        sample_threads: int = 1,
        **arguments: Any,
    ) -> None:
        self.how = check(Draw(sampler, batch_size, walk_length if sampler == "walk" else 1))
        steps = -(-data.num_nodes // self.how.most_nodes) if num_steps is None else num_steps
        if steps < 1 or not sample_coverage > 0:
            raise ConfigError(f"num_steps {steps} and sample_coverage {sample_coverage} must be more than 0")
        made: list[SaintSampler] = []

        def make_sampler(edges: Edges | None, most: int, row_bytes: int, counts: ReadCounts) -> Sampler:
            made.append(SaintSampler(data.graph, self.how, edges, most, row_bytes))
            return _KeyedSampler(made[0], counts)

        super().__init__(
            data,
            Order(InputNodes(steps * world_size), 1, False, seed, False, rank, world_size),
            make_sampler,
            {"num_workers": num_workers, **arguments},
            induced=False,
            input_nodes=input_nodes,
            num_layers=num_layers,
            transform=transform,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
            device=device,
            dtype=dtype,
            edge_ids=edge_ids,
            width=width,
            budget=budget,
            sample_threads=sample_threads,
        )
        self._norm_of = {**self.how._asdict(), "seed": seed, "coverage": sample_coverage, "store": data.fingerprint}
        self._folder = TemporaryDirectory(prefix="ooc-saint-") if save_dir is None else None
        folder = Path(self._folder.name) / "norm" if self._folder is not None else Path(str(save_dir))
        engine = "auto" if data.engine == "gds" else data.engine
        drawing, stages = made[0]._replace(row_bytes=0), self._strategy.stages
        counted = stages.counts.add_topology
        self._norm = norm = Normalisation(drawing, folder, seed, sample_coverage, self._norm_of, engine, counted)
        sample = SaintSampleStage(**{**vars(stages.sample), "norm": norm})
        collate = replace(cast(SubgraphCollate, stages.collate), norm=norm)
        self._strategy = replace(self._strategy, stages=replace(stages, sample=sample, collate=collate))

    def prepare(self) -> None:
        """Count how often nodes and edges come now, and not at the first batch. Raises as iterating does."""
        self._norm.counts()

    def close(self) -> None:
        """Give back the files of the coefficients; idempotent."""
        self._norm.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.how}, {len(self)} batches)"

    def _identity(self) -> dict[str, Any]:
        return {**super()._identity(), "mode": "saint", **self._norm_of}
