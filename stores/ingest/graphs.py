"""The steps of an ingest of many graphs: their order and nodes, the check of their edges, arrays with a row per graph."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ooc.stores import array_names as names
from ooc.stores.arrays.zarr_rows import open_zarr_rows
from ooc.stores.arrays.zarr_write import write_array
from ooc.stores.errors import ConfigError, InputError
from ooc.stores.ingest import duck as sql
from ooc.stores.ingest import ids, nodes
from ooc.stores.ingest import labels as label_rows
from ooc.stores.ingest import splits as split_files
from ooc.stores.ingest.duck import Duck, Progress
from ooc.stores.ingest.inputs import Inputs
from ooc.stores.ingest.random_split import random_bits
from ooc.stores.ingest.sources import Table, TableFile, first, open_array
from ooc.stores.ingest.spec import IngestSpec
from ooc.stores.ingest.steps import Steps
from ooc.stores.manifest import Graphs, IdKind

Ints = NDArray[np.int64]


class GraphSteps:
    """One ingest's graphs; `find` first. Graphs come in the order of their table or, without one, of their first nodes.

    >>> graphs = GraphSteps(spec, steps, duck, progress, inputs)
    >>> graphs.find()
    >>> graphs.grouped, np.diff(graphs.ptr)  # whether the nodes of each graph stand together, and their numbers
    """

    def __init__(self, spec: IngestSpec, steps: Steps, duck: Duck, progress: Progress, inputs: Inputs) -> None:
        self.spec, self.steps, self.duck, self.progress, self.inputs = spec, steps, duck, progress, inputs
        self.store, self.stage = steps.store, steps.stage
        self._ptr, self._list, self._of_node = (
            self.stage / each for each in ("graph_ptr.npy", "graphs.parquet", "graph_of.npy")
        )
        self.count, self.mapped, self.grouped = 0, False, True
        self.kind: IdKind = "int"

    def find(self) -> None:
        """Step graphs. Raises InputError for a node without a graph, a graph without nodes, and ids listed twice."""
        found = self.steps.run("graphs", self._find, [self._ptr, self._list, self._of_node])
        self.count, self.kind, self.mapped, self.grouped = (found[key] for key in ("count", "kind", "mapped", "grouped"))

    @property
    def has_labels(self) -> bool:
        return "y" in self.inputs.graphs or self.spec.graph_label is not None

    @property
    def ptr(self) -> Ints:
        """int64[G + 1], memory-mapped: graph g has the nodes ptr[g]:ptr[g + 1] of the store."""
        found: Ints = np.load(self._ptr, mmap_mode="r")
        return found

    @property
    def of_node(self) -> Path | None:
        """npy file with the graph of each input row (int32|int64[N]); None where the nodes of each graph stand together."""
        return None if self.grouped else self._of_node

    def _find(self) -> dict[str, Any]:
        if "ptr" in self.inputs.graphs:
            ptr = open_array(Path(self.inputs.graphs["ptr"]))
            np.save(self._ptr, ptr)
            return {"count": len(ptr) - 1, "kind": "int", "mapped": False, "grouped": True}
        table, listed = self._nodes, self.inputs.graph_table
        column = table.column(self._column, "graph ids")
        kind = self._kind(column)
        own = ids.cast(table, column, kind)
        if (row := first(self.duck, table, f"{own} IS NULL", [column])) is not None:
            raise InputError(f"{table.where(row[0])}: {column} is empty; give every node the id of its graph")
        found = self.stage / "found_graphs.parquet"
        by_graph = f"SELECT {own} AS id, {table.position()} AS row FROM {table.relation()}"
        counts = "count(*) AS nodes, min(row) AS first, max(row) AS last"
        self.duck.copy(f"SELECT id, {counts} FROM ({by_graph}) GROUP BY id", found, False, self.progress, "graphs", table.rows)
        if listed is None:
            relation = f"SELECT * FROM {sql.parquet([found])} ORDER BY first"
        else:
            relation = self._by_table(listed, kind, found)
        count, mapped, grouped = self._write_list(relation, kind, listed)
        if not grouped:
            self._write_of_node(by_graph, table.rows, count)
        found.unlink()
        return {"count": count, "kind": kind, "mapped": mapped, "grouped": grouped}

    @property
    def _nodes(self) -> Table:
        assert self.inputs.nodes is not None
        return self.inputs.nodes

    @property
    def _column(self) -> str:
        assert self.spec.graph_id is not None
        return self.spec.graph_id

    def _listed_column(self, table: Table) -> str:
        """The column of graph ids in the table of graphs: of the same name, else `id`."""
        own = self._column if self._column in table.columns or "id" not in table.columns else "id"
        return table.column(own, "graph ids", (self._column, 0))

    def _kind(self, column: str) -> IdKind:
        asked = "str" if self.spec.id_type == "str" else "auto"
        kinds = {ids.id_kind(self.duck, self._nodes, [column], asked, "graph ids")}
        if (listed := self.inputs.graph_table) is not None:
            kinds.add(ids.id_kind(self.duck, listed, [self._listed_column(listed)], asked, "graph ids"))
        return "str" if "str" in kinds else "int"

    def _by_table(self, listed: Table, kind: IdKind, found: Path) -> str:
        """SQL of the graphs in the order of their table. Raises InputError where it does not list those of the nodes."""
        column = self._listed_column(listed)
        ids.check_node_ids(self.duck, listed, column, kind, "graph")
        rows = ids.node_rows(listed, column, kind)
        unknown = f"SELECT min(first), arg_min(id, first) FROM {sql.parquet([found])} f ANTI JOIN ({rows}) t ON f.id = t.id"
        position, value = self.duck.one(unknown)
        if position is not None:
            shown = f"{self._nodes.where(position)}: {self._column} {value!r}"
            raise InputError(f"{shown} is not in {listed.shown}; list every graph there")
        return (
            f"SELECT t.id, nodes, first, last FROM ({rows}) t LEFT JOIN {sql.parquet([found])} f ON t.id = f.id ORDER BY t.row"
        )

    def _write_list(self, relation: str, kind: IdKind, listed: Table | None) -> tuple[int, bool, bool]:
        """Write `graphs.parquet` (id, row, first) and the offsets; (graphs, whether ids are not rows, whether nodes stand
        together)."""
        count, mapped, grouped, ends = 0, kind == "str", True, [np.zeros(1, np.int64)]
        fields = [("id", pa.int64() if kind == "int" else pa.string()), ("row", pa.int64()), ("first", pa.int64())]
        with pq.ParquetWriter(self._list, schema := pa.schema(fields), use_dictionary=False) as writer:
            for batch in self.duck.stream(relation):
                if (empty := batch.column("nodes")).null_count:
                    assert listed is not None
                    at = count + int(np.argmax(empty.is_null().to_numpy(zero_copy_only=False)))
                    raise InputError(
                        f"{listed.where(at)}: graph {batch.column('id')[at - count].as_py()!r} has no nodes; leave it out"
                    )
                number, begin, last = (batch.column(name).to_numpy() for name in ("nodes", "first", "last"))
                rows = np.arange(count, count + len(number))
                end = ends[-1][-1] + np.cumsum(number)
                grouped = grouped and bool((begin == end - number).all() and (last - begin + 1 == number).all())
                mapped = mapped or not np.array_equal(batch.column("id").to_numpy(), rows)
                writer.write_table(pa.table([batch.column("id"), rows, begin], schema=schema))
                ends.append(end)
                count += len(number)
        np.save(self._ptr, np.concatenate(ends))
        return count, mapped, grouped

    def _write_of_node(self, by_graph: str, num_nodes: int, count: int) -> None:
        dtype = np.dtype(np.int32 if count < 2**31 else np.int64)
        of_node = np.lib.format.open_memmap(self._of_node, "w+", dtype, (num_nodes,))
        done = 0
        relation = f"SELECT g.row AS graph FROM ({by_graph}) n JOIN {sql.parquet([self._list])} g ON n.id = g.id ORDER BY n.row"
        for batch in self.duck.stream(relation):
            of_node[done : done + len(batch)] = batch.column(0).to_numpy()
            done += len(batch)
        of_node.flush()

    def edge_check(self, edges: ids.EdgeColumns) -> Callable[[Ints, NDArray[Any], Ints], None]:
        """Return a function of (destinations, sources, edge ids), in the store's rows, that refuses edges between graphs."""
        ptr = np.asarray(self.ptr)

        def check(dst: Ints, src: NDArray[Any], edge_id: Ints) -> None:
            graph = np.searchsorted(ptr, dst, side="right") - 1
            wrong = (src < ptr[graph]) | (src >= ptr[graph + 1])
            if wrong.any():
                self._refuse(edges, int(edge_id[int(np.argmax(wrong))]))

        return check

    def _refuse(self, edges: ids.EdgeColumns, edge: int) -> None:
        table = edges.table
        ends = f"{sql.name(edges.src)}, {sql.name(edges.dst)}"
        src, dst = self.duck.one_beside(f"SELECT {ends} FROM {table.relation()} WHERE {table.position()} = {edge}")
        raise InputError(f"{table.where(edge)}: the edge from {src!r} to {dst!r} joins two graphs; both ends must be in one")

    def write(self) -> Graphs:
        """Steps graph ptr, graph ids, graph splits, graph labels and graph features NAME, after the edges are written."""
        self.steps.run("graph ptr", self._write_ptr, self._outputs("ptr", "edge_ptr"))
        if self.mapped:
            path = self.store / names.GRAPH_IDS
            self.steps.run("graph ids", lambda: self._write_ids(path), [path])
        split, label = self.splits(), self._write_labels()
        features = [name for name in self.inputs.graphs if name not in ("ptr", "y", *names.SPLIT_CODES)]
        for name in features:
            self.steps.run(f"graph features {name}", partial(self._write_features, name), self._outputs(name))
        arrays = [*split["arrays"], *(["y"] if label["task"] else []), *features]
        kind: IdKind | None = self.kind if self.mapped else None
        return Graphs(count=self.count, id_kind=kind, arrays=sorted(arrays), splits=split["sizes"], **label)

    def _outputs(self, *arrays: str) -> list[Path]:
        paths = [names.graphs_array(array) for array in arrays]
        return [self.store / part for path in paths for part in (path, names.checksum_array(path))]

    def _write_ptr(self) -> dict[str, Any]:
        ptr, indptr = np.asarray(self.ptr), open_zarr_rows(self.store, names.INDPTR, "mmap")
        try:
            write_array(self.store, names.GRAPH_PTR, ptr)
            write_array(self.store, names.GRAPH_EDGE_PTR, np.asarray(indptr.map()[ptr]))
        finally:
            indptr.close()
        return {}

    def _write_ids(self, path: Path) -> dict[str, Any]:
        pairs = f"SELECT id, row FROM {sql.parquet([self._list])}"
        ids.write_lmdb(self.duck, path, self.kind, pairs, self.count, self.progress)
        return {}

    def splits(self) -> dict[str, Any]:
        """Step graph splits: {sizes: {split: graphs}, arrays: [names], notes: [lines]}."""
        given = [name for name in names.SPLIT_CODES if name in self.inputs.graphs]
        if self.spec.split_index is not None and not given:
            raise ConfigError("`split_index` chooses among the splits of masks, and there are none: leave it out")
        if self.spec.shares is not None:
            given = [name for name, share in zip(names.SPLIT_CODES, self.spec.shares, strict=True) if share]
        elif self.spec.graph_split is not None:
            given = [name for name in split_files.split_columns(self._table, self.spec.graph_split) if name]
        elif not given:
            return {"sizes": {}, "arrays": [], "notes": []}
        stage = self.stage / "graph_splits.bits"

        def write() -> dict[str, Any]:
            bits = self._split_bits(given)
            return split_files.write_splits(self.store, bits, stage, given, place=names.graphs_array, what="graph")

        outputs = self._outputs("split", *(f"split_{name}" for name in names.SPLIT_CODES))
        return self.steps.run("graph splits", write, [*outputs, stage])

    def _split_bits(self, given: list[str]) -> Iterator[NDArray[np.uint8]]:
        if self.spec.shares is not None:
            return random_bits(self.spec.seed, self.spec.shares, self._labelled)
        if self.spec.graph_split is not None:
            return split_files.bits_of_table(self.duck, self._table, self.spec.graph_split)
        files, shown = {name: self.inputs.graphs[name] for name in given}, self.inputs.name
        opened = {
            name: split_files.open_split(path, shown(path), self.count, self.spec.split_index, "graph")
            for name, path in files.items()
        }
        return split_files.bits_of(opened, self.count)

    def _labelled(self) -> Iterator[NDArray[np.bool_]]:
        """Which graphs have a label; all of them without labels."""
        rows = self._labels()
        if rows is not None:
            task = self._look_at_labels(rows).task
            return (label_rows.known(block, task) for block in rows.blocks())
        step = split_files.READ_ITEMS
        return (np.ones(min(step, self.count - start), bool) for start in range(0, self.count, step))

    def training(self) -> Callable[[int, int], NDArray[np.bool_]] | None:
        """Return which of the store's nodes first..last-1 are of training graphs; None without a training split."""
        split = self.splits()
        if "train" not in split["sizes"]:
            return None
        of_graph = split_files.training_rows(self.store, split["arrays"], names.graphs_array)(0, self.count)
        ptr = np.asarray(self.ptr)
        return lambda start, stop: of_graph[np.searchsorted(ptr, np.arange(start, stop), side="right") - 1]

    def _label_columns(self, table: Table) -> list[str]:
        assert self.spec.graph_label is not None
        return label_rows.label_columns(table, self.spec.graph_label, {self._column})

    def _labels(self) -> nodes.Rows | None:
        if "y" in self.inputs.graphs:
            return nodes.npy_rows([self.inputs.graphs["y"]], self.inputs.name)
        if self.spec.graph_label is None:
            return None
        return label_rows.label_rows(self.duck, self._table, self._label_columns(self._table), self.spec.task)

    def _look_at_labels(self, rows: nodes.Rows) -> label_rows.Labels:
        columns = [] if self.spec.graph_label is None else self._label_columns(self._table)
        named = columns if len(columns) > 1 else None
        return label_rows.look_at_labels(rows, self.count, named, self.spec.task)

    def _write_labels(self) -> dict[str, Any]:
        """Step graph labels: {task, num_classes, class_names}, None without labels."""
        rows = self._labels()
        if rows is None:
            return {"task": None, "num_classes": None, "class_names": None}
        rows.expect(self.count, "graphs", "graph")

        def write() -> dict[str, Any]:
            found = self._look_at_labels(rows)
            label_rows.write_labels(self.store, rows, found, array=names.graphs_array)
            return {"task": found.task, "num_classes": found.num_classes, "class_names": found.names}

        return self.steps.run("graph labels", write, self._outputs("y"))

    def _write_features(self, name: str) -> dict[str, Any]:
        rows, unscaled = nodes.npy_rows([self.inputs.graphs[name]], self.inputs.name), nodes.Scale("none", np.zeros(1))
        storage = nodes.fit_storage(rows.expect(self.count, "graphs", "graph"), "auto", unscaled, self.progress)
        settings = storage, unscaled, self.spec.allow_nan, self.progress
        return {"wild": nodes.write_features(self.store, name, rows, *settings, array=names.graphs_array, flat=True)}

    @property
    def _table(self) -> Table:
        """The table with a row per graph: as given, or of the columns of the node table that say something of graphs."""
        if self.inputs.graph_table is not None:
            return self.inputs.graph_table
        found = self.steps.run("graph columns", self._gather_columns, [self.stage / "graph_columns.parquet"])
        return Table.from_json(found)

    def _gather_columns(self) -> dict[str, Any]:
        """The columns of labels and splits at each graph's first node. Raises InputError where another node differs."""
        table, path, spec = self._nodes, self.stage / "graph_columns.parquet", self.spec
        columns = [] if spec.graph_label is None else self._label_columns(table)
        columns += [] if spec.graph_split is None else list(split_files.split_columns(table, spec.graph_split).values())
        listed, kind = sql.parquet([self._list]), self.kind
        taken = ", ".join(f"n.{sql.name(column)} AS c{at}" for at, column in enumerate(columns))
        own = f"SELECT *, {table.position()} AS row_, {ids.cast(table, self._column, kind)} AS graph_ FROM {table.relation()}"
        relation = f"SELECT g.id, {taken} FROM {listed} g JOIN ({own}) n ON n.row_ = g.first ORDER BY g.row"
        self.duck.copy(relation, path, ordered=True)
        for at, column in enumerate(columns):
            differs = f"n.{sql.name(column)} IS DISTINCT FROM c{at}"
            pairs = f"({own}) n JOIN {sql.parquet([path])} g ON n.graph_ = g.id"
            row = self.duck.one(f"SELECT min(n.row_) FROM {pairs} WHERE {differs}")[0]
            if row is not None:
                raise InputError(
                    f"{table.where(row)}: {column} is not what the first node of its graph has; a graph has one value of it "
                    "(one a node is `label` or `split`)"
                )
        return self._renamed(path, columns).to_json()

    def _renamed(self, path: Path, columns: list[str]) -> Table:
        """The staged table with the columns' own names."""
        table, target = self._nodes, path.with_name("graph_table.parquet")
        named = ", ".join(f"c{at} AS {sql.name(column)}" for at, column in enumerate(columns))
        rows = self.duck.copy(f"SELECT {named} FROM {sql.parquet([path])}", target, ordered=True)
        shown = f"{table.shown}, graph by graph:"
        kinds = {column: table.columns[column] for column in columns}
        return Table((TableFile(shown, str(target.resolve()), rows),), kinds, table.text, table.header)
