"""The steps of an ingest that renumber nodes: parts (`--parts`) or graphs become ranges of ids, or hubs come first.

Most reads of a graph with hubs are of hubs; if these are adjacent on few pages, batches and scans need fewer other pages.
(Caches of hot vertices use degrees, as in PaGraph, Lin et al., SoCC 2020; here the file layout does.)
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ooc.stores import array_names as names
from ooc.stores.arrays.segment_rows import read_range
from ooc.stores.arrays.zarr_rows import open_zarr_rows
from ooc.stores.arrays.zarr_write import write_array
from ooc.stores.ingest import edges as csc
from ooc.stores.ingest.arrange import Arranging
from ooc.stores.ingest.duck import Duck, Progress
from ooc.stores.ingest.partition import Neighbors, by_degree, count_cut, count_ends, count_of, method_of, numbering, partition
from ooc.stores.ingest.spec import IngestSpec
from ooc.stores.ingest.steps import Steps
from ooc.stores.io.working import remove
from ooc.stores.manifest import Partition

ARRANGE_SHARE = 8
"""share of the memory (1/8) for the rows of a node array being reordered"""
ID_ROWS = 1 << 20
CUT_SLOTS = 1 << 22


class Renumbering:
    """One ingest's new order. Each method is a resumable step or two; call `edges` first.

    of_node: npy file with the graph of each input row, of a store of many graphs: they become ranges of ids.
    """

    def __init__(
        self, spec: IngestSpec, steps: Steps, duck: Duck, progress: Progress, num_nodes: int, of_node: Path | None = None
    ) -> None:
        self.spec, self.steps, self.duck, self.progress = spec, steps, duck, progress
        self.store, self.stage, self.num_nodes = steps.store, steps.stage, num_nodes
        self._new, self._of_node = self.stage / "new.npy", of_node
        self.method = ""

    def edges(self, relation: str, num_edges: int, rest: Mapping[str, np.dtype[Any]]) -> str:
        """Steps neighbors (with parts), order, renumber: SQL of the edges of `relation` (src, dst, edge_id, `rest`) by new ids.

        `num_edges` is that of the input, one more than the largest edge id.
        """
        folder, target = self.stage / "neighbors", self.stage / "renumbered.parquet"
        if self.spec.parts is not None:  # check before the edges are sorted
            count_of(self.spec.parts, self.num_nodes)
            method_of(self.spec.partitioner, num_nodes=0, num_slots=0, memory=0)

        def neighbors() -> dict[str, Any]:
            Neighbors.write(self.duck, relation, folder, self.num_nodes, num_edges, self.progress)
            return {}

        if self.spec.parts is not None:
            self.steps.run("neighbors", neighbors, [folder])
        outputs = [self._new, self.stage / "parts.npy"]
        self.method = self.steps.run("order", lambda: self._order(folder, relation, num_edges), outputs)["method"]
        remove(folder)  # as large as the graph

        def renumber() -> dict[str, Any]:
            return {"edges": self._write_edges(relation, num_edges, rest, target)}

        self.steps.run("renumber", renumber, [target])
        return csc.parquet_relation(target)

    def _order(self, folder: Path, relation: str, num_edges: int) -> dict[str, Any]:
        method, part = "", np.zeros(self.num_nodes, np.int32) if self._of_node is None else np.load(self._of_node)
        if self.spec.parts is not None:
            neighbors, count = Neighbors(folder, self.num_nodes), count_of(self.spec.parts, self.num_nodes)
            method = method_of(self.spec.partitioner, self.num_nodes, neighbors.num_slots, self.duck.limit)
            part = partition(neighbors, count, method, self.progress)
        order = by_degree(self._degrees(relation, num_edges)) if self.spec.order == "degree" else None
        new, parts = numbering(part, order)
        np.save(self._new, new)
        np.save(self.stage / "parts.npy", parts)
        return {"method": method}

    def _degrees(self, relation: str, num_edges: int) -> NDArray[np.int32]:
        """Out-degree of each node, int32[N]; a node is read as often as it is sampled as a neighbor."""
        degree, done = np.zeros(self.num_nodes, np.int32), 0
        ends = "src, dst" if self.spec.undirected else "src"
        for batch in self.duck.stream(f"SELECT {ends} FROM ({relation})", ordered=False):
            for end in batch.columns:
                count_ends(end.to_numpy(), degree)
            done += batch.num_rows
            self.progress("count edges", done, num_edges)
        return degree

    @property
    def new(self) -> NDArray[Any]:
        """The new id of each input row, [N], memory-mapped."""
        found: NDArray[Any] = np.load(self._new, mmap_mode="r")
        return found

    def _write_edges(self, relation: str, num_edges: int, rest: Mapping[str, np.dtype[Any]], target: Path) -> int:
        new, done = np.load(self._new), 0
        kind = pa.from_numpy_dtype(new.dtype)
        fields: list[tuple[str, pa.DataType]] = [("src", kind), ("dst", kind), ("edge_id", pa.int64())]
        schema = pa.schema([*fields, *((name, pa.from_numpy_dtype(dtype)) for name, dtype in rest.items())])
        with pq.ParquetWriter(target, schema, use_dictionary=False) as writer:
            for batch in self.duck.stream(f"SELECT {', '.join(schema.names)} FROM ({relation})", ordered=False):
                ends = {end: new[batch.column(end).to_numpy()] for end in ("src", "dst")}
                others = {name: batch.column(name) for name in schema.names[2:]}
                writer.write_table(pa.table({**ends, **others}, schema=schema))
                done += batch.num_rows
                self.progress("renumber edges", done, num_edges)
        return done

    def ids(self, pairs: str | None) -> str:
        """Step pairs: SQL of (id, row) by new rows; `pairs` is the same by input rows, None if these are the ids."""
        target = self.stage / "pairs.parquet"

        def write() -> dict[str, Any]:
            self._write_pairs(pairs, target)
            return {}

        self.steps.run("pairs", write, [target])
        return csc.parquet_relation(target)

    def _write_pairs(self, pairs: str | None, target: Path) -> None:
        new, writer = self.new, None
        try:
            for batch in self._identity() if pairs is None else self.duck.stream(f"SELECT id, row FROM ({pairs})"):
                table = pa.table({"id": batch.column(0), "row": new[batch.column(1).to_numpy()].astype(np.int64)})
                writer = writer or pq.ParquetWriter(target, table.schema, use_dictionary=False)
                writer.write_table(table)
        finally:
            if writer is not None:
                writer.close()

    def _identity(self) -> Any:
        for first in range(0, self.num_nodes, ID_ROWS):
            row = pa.array(np.arange(first, min(first + ID_ROWS, self.num_nodes)))
            yield pa.RecordBatch.from_arrays([row, row], ["id", "row"])

    def arranging(self) -> Arranging:
        """Reorders node arrays to the new order."""
        return Arranging(self.new, self.stage / "arranged", self.spec.memory_bytes // ARRANGE_SHARE)

    def parts(self) -> Partition | None:
        """Step parts, after the graph is written: `graph/parts` and the quality of the parts; None without parts."""
        if self.spec.parts is None:
            return None
        outputs = [self.store / names.PARTS, self.store / names.checksum_array(names.PARTS)]
        return Partition(**self.steps.run("parts", self._write_parts, outputs))

    def _write_parts(self) -> dict[str, Any]:
        parts = np.load(self.stage / "parts.npy")
        write_array(self.store, names.PARTS, parts)
        size = np.diff(parts)
        cut = self._cut(parts)
        return {"parts": len(size), "method": self.method, "cut": cut, "balance": float(size.max() / size.mean())}

    def _cut(self, parts: NDArray[np.int64]) -> float:
        """Share of the store's edges between parts."""
        indptr, indices = (open_zarr_rows(self.store, name, "mmap") for name in (names.INDPTR, names.INDICES))
        cut = node = 0
        try:
            start, count = indptr.map(), indices.shape[0]
            for first in range(0, count, CUT_SLOTS):
                values, _ = read_range(indices, first, min(first + CUT_SLOTS, count))
                found, node = count_cut(start, values, first, parts, node)
                cut += found
        finally:
            indptr.close()
            indices.close()
        return cut / max(1, count)
