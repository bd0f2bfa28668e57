"""A model's outputs for all labelled edges of a store, batch by batch in the order of its slots."""

from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from ooc.config.edges import EdgeConfig
from ooc.layerwise.full_neighbor_pass import TABLE_COPIES, with_table_rows
from ooc.layerwise.layerwise_pass import Progress
from ooc.loading.link_neighbor_loader import LinkNeighborLoader
from ooc.loading.link_type import key_of
from ooc.loading.ranks import WHOLE
from ooc.metrics.tasks import LabelTask
from ooc.models.layers import evaluating
from ooc.models.user_models import edge_features_for
from ooc.runtime.keyed_random import Purpose, key
from ooc.runtime.pipeline import Stage
from ooc.runtime.transfer import HostCopy
from ooc.sampling.hetero_neighbor import edge_name
from ooc.stores.arrays.rows import AnyArray, Ids, Rows
from ooc.stores.dataset import Dataset
from ooc.stores.edge_set import EdgeSet
from ooc.stores.errors import ConfigError
from ooc.training.build import fan_outs_of
from ooc.training.edge_mode import EdgeModel
from ooc.training.predictions import external_ids, predictions, write_tables

EDGES = 256
"""of a batch, whatever the memory"""


class EdgeOutputs(NamedTuple):
    """The outputs of some edges."""

    e_id: Ids
    """int64[b]: positions in the input"""
    source: Ids
    """int64[b]: rows of the sources"""
    target: Ids
    outputs: AnyArray
    """float32[b, channels]"""


def edges_of(dataset: Dataset, run: Path, name: str | None) -> EdgeSet:
    """The labelled edges that a run has outputs of. name: of their type, None in a store of one.

    Raises ConfigError where the store has no such edges, or they have no labels.
    """
    key = dataset.edge_types[0] if name is None and not dataset.is_hetero else key_of(dataset.edge_types, name or "")
    if key is None:
        there = ", ".join(map(edge_name, dataset.edge_types))
        what = "edges of a homogeneous store" if name is None else f"edges {name}"
        raise ConfigError(
            f"{run} gives outputs of {what}, and {dataset.path} has the types {there}: give a store with these edges"
        )
    edges = dataset.edges(key)
    if edges.labels is None:
        which = f"edges {edge_name(key)}" if dataset.is_hetero else "edges"
        raise ConfigError(f"the {which} of {dataset.path} have no labels, which outputs are of: ingest it with `edge_label`")
    return edges


def all_edges(
    config: EdgeConfig, model: EdgeModel, edges: EdgeSet, ds: Dataset, tables: Mapping[str, Rows], device: torch.device
) -> LinkNeighborLoader:
    """A loader of all edges of a type in the order of slots, each with a tree of its own, which that edge alone is left out of.

    tables: the rows of embedding tables. Raises ConfigError for a run that draws neighborhoods by weight, which trees are not.
    """
    if config.weight_attr is not None:
        raise ConfigError(f"{config.out} draws by weight_attr, and trees of edges are not drawn so: train without weight_attr")
    given: dict[str, Any] = {"edge_features": edge_features_for(model.encoder, ds), **WHOLE}
    if tables:
        given["beside"] = {name: TABLE_COPIES * rows.row_bytes for name, rows in tables.items()}
    loader = LinkNeighborLoader(
        ds,
        fan_outs_of(config.eval_fanout, ds),
        (edges.key, None),
        replace=config.replace,
        disjoint=True,
        edge_label_attr=model.decoder.edge is not None,
        batch_size=EDGES,
        seed=key(config.seed, Purpose.EVALUATE) >> 1,
        device=device,
        **given,
    )
    if tables:
        loader.then = Stage("tables", partial(with_table_rows, tables))
    return loader


def outputs_of(
    model: EdgeModel, loader: LinkNeighborLoader, edges: EdgeSet, progress: Progress | None
) -> Iterator[EdgeOutputs]:
    """Yield the model's outputs for the loader's edges, on the CPU; of a graph that was made undirected, each edge once, from
    the smaller to the larger row."""
    done, count = 0, loader.num_seeds
    first, _, last = edges.key
    with closing(iter(loader)) as batches, evaluating(model):
        for batch in batches:
            own = model.edges_of(batch)
            nodes = (batch, batch) if model.edge_type is None else (batch[first], batch[last])
            parts = [part.n_id[end] for part, end in zip(nodes, own.edge_label_index, strict=True)]
            found, e_id, *ends = HostCopy([model(batch).float(), own.input_id, *parts]).arrays()
            kept = ends[0] <= ends[1] if edges.undirected else np.ones(len(found), bool)
            yield EdgeOutputs(e_id[kept], ends[0][kept], ends[1][kept], found[kept])
            done += len(found)
            if progress is not None:
                progress("edges", done, count)


def write(
    out: Path, outputs: Iterator[EdgeOutputs], dataset: Dataset, edges: EdgeSet, task: LabelTask, class_names: list[str] | None
) -> int:
    """Write the table of `predictions` of all edges, with the user's own ids of their ends; returns how many there are."""
    source, target, count = dataset.nodes(edges.key[0]), dataset.nodes(edges.key[2]), 0

    def tables() -> Iterator[pa.Table]:
        nonlocal count
        for each in outputs:
            count += len(each.e_id)
            table = predictions(each.e_id, torch.from_numpy(each.outputs), task.kind, class_names)
            table = table.add_column(1, "source", external_ids(source, each.source))
            yield table.add_column(2, "target", external_ids(target, each.target))

    write_tables(out, tables())
    return count
