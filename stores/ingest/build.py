"""`ingest`: runs the steps in order, recording each when done, and publishes the store by one rename."""

import hashlib
import shutil
import time
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from ooc.stores import manifest as names
from ooc.stores.arrays.zarr_write import Appender
from ooc.stores.build import finish_store
from ooc.stores.errors import ConfigError, InputError, StoreError
from ooc.stores.ingest import duck as sql
from ooc.stores.ingest import edges as csc
from ooc.stores.ingest import ids
from ooc.stores.ingest.arrange import MakeSink
from ooc.stores.ingest.arrays import Arrays, blocks_of
from ooc.stores.ingest.datasets import Inputs, gather, input_files
from ooc.stores.ingest.duck import Duck, Progress, silent
from ooc.stores.ingest.edge_features import EdgeFeatures
from ooc.stores.ingest.edge_labels import NONE as NO_LABELS
from ooc.stores.ingest.edge_labels import EdgeLabels
from ooc.stores.ingest.events import Events
from ooc.stores.ingest.graphs import GraphSteps
from ooc.stores.ingest.ids import EdgeColumns, EdgeScan
from ooc.stores.ingest.node_arrays import NodeArrays
from ooc.stores.ingest.node_inputs import NodeInputs
from ooc.stores.ingest.renumber import Renumbering
from ooc.stores.ingest.spec import IngestResult, IngestSpec
from ooc.stores.ingest.steps import Steps, fingerprint
from ooc.stores.ingest.times import TimeColumn, time_column
from ooc.stores.io.atomic import check_absent, partial_path, write_error
from ooc.stores.io.working import tidy
from ooc.stores.manifest import Input, Manifest, Partition
from ooc.stores.sizes import format_bytes

_FREE = {"memory"}
"""settings that do not change the store, so a resumed ingest may change them"""


def ingest(spec: IngestSpec, progress: Progress | None = None, arrays: Arrays | None = None) -> IngestResult:
    """Build the store `spec.out`; equal inputs give the same bytes for any memory and number of threads.

    (Except with `partitioner="auto"`, where the memory may select the partitioner; the manifest names it.) The store is built
    in `<out>.partial`. A killed ingest leaves no store, and the same call resumes after the last finished step if settings and
    input files are unchanged; otherwise it starts over and says so in the result's notes. After an error that directory is
    removed, unless it does not belong to an ingest.

    Args:
        spec: What to ingest.
        progress: Called with the step, the units done and in total.
        arrays: Arrays of a data set in memory (x, y, edge_index, train_mask, ...), instead of files. Further ones with a row
            per node or per edge are stored under their names.

    Raises:
        InputError: If the input is wrong; names file, row and value.
        StoreError: If `out` exists or the disk is full.
        ConfigError: If settings are invalid.

    >>> ingest(IngestSpec(out="papers.ooc", edges="edges/*.parquet", num_nodes=8_000_000)).num_edges
    100000000
    """
    begin = time.perf_counter()
    if spec.pyg is not None and arrays is None:
        raise ConfigError("PyG data sets are read by ooc.pyg.dataset_source.ingest, which imports torch: call that instead")
    tidy(spec.out)
    check_absent(spec.out)
    key = fingerprint(_settings(spec, arrays), input_files(spec))
    steps = Steps(spec.out, key)
    keep = False
    try:
        with Duck(spec.memory_bytes, steps.spill) as duck:
            result = _Build(spec, steps, duck, progress or silent).run(arrays)
    except OSError as error:
        raise _disk(error, spec.out) from error
    except (KeyboardInterrupt, SystemExit, MemoryError):
        keep = True  # interrupted, not failed: the same call resumes
        raise
    finally:
        steps.close(keep)
    return IngestResult(**result, seconds=time.perf_counter() - begin, resumed=tuple(steps.resumed))


def _disk(error: OSError, out: Path) -> StoreError:
    if error.filename is None or Path(str(error.filename)).is_relative_to(partial_path(out)):
        return write_error(error, out)
    return StoreError(f"{error.filename} cannot be read: {error.strerror or error}; check the file and the permissions")


def _settings(spec: IngestSpec, arrays: Arrays | None) -> str:
    digest = hashlib.sha256()
    for name, given in sorted((arrays or {}).items()):
        array = np.load(given, mmap_mode="r") if isinstance(given, Path) else given
        digest.update(f"{name} {array.dtype} {array.shape} ".encode())
        for block in blocks_of(array):
            digest.update(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)
    return spec.model_dump_json(exclude=_FREE) + _creator() + digest.hexdigest()


