"""One edge type of an ingest: its columns, its edges as rows of their end types, its CSC and its features."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from ooc.stores import array_names as names
from ooc.stores.array_names import HOMOGENEOUS, EdgeKey, show_edge_type
from ooc.stores.arrays.zarr_write import Appender
from ooc.stores.errors import ConfigError, InputError
from ooc.stores.ingest import edges as csc
from ooc.stores.ingest import ids
from ooc.stores.ingest.arrange import MakeSink
from ooc.stores.ingest.duck import Duck, Progress
from ooc.stores.ingest.edge_features import EdgeFeatures
from ooc.stores.ingest.edge_labels import NONE as NO_LABELS
from ooc.stores.ingest.edge_labels import EdgeLabels
from ooc.stores.ingest.edges import Check
from ooc.stores.ingest.events import Events
from ooc.stores.ingest.ids import NO_EDGES, Bound, EdgeColumns, EdgeScan, IdTable
from ooc.stores.ingest.inputs import Inputs
from ooc.stores.ingest.node_type import NodeTypeIngest
from ooc.stores.ingest.shards import Shard
from ooc.stores.ingest.spec import IngestSpec
from ooc.stores.ingest.steps import Steps
from ooc.stores.ingest.times import TimeColumn, time_column
from ooc.stores.manifest import EdgeTime, EdgeType, Input


class EdgeTypeIngest:
    """One edge type of an ingest. Call its methods in their order here; each is a step or two."""

    def __init__(
        self,
        key: EdgeKey,
        spec: IngestSpec,
        steps: Steps,
        duck: Duck,
        progress: Progress,
        inputs: Inputs,
        source: NodeTypeIngest,
        target: NodeTypeIngest,
        part: Shard,
    ) -> None:
        self.part = part
        self.key, self.spec, self.steps, self.duck, self.progress = key, spec, steps, duck, progress
        self.inputs, self.table, self.source, self.target = inputs, inputs.edges, source, target
        self.columns = self._columns()
        self.features = EdgeFeatures(spec, steps, duck, progress, self.columns, inputs, key)
        self.labels = EdgeLabels(spec, steps, duck, self.columns, inputs, key)
        self.notes: list[str] = []
        """about the splits of edges"""
        self.scan: EdgeScan = NO_EDGES
        self.missing = self.self_loops = 0
        """edges that were dropped, by reason"""
        self.events: Events | None = None
        self.made: dict[str, Any] = {}
        """what was written of the graph: slots, loops, duplicates"""
        self.added: dict[str, Any] | None = None
        """the same of the reverse edge type"""

    @property
    def sources(self) -> int | None:
        """Number of sources of a bipartite graph."""
        return None if self.source is self.target else self.source.num_nodes

    @property
    def of(self) -> str:
        """The type in messages, "" in a homogeneous graph."""
        return "" if self.key == HOMOGENEOUS else f" of edge type {show_edge_type(self.key)}"

    @property
    def has_labels(self) -> bool:
        return self.labels.rows is not None

    @property
    def by_time(self) -> bool:
        """Whether slots are sorted by a column of times: of edge types that have no events."""
        return self.columns.time is not None and self.key != HOMOGENEOUS

    @property
    def stored_columns(self) -> list[str]:
        """Names of the columns that a slot has besides its source."""
        return [*(["edge_id"] if self.spec.edge_ids else []), *self.columns.rest]

    def below_zero(self) -> list[str]:
        """Say that ids below 0 are nodes, where no table lists the nodes: elsewhere -1 often is none."""
        ends = ((self.source, self.columns.src, self.scan.src), (self.target, self.columns.dst, self.scan.dst))
        found = [(column, end.low) for node, column, end in ends if node.mapped and node.inputs.nodes is None and end.low < 0]
        if not found:
            return []
        column, low = found[0]
        what = f"{self.table.shown} has ids below 0, such as {low} in {column}, which are nodes like others"
        return [f"{what}: leave such edges out if they mean none, or list the nodes, and give `drop_missing=True`"]

    def check(self, many: bool) -> None:
        """Check that features, labels and splits fit, before the long work starts; `many`: whether there are many graphs."""
        self.features.check()
        self.labels.check()
        by_id = [*self.features.names, *(["labels"] if self.has_labels else []), *self.inputs.edge_splits]
        if not self.spec.edge_ids and (by_id or many or self.columns.time is not None):
            what = f"the edges' {', '.join(by_id)}" if by_id else "many graphs" if many else "the edges' times"
            raise ConfigError(f"to store {what}{self.of}, the edges' ids are needed: leave out `edge_ids=False`")

    def _columns(self) -> EdgeColumns:
        table, plain = self.table, self.spec.edges is not None
        src = table.column(self.spec.src if plain or table.text else "src", "sources", ("src", 0))
        dst = table.column(self.spec.dst if plain or table.text else "dst", "destinations", ("dst", 1))
        weight = self.inputs.weight
        held = None if weight is None else table.column(weight, "weights")
        time = None if self.spec.time is None else TimeColumn(**self.steps.run("time", self._look_at_time))
        return EdgeColumns(table, src, dst, held, time)

    def _look_at_time(self) -> dict[str, Any]:
        assert self.spec.time is not None
        return asdict(time_column(self.duck, self.table, self.spec.time, "times", self.spec.time_unit))

    def relation(self) -> str:
        """SQL of the edges by input row, with ids."""
        return self.columns.relation((self.source.kind, self.target.kind))

    def look(self) -> EdgeScan:
        """Scan the edges once, with the kinds of ids that their end types have."""
        if not self.table.rows:
            return self._no_edges()
        self.progress("scan edges", 0, self.table.rows)
        found = ids.scan(
            self.duck,
            self.columns,
            (self.source.kind, self.target.kind),
            count_ids=self.source.known is None or self.target.known is None,
            allow_nan=self.spec.allow_nan,
            exact=self.spec.dtype in ("auto", "int64"),
            drop_missing=self.spec.drop_missing,
        )
        self.progress("scan edges", found.edges, found.edges)
        return found

    def _no_edges(self) -> EdgeScan:
        """The scan of no edges: a graph if its nodes are known."""
        shown = self.table.shown
        if self.key == HOMOGENEOUS and self.source.known is None:
            raise InputError(f"{shown} has no edges, which give the nodes: give these by `num_nodes`, `nodes` or `features`")
        if self.key == HOMOGENEOUS and self.spec.time is not None:
            raise InputError(f"{shown} has no edges: a temporal graph needs at least one")
        return NO_EDGES

    def mapped(self) -> str:
        """Step map: SQL of the edges by input row, with rows for ids, without those lacking a node; counts these."""
        relation, found = self.relation(), self.scan
        ends = [("src", self.source, found.src), ("dst", self.target, found.dst)]
        bounds = [Bound(side, node.num_nodes, node.why) for side, node, _ in ends if not node.mapped]
        if bounds and not self.spec.drop_missing:
            ids.refuse_out_of_range(self.duck, self.columns, found, bounds)
        self._refuse_other_ids()
        outside = any(not 0 <= scan.low <= scan.high < node.num_nodes for _, node, scan in ends if not node.mapped)
        if bounds and self.spec.drop_missing and (found.empty or outside):
            inside = " AND ".join(f"{each.side} BETWEEN 0 AND {each.num_nodes - 1}" for each in bounds)
            relation = f"SELECT * FROM ({relation}) WHERE {inside}"
            if len(bounds) == len(ends):
                self.missing = found.edges - self.duck.one(f"SELECT count(*) FROM ({relation})")[0]
        tables = [IdTable(side, node.pairs(), node.why) for side, node, _ in ends if node.mapped]
        if not tables:
            return relation
        mapped = self.steps.stage / "mapped.parquet"
        outputs = [self.steps.stage / "half.parquet", mapped]
        left = self.steps.run("map", lambda: self._map(relation, tables), outputs)["left"]
        self.missing = found.edges - left
        return csc.parquet_relation(mapped)

    def _refuse_other_ids(self) -> None:
        for node in (self.source, self.target):
            if self.spec.sorted and node.mapped:
                raise InputError(
                    f"{self.table.shown}: ids of nodes{node.of} are not their rows 0..{node.num_nodes - 1}, and looking them "
                    "up changes the order of edges: number the nodes before you sort the edges, or leave out `sorted`"
                )

    def _map(self, relation: str, tables: list[IdTable]) -> dict[str, Any]:
        left = ids.map_edges(self.duck, relation, self.scan.edges, tables, self.steps.stage, self.columns.rest, self.progress)
        if left < self.scan.edges and not self.spec.drop_missing:
            ids.refuse_missing(self.duck, self.columns, (self.source.kind, self.target.kind), tables)
        return {"left": left}

    def without_loops(self, relation: str, in_order: bool) -> str:
        """Steps time order and events, if edges are events: SQL of the edges by number. Counts dropped self-loops.

        `in_order` says whether `relation` is in input order.
        """
        if not self.scan.edges:
            return relation
        left = self.scan.edges - self.missing
        if left == 0:
            raise InputError(f"{self.table.shown}: every edge was dropped, no endpoint is a node; check the ids")
        drop = self.spec.drop_self_loops and self.sources is None
        self.self_loops = csc.count_self_loops(self.duck, relation) if drop else 0
        if self.self_loops == left:
            raise InputError(f"{self.table.shown}: every edge is a self-loop, so none is left without them")
        if self.columns.time is None or self.by_time:
            return relation
        if drop:
            relation = f"SELECT * FROM ({relation}) WHERE src <> dst"
        given = (self.spec, self.steps, self.duck, self.progress, self.columns, self.target.num_nodes)
        self.events = Events(*given, self.part)
        return self.events.relation(relation, self.scan.edges, left - self.self_loops, in_order)

    def write_graph(self, relation: str, reverse: EdgeKey | None, check: Check | None) -> None:
        """Steps dedup and graph, and reverse for the edge type that has the edges in the other direction.

        For `check` see `write_csc`.
        """
        rest, spec = self.columns.rest, self.spec
        left = self.scan.edges - self.missing
        slots = csc.directed(relation, spec.undirected, spec.drop_self_loops and self.sources is None, list(rest))
        kept = self.part.where(slots, "dst", self.target.num_nodes)
        total, unique = -(-left * (2 if spec.undirected else 1) // self.part.count), self.steps.stage / "unique.parquet"
        duplicates = 0
        if spec.drop_duplicates and total:
            counts = self.steps.run("dedup", lambda: self._dedup(kept, total, unique), [unique])
            duplicates, total = counts["before"] - counts["left"], counts["left"]
            slots = kept = csc.parquet_relation(unique)
        write = partial(self._write_csc, total=total, check=check)
        self.made = write("graph", kept, self.key) | {"duplicates": duplicates}
        if reverse is not None:
            back = self.part.where(csc.reversed_slots(slots, list(rest)), "dst", self.source.num_nodes)
            self.added = write("reverse", back, reverse)

    def _write_csc(self, step: str, slots: str, key: EdgeKey, total: int, check: Check | None) -> dict[str, Any]:
        nodes, sources = self.target.num_nodes, self.sources
        if key != self.key:
            nodes, sources = self.source.num_nodes, None if sources is None else self.target.num_nodes
        folder = Path(names.graph_array("x", key)).parent.as_posix()
        store, rest = self.steps.store, self.columns.rest

        def write() -> dict[str, Any]:
            graph = (self.duck, store, slots, nodes, self.scan.edges, total, rest, self.progress)
            where, part = self.table.where if self.spec.sorted else None, self.part.range(nodes)
            return dict(csc.write_csc(*graph, check, key, sources, self.by_time, self.spec.edge_ids, part, where))

        return self.steps.run(step, write, [store / folder, store / names.checksum_array(folder)])

    def _dedup(self, slots: str, total: int, unique: Path) -> dict[str, Any]:
        before, left = csc.drop_duplicates(self.duck, slots, total, unique, self.progress)
        return {"before": before, "left": left}

    def write_features(self) -> None:
        """Steps edge features NAME, edge labels and edge splits."""
        self.made["features"] = self.features.write(self._make_sink)
        labels = self.labels.write(self._make_sink)
        self.notes = [f"{note}{self.of}" for note in labels.get("notes", ())]
        self.made["labels"] = {name: labels[name] for name in NO_LABELS}

    def _make_sink(self) -> MakeSink:
        return self.part.sink(Appender if self.events is None else self.events.sink())

    @property
    def dropped(self) -> dict[str, int]:
        """Edges that were dropped, by reason."""
        return {"missing": self.missing, "self_loops": self.self_loops, "duplicates": int(self.made["duplicates"])}

    def left_out(self) -> Input | None:
        """What a growing store must know: how many edges there were, and which kinds are dropped."""
        if not (self.missing or self.spec.drop_self_loops or self.spec.drop_duplicates):
            return None
        drops = {name: bool(getattr(self.spec, name)) for name in ("drop_self_loops", "drop_duplicates")}
        return Input(edges=self.scan.edges, **drops)

    def described(self, reverse: EdgeKey | None, reverse_of: EdgeKey | None) -> list[EdgeType]:
        """The manifest's entries of a heterogeneous store: this type, and the reverse one if it was added."""
        time = self.columns.time
        dtype: Any = None if time is None else time.dtype.name
        shared: dict[str, Any] = {
            "columns": self.stored_columns,
            "weighted": self.columns.weight is not None,
            "undirected": self.spec.undirected,
            "input": self.left_out(),
            "time": None if time is None else EdgeTime(dtype=dtype, unit=time.unit),
        }
        own = {"arrays": sorted(self.made["features"]), **self.made["labels"], "reverse_of": reverse_of}
        found = [_entry(self.key, self.made, **own, **shared)]
        if reverse is not None and self.added is not None:
            found.append(_entry(reverse, self.added, reverse_of=self.key, **shared))
        return found


def _entry(key: EdgeKey, made: dict[str, Any], **fields: Any) -> EdgeType:
    source, name, target = key
    return EdgeType(source=source, name=name, target=target, count=made["slots"], has_self_loops=made["loops"] > 0, **fields)
