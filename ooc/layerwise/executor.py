"""Carries out the ops of a forward pass over all nodes, with nothing kept for a backward pass."""

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch

from ooc.layerwise.io_stats import COMPUTE, IoStats
from ooc.layerwise.ir import Op
from ooc.layerwise.ops import LayerModules, RangeOfNodes, Tensors, inputs_of
from ooc.layerwise.pass_plan import LayerwisePlan
from ooc.layerwise.scans import NodeChunk, NodeScans, RowStore, SumRequest

GATHERED_ROWS = "rows"
"""name of a range's sources' rows among what is read for it"""


class ForwardExecutor:
    """Computes chunks of nodes and puts what they give into a store.

    >>> for chunk, outputs in executor.forward(chunks, compute, ["rows1"]): ...
    """

    def __init__(self, modules: LayerModules, store: RowStore, node_scans: NodeScans, stats: IoStats) -> None:
        self.modules, self.rows, self.node_scans, self.stats = modules, store, node_scans, stats
        self._dtype = torch.float64 if store.dtype == np.float64 else torch.float32

    def forward(
        self, chunks: Iterable[NodeChunk], compute: Callable[[NodeChunk], Tensors], writes: Iterable[str]
    ) -> Iterator[tuple[NodeChunk, Tensors]]:
        """Every chunk with its outputs by the names of values, once those of `writes` are put."""
        for chunk in chunks:
            with self.stats.timed(COMPUTE):
                outputs = compute(chunk)
            for name in writes:
                self.rows.put(name, chunk.place.first, outputs[name].to(self._dtype).cpu().numpy())
            yield chunk, outputs

    def given(self, inputs: dict[str, str], chunk: NodeChunk) -> Tensors:
        """A chunk's inputs by role."""
        tensor = self.modules.tensor
        return {role: tensor(chunk.read[GATHERED_ROWS if role == "rows" else name]) for role, name in inputs.items()}

    def compute(self, op: Op, place: RangeOfNodes, given: Tensors) -> Tensors:
        """The row-wise part of an op."""
        return self.modules.map(given, place) if op.kind == "map" else self.modules.layer(op.layer, given, place)

    def run_op(self, op: Op, plan: LayerwisePlan, start: int) -> Iterator[int]:
        """Run an op of a pass from node `start` on; yields how far it came, where it can go on from there later."""
        inputs = {} if op.kind == "add" else inputs_of(self.modules.model, op)

        def compute(chunk: NodeChunk) -> Tensors:
            return self.compute(op, chunk.place, self.given(inputs, chunk))

        chunks = self._chunks(op, plan, inputs, start)
        if op.kind == "add":
            (name,) = op.writes
            for chunk in chunks:
                self.rows.put(name, chunk.place.first, chunk.read[name])
                if chunk.ends:
                    yield chunk.place.stop
            return
        for chunk, _ in self.forward(chunks, compute, op.writes):
            if chunk.ends:
                yield chunk.place.stop

    def _chunks(self, op: Op, plan: LayerwisePlan, inputs: dict[str, str], start: int) -> Iterator[NodeChunk]:
        """What an op reads, chunk by chunk; its sums are made meanwhile, unless they were made by blocks."""
        kind = self.modules.model.layers[op.layer].kind
        if op.kind == "gather":
            others = [name for role, name in inputs.items() if role != "rows"]
            ranges = self.node_scans.ranges(op.layer, plan.memory, start)
            return self.node_scans.gathered(op.summed, others, ranges, {})
        layer, sums = plan.layers[op.layer], []
        if kind is not None and op.summed:
            name = op.writes[0] if op.kind == "add" else inputs["sums"]
            sums.append(SumRequest(name, op.summed, kind, False, False))
        names = list(dict.fromkeys(name for name in inputs.values() if name not in {each.name for each in sums}))
        return self.node_scans.rows(names, sums, layer.rows, {}, start, edges=op.kind == "sum")