def _creator() -> str:
    try:
        return f"ooc {version('ooc')}"
    except PackageNotFoundError:  # a source tree that is not installed
        return "ooc"


class _Build:
    """One ingest. Each method is a step or two; results are passed on through the journal as JSON."""

    def __init__(self, spec: IngestSpec, steps: Steps, duck: Duck, progress: Progress) -> None:
        self.spec, self.steps, self.duck, self.progress = spec, steps, duck, progress
        self.store, self.stage = steps.store, steps.stage
        self.order: Renumbering | None = None
        self.make_sink: MakeSink = Appender
        self.events: Events | None = None
        self.graphs: GraphSteps | None = None

    def run(self, arrays: Arrays | None) -> dict[str, Any]:
        raw = self.steps.run(
            "gather", lambda: gather(self.spec, self.duck, self.stage, arrays, self.progress).to_json(), [self.stage]
        )
        self.inputs = Inputs.from_json(raw)
        self.columns = self._columns()
        if self.inputs.of_graphs(self.spec):
            settings = self.spec.with_graphs(), self.steps, self.duck, self.progress, self.inputs
            self.graphs = GraphSteps(*settings)
        self.arrays = NodeInputs(self.spec, self.inputs, self.duck)
        self.edge_features = EdgeFeatures(self.spec, self.steps, self.duck, self.progress, self.columns, self.inputs)
        self.edge_labels = EdgeLabels(self.spec, self.steps, self.duck, self.columns, self.inputs)
        space = self._id_space()
        self.num_nodes = int(space["num_nodes"])
        self._check_counts()
        if self.graphs is not None:
            self.graphs.find()
        relation = self._mapped(space)
        of_node = None if self.graphs is None else self.graphs.of_node
        if self.spec.parts is not None or self.spec.order != "input" or of_node is not None:
            self.order = Renumbering(self.spec, self.steps, self.duck, self.progress, self.num_nodes, of_node)
            relation = self.order.edges(relation, space["edges"], self.columns.rest)
            self.make_sink = self.order.arranging().sink
        self._write_ids(space)
        relation = self._events(space, relation)
        graph = self._graph(space, relation)
        partition = None if self.order is None else self.order.parts()
        new = None if self.order is None else self.order.new
        spec = self.spec if self.graphs is None else self.spec.model_copy(update={"random_split": None, "split_index": None})
        of_nodes = NodeArrays(spec, self.steps, self.duck, self.progress, self.inputs, self.num_nodes, self.make_sink, new)
        graphs = None if self.graphs is None else self.graphs.write()
        split = of_nodes.splits()
        found = of_nodes.labels()
        features = of_nodes.features(split, None if self.graphs is None else self.graphs.training())
        births = of_nodes.births(self.columns.time)
        of_edges, edge_labels = self.edge_features.write(self._edge_sink), self.edge_labels.write(self._edge_sink)
        manifest = self._manifest(space, graph, split, found, [*features, *births], partition)
        manifest = manifest.with_edges([*of_edges], **{name: edge_labels[name] for name in NO_LABELS})
        manifest = manifest.model_copy(update={"graphs": graphs})
        finish_store(self.store, self.spec.out, manifest)
        dropped = {name: int(graph[name]) for name in ("missing", "self_loops", "duplicates") if graph[name]}
        wild = int(space["wild"]) + sum(int(each["wild"]) for each in [*features.values(), *of_edges.values()])
        return {
            "path": self.spec.out,
            "num_nodes": self.num_nodes,
            "num_edges": int(graph["slots"]),
            "dropped": dropped,
            "non_finite": wild,
            "partition": partition,
            "num_graphs": None if graphs is None else graphs.count,
            "notes": (*self._notes(split), *edge_labels.get("notes", ()), *self._unused([*features], [*of_edges])),
        }

    def _notes(self, split: dict[str, Any]) -> list[str]:
        of_graphs = [] if self.graphs is None else self.graphs.splits()["notes"]
        return [*self.steps.notes, *self.inputs.notes, *split["notes"], *of_graphs]

    def _edge_sink(self) -> MakeSink:
        """What makes the sinks of arrays with one row per input edge."""
        return Appender if self.events is None else self.events.sink()

    def _unused(self, of_nodes: list[str], of_edges: list[str]) -> list[str]:
        """Say which arrays are stored and reach no batch by themselves, a line for nodes and one for edges.

        Those of many graphs do.
        """
        lines: list[str] = []
        if self.graphs is not None:
            return lines
        if others := sorted({*of_nodes} - {"x"}):
            lines.append(f"stored, but not in batches: {', '.join(others)} (of nodes: ds.rows(NAME), by batch.n_id)")
        if self.events is None and (others := sorted({*of_edges} - {"edge_attr"})):
            lines.append(f"stored, in batches on request: {', '.join(others)} (of edges: edge_features=[NAME] of a loader)")
        return lines

    def _columns(self) -> EdgeColumns:
        table, plain = self.inputs.edges, self.spec.edges is not None
        src = table.column(self.spec.src if plain or table.text else "src", "sources", ("src", 0))
        dst = table.column(self.spec.dst if plain or table.text else "dst", "destinations", ("dst", 1))
        weight = self.inputs.weight
        held = None if weight is None else table.column(weight, "weights")
        time = None if self.spec.time is None else TimeColumn(**self.steps.run("time", self._look_at_time))
        return EdgeColumns(table, src, dst, held, time)

    def _look_at_time(self) -> dict[str, Any]:
        assert self.spec.time is not None
        found = time_column(self.duck, self.inputs.edges, self.spec.time, "times", self.spec.time_unit)
        return asdict(found)

    def _rows_known(self) -> tuple[int, str] | None:
        """The number of nodes that the inputs determine, and which of them does."""
        inputs = self.inputs
        if inputs.nodes is not None:
            return inputs.nodes.rows, inputs.nodes.shown
        if inputs.num_nodes is not None:
            return inputs.num_nodes, "`num_nodes`" if self.spec.num_nodes else "as the data set says"
        for rows in (self.arrays.features(name) for name in self.arrays.names):
            return rows.count, rows.shown
        rows_of_labels = self.arrays.labels()
        return None if rows_of_labels is None else (rows_of_labels.count, rows_of_labels.shown)

    def _id_space(self) -> dict[str, Any]:
        """Steps scan and ids: {edges, kind, low, high, num_nodes, mapped: bool, wild}."""
        known = self._rows_known()
        self.why = known[1] if known else "as the edges say"
        scanned = self.steps.run("scan", lambda: self._scan(known))
        found = EdgeScan(**{key: scanned[key] for key in ("edges", "kind", "low", "high", "distinct", "empty")})
        return scanned | self.steps.run("ids", lambda: self._choose(found, known), [self.stage / "ids.parquet"])

    def _scan(self, known: tuple[int, str] | None) -> dict[str, Any]:
        self.progress("scan edges", 0, self.inputs.edges.rows)
        asked = self.spec.id_type
        if known and self.inputs.nodes is None:
            if asked == "str":
                raise InputError(f"rows come from {known[1]}, so text ids cannot be placed: list them in a table, `nodes`")
            asked = "int" if self.inputs.edges.text else "auto"
        edges = self.inputs.edges
        if edges.rows == 0:
            return self._no_edges(known)
        kind = ids.id_kind(self.duck, edges, [self.columns.src, self.columns.dst], asked)
        if kind == "str" and known and self.inputs.nodes is None:
            raise InputError(
                f"{edges.shown} has text ids, which {known[1]} cannot place in rows: list them in a table, `nodes`"
            )
        if self.inputs.nodes is not None:
            kind = self._node_kind(kind)
        settings = {"count_ids": known is None, "allow_nan": self.spec.allow_nan, "exact": self.spec.dtype in ("auto", "int64")}
        settings["drop_missing"] = self.spec.drop_missing
        found, wild = ids.scan(self.duck, self.columns, kind, **settings)
        self.progress("scan edges", found.edges, found.edges)
        return ids.to_json(found) | {"wild": wild}

    def _no_edges(self, known: tuple[int, str] | None) -> dict[str, Any]:
        """The scan of no edges: a graph if its nodes are known."""
        shown = self.inputs.edges.shown
        if known is None:
            raise InputError(f"{shown} has no edges, which give the nodes: give these by `num_nodes`, `nodes` or `features`")
        if self.spec.time is not None:
            raise InputError(f"{shown} has no edges: a temporal graph needs at least one")
        kind: names.IdKind = "int" if self.inputs.nodes is None else self._node_kind("int")
        return ids.to_json(EdgeScan(0, kind, 0, -1, None)) | {"wild": 0}

    def _node_kind(self, edge_kind: names.IdKind) -> names.IdKind:
        table = self.inputs.nodes
        assert table is not None
        column = table.column(self.spec.id, "node ids", ("id", 0))
        kind = ids.id_kind(self.duck, table, [column], self.spec.id_type)
        return "str" if "str" in (kind, edge_kind) else "int"

    def _choose(self, found: EdgeScan, known: tuple[int, str] | None) -> dict[str, Any]:
        """{num_nodes, mapped}: whether ids are rows; otherwise rows come from the node table or by rank."""
        table = self.inputs.nodes
        if table is not None:
            column = table.column(self.spec.id, "node ids", ("id", 0))
            mapped = not ids.check_node_ids(self.duck, table, column, found.kind)
            return {"num_nodes": table.rows, "mapped": mapped}
        if known is not None:
            return {"num_nodes": known[0], "mapped": False}
        assert found.distinct is not None
        if found.kind == "int" and found.low >= 0 and found.high < ids.DENSE * max(found.distinct, 2):
            return {"num_nodes": found.high + 1, "mapped": False}
        relation = self.columns.relation(found.kind)
        count = ids.distinct_ids(self.duck, relation, found.distinct, self.stage, self.progress)
        return {"num_nodes": count, "mapped": True}

    def _check_counts(self) -> None:
        """Check that every node array has one row per node, and that the store has space, before the long work starts."""
        self._check_num_nodes()
        for rows in [*(self.arrays.features(name) for name in self.arrays.names), self.arrays.labels()]:
            if rows is not None:
                rows.expect(self.num_nodes, self.why)
        if self.spec.task != "auto" and self.arrays.labels() is None:
            raise ConfigError(f"`task={self.spec.task!r}` says what the labels are, and there are none: leave it out")
        self.edge_features.check()
        self.edge_labels.check()

    def _check_num_nodes(self) -> None:
        asked, free = self.spec.num_nodes, shutil.disk_usage(self.steps.root).free
        if asked is not None and asked != self.num_nodes:
            raise InputError(f"`num_nodes` is {asked}, but {self.why} has {self.num_nodes} rows: leave it out")
        needed = 8 * self.num_nodes
        if needed > free:
            raise InputError(
                f"{self.num_nodes:,} nodes ({self.why}) need {format_bytes(needed)} for the offsets of their edges alone, and "
                f"{self.spec.out} has {format_bytes(free)} of disk: correct the number, or choose another disk"
            )

    def _ids_relation(self, kind: names.IdKind) -> str:
        if self.inputs.nodes is not None:
            column = self.inputs.nodes.column(self.spec.id, "node ids", ("id", 0))
            return ids.node_rows(self.inputs.nodes, column, kind)
        return f"SELECT id, file_row_number AS row FROM {sql.parquet([self.stage / 'ids.parquet'], position=True)}"

    def _mapped(self, space: dict[str, Any]) -> str:
        """Step map: SQL of the edges by input row, without those lacking a node; counts them in `space`."""
        kind, relation = space["kind"], self.columns.relation(space["kind"])
        space["missing"] = 0
        if not space["mapped"]:
            if not self.spec.drop_missing:
                found = EdgeScan(space["edges"], kind, space["low"], space["high"], None)
                ids.refuse_out_of_range(self.duck, self.columns, found, self.num_nodes, self.why)
            elif space["empty"] or not 0 <= space["low"] <= space["high"] < self.num_nodes:
                inside = f"src BETWEEN 0 AND {self.num_nodes - 1} AND dst BETWEEN 0 AND {self.num_nodes - 1}"
                relation = f"SELECT * FROM ({relation}) WHERE {inside}"
                space["missing"] = space["edges"] - self.duck.one(f"SELECT count(*) FROM ({relation})")[0]
            return relation
        pairs = self._ids_relation(kind)
        mapped = self.stage / "mapped.parquet"
        found_left = self.steps.run("map", lambda: self._map(space, relation, pairs), [self.stage / "half.parquet", mapped])
        space["missing"] = space["edges"] - found_left["left"]
        return csc.parquet_relation(mapped)

    def _write_ids(self, space: dict[str, Any]) -> None:
        """Step ids.lmdb, if ids are not rows, or rows not the input's."""
        kind, path = space["kind"], self.store / names.IDS
        pairs = self._ids_relation(kind) if space["mapped"] else None
        if self.order is not None:
            pairs = self.order.ids(pairs)
        if pairs is None:
            return

        def fill() -> dict[str, Any]:
            ids.write_lmdb(self.duck, path, kind, pairs, self.num_nodes, self.progress)
            return {}

        self.steps.run("ids.lmdb", fill, [path])

    def _map(self, space: dict[str, Any], relation: str, pairs: str) -> dict[str, Any]:
        nodes_table, rest = self.inputs.nodes, self.columns.rest
        left = ids.map_edges(self.duck, relation, space["edges"], pairs, self.stage, rest, self.progress)
        if left < space["edges"] and not self.spec.drop_missing:
            assert nodes_table is not None
            ids.refuse_missing(self.duck, self.columns, space["kind"], pairs, nodes_table.shown)
        return {"left": left}

    def _events(self, space: dict[str, Any], relation: str) -> str:
        """Steps time order and events, if edges have a time: SQL of the edges by number. Counts dropped self-loops."""
        left = space["edges"] - space["missing"]
        if not space["edges"]:
            space["self_loops"] = 0
            return relation
        if left == 0:
            raise InputError(f"{self.inputs.edges.shown}: every edge was dropped, no endpoint is a node; check the ids")
        space["self_loops"] = csc.count_self_loops(self.duck, relation) if self.spec.drop_self_loops else 0
        if space["self_loops"] == left:
            raise InputError(f"{self.inputs.edges.shown}: every edge is a self-loop, so none is left without them")
        if self.columns.time is None:
            return relation
        if self.spec.drop_self_loops:
            relation = f"SELECT * FROM ({relation}) WHERE src <> dst"
        self.events = Events(self.spec, self.steps, self.duck, self.progress, self.columns, self.num_nodes)
        in_order = not space["mapped"] and self.order is None
        return self.events.relation(relation, space["edges"], left - space["self_loops"], in_order)

    def _graph(self, space: dict[str, Any], relation: str) -> dict[str, Any]:
        """Steps dedup and graph: {slots, loops, missing, self_loops, duplicates}."""
        rest, spec = self.columns.rest, self.spec
        left = space["edges"] - space["missing"]
        slots = csc.directed(relation, spec.undirected, spec.drop_self_loops, list(rest))
        total, unique = left * (2 if spec.undirected else 1), self.stage / "unique.parquet"
        duplicates = 0
        if spec.drop_duplicates and total:
            counts = self.steps.run("dedup", lambda: self._dedup(slots, total, unique), [unique])
            duplicates, total = counts["before"] - counts["left"], counts["left"]
            slots = csc.parquet_relation(unique)
        outputs = [self.store / "graph", self.store / names.CHECKSUMS / "graph"]

        check = None if self.graphs is None else self.graphs.edge_check(self.columns)

        def write() -> dict[str, Any]:
            counts = self.num_nodes, space["edges"], total
            return dict(csc.write_csc(self.duck, self.store, slots, *counts, rest, self.progress, check))

        counts = self.steps.run("graph", write, outputs)
        return counts | {"missing": space["missing"], "self_loops": space["self_loops"], "duplicates": duplicates}

    def _dedup(self, slots: str, total: int, unique: Path) -> dict[str, Any]:
        before, left = csc.drop_duplicates(self.duck, slots, total, unique, self.progress)
        return {"before": before, "left": left}

    def _manifest(
        self,
        space: dict[str, Any],
        graph: dict[str, Any],
        split: dict[str, Any],
        found: dict[str, Any],
        features: list[str],
        partition: Partition | None,
    ) -> Manifest:
        weighted = self.columns.weight is not None
        arrays = [*features, *split["arrays"], *(["y"] if found["task"] else [])]
        return Manifest.homogeneous(
            num_nodes=self.num_nodes,
            num_edges=int(graph["slots"]),
            arrays=arrays,
            splits=split["sizes"],
            id_kind=space["kind"] if space["mapped"] or self.order is not None else None,
            columns=["edge_id", *self.columns.rest],
            has_self_loops=graph["loops"] > 0,
            weighted=weighted,
            undirected=self.spec.undirected,
            task=found["task"],
            num_classes=found["num_classes"],
            class_names=found["class_names"],
            partition=partition,
            order=self.spec.order,
            time=None if self.events is None else self.events.described(),
            input=self._left_out(space),
            created_by=_creator(),
        )

    def _left_out(self, space: dict[str, Any]) -> Input | None:
        """What a growing store must know: how many edges there were, and which kinds are dropped."""
        if not (space["missing"] or self.spec.drop_self_loops or self.spec.drop_duplicates):
            return None
        drops = {name: bool(getattr(self.spec, name)) for name in ("drop_self_loops", "drop_duplicates")}
        return Input(edges=space["edges"], **drops)
