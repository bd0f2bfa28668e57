"""A model's outputs for all graphs of a store of many, batch by batch in the order of the store."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ooc.config.graphs import GraphConfig
from ooc.layerwise.layerwise_pass import Progress
from ooc.loading.graph_loader import GraphLoader
from ooc.metrics.tasks import LabelTask
from ooc.models.graph_models import forward_graphs
from ooc.models.layers import evaluating
from ooc.runtime.transfer import HostCopy
from ooc.stores.arrays.rows import AnyArray, Ids
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError
from ooc.training.graph_mode import unread
from ooc.training.predictions import write_parts

Outputs = Iterator[tuple[Ids, AnyArray]]
"""(graphs int64[b], outputs float32[b, channels])"""


def check_graphs(dataset: Dataset, config: GraphConfig) -> None:
    """Raise ConfigError for a store of one graph."""
    if dataset.manifest.graphs is None:
        raise ConfigError(f"{dataset.path} holds one graph, and {config.out} is a model of whole graphs: give a store of many")


def all_graphs(model: nn.Module, dataset: Dataset, batch_size: int, device: torch.device) -> GraphLoader:
    """A loader of all graphs in order, with what the model takes of them."""
    left_out = unread(model, dataset, labels=False)
    return GraphLoader(dataset, batch_size, exclude_keys=left_out, seed=0, rank=0, world_size=1, device=device)


def outputs_of(model: nn.Module, loader: GraphLoader, progress: Progress | None) -> Outputs:
    """Yield the model's outputs for the loader's graphs, on the CPU."""
    done, count = 0, len(loader.graphs)
    with closing(iter(loader)) as batches, evaluating(model):
        for batch in batches:
            found = forward_graphs(model, batch)
            graph, outputs = HostCopy([batch.graph_id, found.float()]).arrays()
            yield graph, outputs
            done += batch.num_graphs
            if progress is not None:
                progress("graphs", done, count)


def write(out: Path, outputs: Outputs, dataset: Dataset, task: LabelTask, names: list[str] | None) -> None:
    """Write the table of `predictions` of all graphs, a batch at a time."""
    named: Iterator[tuple[Any, AnyArray]] = ((dataset.graphs.external(graph), found) for graph, found in outputs)
    write_parts(out, named, task.kind, names)
