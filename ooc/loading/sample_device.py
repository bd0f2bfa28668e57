"""Where neighbors are sampled, on the GPU that batches go to or by the CPU: decided here and nowhere else."""

from typing import Any, Literal, get_args

import torch

from ooc.graph.aggregation import PreAggregation
from ooc.loading.collate import CollateStage
from ooc.loading.input_links import InputLinks
from ooc.loading.sampling import Sampling
from ooc.loading.stages import Order, SamplePlace
from ooc.runtime.memory_plan import DEVICE_TOPOLOGY_SHARE
from ooc.sampling.device_topology import device_bytes, is_there
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError
from ooc.stores.sizes import format_bytes

SampleDevice = Literal["auto", "cpu", "cuda"]


def checked_device(asked: Any) -> SampleDevice:
    """What `sample_device` is. Raises ConfigError for another value."""
    if asked not in get_args(SampleDevice):
        raise ConfigError(f"sample_device {asked!r} is unknown: use auto, cpu or cuda")
    return asked


def sample_place(
    ds: Dataset,
    order: Order,
    collate: CollateStage,
    sampling: Sampling,
    device: torch.device | None,
    pre_aggregation: PreAggregation | None,
    edges_on_disk: bool,
    rows_on_disk: bool,
) -> SamplePlace:
    """Where neighbors are sampled; what batches are does not depend on it.

    Args:
        ds: The data set.
        order: Of the seeds.
        collate: What makes the batches.
        sampling: What is sampled, and where the user wants it.
        device: Where batches go.
        pre_aggregation: What batches have in place of feature rows.
        edges_on_disk: Whether the edges do not fit in memory.
        rows_on_disk: Whether rows of batches are read from disk.

    Raises:
        ConfigError: It is to be done on the GPU and cannot.
    """
    asked = sampling.device
    if asked == "cpu":
        return SamplePlace(None, "it was asked for")
    if device is None or device.type != "cuda":
        if asked == "cuda":
            if not torch.cuda.is_available():
                raise ConfigError("`sample_device='cuda'`: torch sees no CUDA device here; use auto or cpu")
            raise ConfigError("`sample_device='cuda'` is for batches on a GPU: give `device='cuda'` too, or leave it out")
        return SamplePlace(None, "batches go there")
    why = _kept_from_it(ds, order, collate, sampling, edges_on_disk, rows_on_disk)
    if why is None and asked == "auto" and pre_aggregation is not None:
        why = "the first layer's aggregates need the edges there"
    if why is None and not is_there(ds.graph, device):
        need, free = device_bytes(ds.graph), int(torch.cuda.mem_get_info(device)[0])
        if need > (free // DEVICE_TOPOLOGY_SHARE if asked == "auto" else free):
            why = f"the topology takes {format_bytes(need)} of the GPU, which has {format_bytes(free)} free"
    if why is None:
        return SamplePlace(device, f"the topology takes {format_bytes(device_bytes(ds.graph))} of its memory")
    if asked == "cuda":
        raise ConfigError(f"`sample_device='cuda'` cannot be: {why}; leave it out, or set it to cpu")
    return SamplePlace(None, why)


def _kept_from_it(
    ds: Dataset, order: Order, collate: CollateStage, sampling: Sampling, edges_on_disk: bool, rows_on_disk: bool
) -> str | None:
    """Why the GPU cannot sample, whatever its memory; None if it can."""
    reasons = {
        "the graph has several types": ds.is_hetero,
        "batches of links leave their own edges out": isinstance(order.nodes, InputLinks),
        "edges of other splits are left out": bool(order.nodes.held_out),
        "LABOR draws by the random numbers of sources": sampling.labor is not None,
        "edges are drawn by weight": sampling.weight is not None,
        "each seed has a tree of its own": sampling.disjoint,
        f"edges are {sampling.subgraph_type}": sampling.whole,
        "the edges do not fit in the host's memory": edges_on_disk,
        "features are read from disk for many batches at once, which wait in the host's memory": rows_on_disk,
        "transform takes batches in the host's memory": collate.transform is not None,
    }
    return next((why for why, is_so in reasons.items() if is_so), None)
