"""Where neighbors are sampled, on the GPU that batches go to or by the CPU: decided here and nowhere else."""

from typing import Any, Literal, NamedTuple, get_args

import torch

from ooc.graph.aggregation import PreAggregation
from ooc.loading.collate import CollateStage
from ooc.loading.input_links import InputLinks
from ooc.loading.pooled_load import counts_there
from ooc.loading.sample_stage import Order, SamplePlace
from ooc.loading.sampling import Sampling
from ooc.runtime.memory_plan import DEVICE_TOPOLOGY_SHARE
from ooc.sampling import host_edges
from ooc.sampling.device_topology import device_bytes, is_there
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError
from ooc.stores.graph import Graph
from ooc.stores.sizes import format_bytes

SampleDevice = Literal["auto", "cpu", "cuda"]


class PoolRoom(NamedTuple):
    """What is known of the feature rows on the GPU, once that is chosen. whole: whether all are there; left: bytes beside them
    and the batches."""

    whole: bool
    left: int


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
    pool: PoolRoom | None,
    edges_room: int = 0,
) -> SamplePlace:
    """Where neighbors are sampled; what batches are does not depend on it.

    It is asked twice for batches on a GPU: before rows are chosen to stay there, and, where the CPU was the answer, once more
    when that is known. With all rows there none are planned on the host, and first-layer aggregates need no edges there.

    Args:
        ds: The data set.
        order: Of the seeds.
        collate: What makes the batches.
        sampling: What is sampled, and where the user wants it.
        device: Where batches go.
        pre_aggregation: What batches have in place of feature rows.
        edges_on_disk: Whether the edges do not fit in memory.
        rows_on_disk: Whether rows of batches are read from disk, beside those of a whole pool.
        pool: The rows that stay on the GPU; None: nobody knows yet.
        edges_room: Bytes of the host's memory that edges may have, if they do not fit the GPU's.

    Raises:
        ConfigError: It is to be done on the GPU and cannot, whatever rows stay there.
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
        why = _edges_stay(ds, pre_aggregation, pool)
    if why is None:
        found = _with_edges(ds.graph, device, asked, pool, edges_room)
        if isinstance(found, SamplePlace):
            return found
        why = found
    if asked == "cuda" and pool is not None:
        raise ConfigError(f"`sample_device='cuda'` cannot be: {why}; leave it out, or set it to cpu")
    return SamplePlace(None, why)


def _edges_stay(ds: Dataset, pre_aggregation: PreAggregation, pool: PoolRoom | None) -> str | None:
    """Why first-layer aggregates need the edges on the host; None if they do not."""
    if pool is None or not pool.whole:
        return "the first layer's aggregates need the edges there, as not all feature rows are on the GPU"
    if not counts_there(pre_aggregation, ds.graph):
        return "the first layer's aggregates need the edges' weights or self-loops there"
    return None


def _with_edges(graph: Graph, device: torch.device, asked: str, pool: PoolRoom | None, edges_room: int) -> SamplePlace | str:
    """The GPU, with the edges in its memory or, where those do not fit, in the host's; else why it has no memory for them."""
    why = "" if is_there(graph, device) else _too_large(graph, device, asked, pool, False)
    if not why:
        return SamplePlace(device, f"the topology takes {format_bytes(device_bytes(graph))} of its memory")
    nodes, edges = device_bytes(graph, edges_on_host=True), graph.indices.nbytes
    if edges > edges_room or (not is_there(graph, device, True) and _too_large(graph, device, asked, pool, True)):
        return why
    reader = host_edges.reader_for(device)
    if asked == "auto" and isinstance(reader, str):
        return f"{why}, and it does not read edges in the host's: {reader}"
    words = f"the topology takes {format_bytes(nodes)} of its memory, and edges {format_bytes(edges)} of the host's"
    return SamplePlace(device, words, edges_on_host=True)


def _too_large(graph: Graph, device: torch.device, asked: str, pool: PoolRoom | None, edges_on_host: bool) -> str:
    """Why the GPU has no memory for the topology; empty if it has."""
    need, free = device_bytes(graph, edges_on_host), int(torch.cuda.mem_get_info(device)[0])
    if pool is not None and pool.whole:
        beside = f"the topology takes {format_bytes(need)} of the GPU, which has {format_bytes(pool.left)} beside feature rows"
        return beside if need > pool.left else ""
    if need > (free // DEVICE_TOPOLOGY_SHARE if asked == "auto" else free):
        return f"the topology takes {format_bytes(need)} of the GPU, which has {format_bytes(free)} free"
    return ""


def _kept_from_it(
    ds: Dataset, order: Order, collate: CollateStage, sampling: Sampling, edges_on_disk: bool, rows_on_disk: bool
) -> str | None:
    """Why the GPU cannot sample, whatever its memory; None if it can."""
    reasons = {
        "the graph has several types": ds.is_hetero,
        "batches of links leave their own edges out": isinstance(order.nodes, InputLinks),
        "edges of other splits are left out": bool(order.nodes.held_out),
        "LABOR draws by the random numbers of sources": sampling.labor is not None,
        "all nodes of a hop share what is drawn": sampling.layer_wise is not None,
        "edges are drawn by weight": sampling.weight is not None,
        "each seed has a tree of its own": sampling.disjoint,
        f"edges are {sampling.subgraph_type}": sampling.whole,
        "the edges do not fit in the host's memory": edges_on_disk,
        "features are read from disk for many batches at once, which wait in the host's memory": rows_on_disk,
        "transform takes batches in the host's memory": collate.transform is not None,
    }
    return next((why for why, is_so in reasons.items() if is_so), None)
