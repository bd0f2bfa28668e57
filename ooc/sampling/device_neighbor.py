"""Uniform neighbor sampling on a device: the batches of `NeighborSampler`, to the bit.

A hop counts, draws, gathers and numbers in torch operations over all its nodes. The host waits once before the first hop and
once a hop, for the sizes of what comes next; loaders sample in threads, so no step waits for it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ooc.graph.device_subgraph import DeviceSubgraph
from ooc.runtime.transfer import HostCopy, to_device
from ooc.sampling import device_draws
from ooc.sampling.device_topology import UNSEEN, DeviceTopology, device_topology
from ooc.sampling.labor import Key
from ooc.sampling.left_out import LeftOut
from ooc.sampling.neighbor import NeighborSampler, checked_seeds
from ooc.stores.arrays.rows import Ids
from ooc.stores.errors import BudgetError
from ooc.stores.graph import Graph


class DeviceNeighborSampler:
    """Samples like `host`, a `NeighborSampler` of a graph that is uniform and leaves no edges out, on `device`. Its edges are
    there too or, with `edges_on_host`, in page-locked memory of the host.

    A node's place among those of the batch is looked up in a table of all nodes, which takes 4 bytes each: every edge of a hop
    writes its number at its source, the smallest stays, and so nodes are numbered in the order in which they are first met.

    >>> sampler = DeviceNeighborSampler(NeighborSampler(graph, [10, 10]), graph, torch.device("cuda"))
    >>> sampler.sample(np.array([4, 7]), key(seed, Purpose.SAMPLE, epoch, step)).edge_index.device
    device(type='cuda', index=0)
    """

    def __init__(self, host: NeighborSampler, graph: Graph, device: torch.device, edges_on_host: bool = False) -> None:
        self.host, self.topology = host, device_topology(graph, device, edges_on_host)

    def sample(self, seeds: Ids, key: Key, left_out: LeftOut | None = None) -> DeviceSubgraph:
        """See `NeighborSampler.sample`, whose errors it raises; a damaged topology is found when it is copied."""
        assert isinstance(key, int), "draws depend on one key"
        assert left_out is None, "no edges are left out"
        node = torch.from_numpy(checked_seeds(seeds, self.host.num_nodes))
        with self.topology.sampling():
            batch = _DeviceBatch(self.host, self.topology, to_device([node], self.topology.device)[0], key)
            for hop in range(len(self.host.fanout)):
                batch.expand(hop)
            return batch.finish()


class _HopSize(NamedTuple):
    """What the host must know of a hop before it."""

    edges: int
    hub: int
    degree: int
    many: int
    """nodes of the first kind of `device_draws.drawn_rows`"""
    few: int


class _DeviceBatch:
    """A batch being sampled. `node`: of the hop under way, `size`: its `_HopSize`, if there is such a hop."""

    def __init__(self, host: NeighborSampler, topology: DeviceTopology, seeds: Tensor, key: int) -> None:
        self.host, self.topology, self.key = host, topology, key
        self.node, self.nodes, self.num_nodes, self.num_edges = seeds, [seeds], [len(seeds)], list[int]()
        self.slots, self.sources, self.targets, self.counts = (list[Tensor]() for _ in range(4))
        topology.seen.scatter_reduce_(0, seeds, self._range(len(seeds), torch.int32), "amin")
        self.size = _HopSize(*_read(self._measured(seeds, self._range(len(seeds)) >= 0, 0)))

    def _range(self, count: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.arange(count, dtype=dtype, device=self.topology.device)

    def _measured(self, node: Tensor, there: Tensor, hop: int) -> list[Tensor]:
        """The `_HopSize` of hop `hop` at those of `node` that are there (bool[n])."""
        degree = torch.where(there, self.topology.indptr[node + 1] - self.topology.indptr[node], 0)
        fanout, replace = self.host.fanout[hop], self.host.replace
        if not len(node):
            return [degree.sum()] * 5
        most = degree.max()
        hub = node.gather(0, torch.where(degree == most, self._range(len(node)), len(node) - 1).min()[None])[0]
        rows = device_draws.drawn_rows(degree, fanout, replace)
        return [device_draws.num_drawn(degree, fanout, replace).sum(), hub, most, *(each.sum() for each in rows)]

    def expand(self, hop: int) -> None:
        """Sample hop `hop`."""
        bound = self.host.checked_bound(hop, self.size[:3], self.num_nodes, sum(self.num_edges))
        met = sum(self.num_nodes)
        if met + bound.sampled >= UNSEEN:
            raise BudgetError(f"hop {hop + 1} samples {bound.sampled} edges, more than sampling on a GPU can number")
        attempt, further = 0, hop + 1 < len(self.host.fanout)
        while True:
            slot, target, fewer = self._drawn(hop, attempt)
            source = self.topology.sources(slot)
            node, local, count = self._numbered(source, met)
            size = self._measured(node, self._range(len(node)) < count, hop + 1) if further else []
            new, missing, *sizes = _read([count, fewer, *size])
            if not missing:
                break
            self.topology.seen.scatter_(0, source, torch.where(local < met, local, UNSEEN).to(torch.int32))
            attempt += 1
        self.slots.append(slot)
        self.sources.append(local)
        self.targets.append(target)
        self.num_edges.append(len(slot))
        self.node = node[:new]
        self.nodes.append(self.node)
        self.num_nodes.append(new)
        self.size = _HopSize(*sizes) if further else self.size

    def _drawn(self, hop: int, attempt: int) -> tuple[Tensor, Tensor, Tensor]:
        """(slots int64[e], the destination of each, whether some have to be drawn by a further attempt) of the hop."""
        fanout, replace, node, edges = self.host.fanout[hop], self.host.replace, self.node, self.size.edges
        first = self.topology.indptr[node]
        degree = self.topology.indptr[node + 1] - first
        count = device_draws.num_drawn(degree, fanout, replace)
        begin = count.cumsum(0) - count
        row = torch.repeat_interleave(self._range(len(node)), count, output_size=edges)
        slot = (first - begin)[row] + self._range(edges)
        nodes = device_draws.DrawnNodes(node, first, degree, begin, fanout, replace, self.size.many, self.size.few)
        compiled = device_draws.compiled_for(fanout, replace, node.device) if node.is_cuda else None
        fewer = device_draws.draw(nodes, self.key, attempt, slot, compiled)
        self.counts = [*self.counts[:hop], count]
        return slot, row + (sum(self.num_nodes) - len(node)), fewer

    def _numbered(self, source: Tensor, met: int) -> tuple[Tensor, Tensor, Tensor]:
        """The new nodes among the sources of a hop (int64[e]), in the order in which they are met: (int64[e] that begins with
        them, the sources' local ids, how many are new). met: nodes of the batch before."""
        seen, edges = self.topology.seen, len(source)
        if not edges:
            return source, source, torch.zeros((), dtype=torch.int64, device=source.device)
        edge = self._range(edges, torch.int32) + met
        seen.scatter_reduce_(0, source, edge, "amin")
        number = seen[source]
        new = number == edge
        rank = new.cumsum(0) - 1
        local = torch.where(number < met, number, met + rank[(number - met).clamp_(min=0)])
        seen.scatter_(0, source, local.to(torch.int32))
        node = torch.zeros(edges + 1, dtype=torch.int64, device=source.device)  # the last for sources that are not new
        node.scatter_(0, torch.where(new, rank, edges), source)
        return node[:edges], local, rank[-1] + 1

    def finish(self) -> DeviceSubgraph:
        """The batch; the table is as it was."""
        indptr, n_id = self.topology.indptr, torch.cat(self.nodes)
        self.topology.seen.scatter_(0, n_id, UNSEEN)
        count = torch.cat([n_id.new_zeros(1), *self.counts])
        edge_index = torch.stack([torch.cat(self.sources), torch.cat(self.targets)])
        arrays = n_id, count.cumsum(0), edge_index, torch.cat(self.slots), indptr[n_id + 1] - indptr[n_id]
        return DeviceSubgraph(*arrays, tuple(self.num_nodes), tuple(self.num_edges))


def _read(numbers: list[Tensor]) -> list[int]:
    """The values of int64[] on the device: the host waits for them."""
    values: list[int] = HostCopy([torch.stack(numbers)]).arrays()[0].tolist()
    return values
