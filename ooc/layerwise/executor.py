"""Carries out the ops of a forward pass over all nodes, with nothing kept for a backward pass."""

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch

from ooc.layerwise.io_stats import COMPUTE
from ooc.layerwise.ir import Op
from ooc.layerwise.ops import LayerModules, RangeOfNodes, Tensors, inputs_of
from ooc.layerwise.pass_plan import LayerwisePlan
from ooc.layerwise.row_files import RowStore
from ooc.layerwise.scans import GATHERED_ROWS, Fetch, NodeChunk, NodeScans, SumRequest
from ooc.layerwise.shape import gather_ranges


def nothing(first: int) -> None:
    """Fetches nothing for a chunk."""


class ForwardExecutor:
    """Computes chunks of nodes and puts what they give into a store."""

    def __init__(self, modules: LayerModules, store: RowStore, scans: NodeScans) -> None:
        self.modules, self.store, self.scans, self.stats = modules, store, scans, scans.stats
        self._dtype = torch.float64 if store.dtype == np.float64 else torch.float32

    def run_op(self, op: Op, plan: LayerwisePlan, start: int) -> Iterator[int]:
        """Run an op of a pass from node `start` on; yields how far it came, where it can go on from there later."""
        inputs = {} if op.kind == "add" else inputs_of(self.modules.shape, op)
        kind, sums = self.modules.shape.layers[op.layer].kind, []
        if kind is not None and op.summed:  # else there are none, or they were made by blocks
            sums.append(SumRequest(op.writes[0] if op.kind == "add" else inputs["sums"], op.summed, kind, False, False))
        room = plan.memory if op.kind == "gather" else plan.layers[op.layer].rows

        def compute(chunk: NodeChunk) -> Tensors:
            if op.kind == "add":
                return {op.writes[0]: torch.from_numpy(chunk.read[op.writes[0]])}
            return self.compute(op, chunk.place, self.given(inputs, chunk))

        for chunk in self.chunks(op, inputs, sums, room, start):
            self.run_chunk(chunk, compute, op.writes)
            if chunk.ends:
                yield chunk.place.stop

    def chunks(
        self,
        op: Op,
        inputs: dict[str, str],
        sums: list[SumRequest],
        room: int,
        start: int,
        more: Iterable[str] = (),
        fetch: Fetch = nothing,
    ) -> Iterator[NodeChunk]:
        """The chunks of an op from node `start` on, with its inputs, the sums that are made meanwhile, and `more` values. room:
        destinations whose sums fit the memory at a time; of an op that gathers, bytes for two of its ranges."""
        made = {each.name for each in sums}
        names = [name for role, name in inputs.items() if not (op.kind == "gather" and role == "rows")]
        names = list(dict.fromkeys(name for name in (*names, *more) if name not in made))
        if op.kind == "gather":
            ranges = list(gather_ranges(self.scans.graph, self.modules.shape.layers[op.layer], room, start))
            return self.scans.gathered(op.summed, names, ranges, fetch)
        return self.scans.rows(names, sums, room, fetch, start, edges=op.kind == "sum")

    def run_chunk(self, chunk: NodeChunk, compute: Callable[[NodeChunk], Tensors], writes: Iterable[str]) -> Tensors:
        """A chunk's outputs by the names of values, once those of `writes` are put."""
        with self.stats.timed(COMPUTE):
            outputs = compute(chunk)
        for name in writes:
            self.store.put(name, chunk.place.first, outputs[name].to(self._dtype).cpu().numpy())
        return outputs

    def given(self, inputs: dict[str, str], chunk: NodeChunk) -> Tensors:
        """A chunk's inputs by role."""
        tensor = self.modules.tensor
        return {role: tensor(chunk.read[GATHERED_ROWS if role == "rows" else name]) for role, name in inputs.items()}

    def compute(self, op: Op, place: RangeOfNodes, given: Tensors) -> Tensors:
        """The row-wise part of an op."""
        return self.modules.map(given, place) if op.kind == "map" else self.modules.layer(op.layer, given, place)
