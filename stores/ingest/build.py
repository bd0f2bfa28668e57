"""`ingest`: runs the steps in order, recording each when done, and publishes the store by one rename."""

import hashlib
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from ooc.stores import array_names as names
from ooc.stores.array_names import EdgeKey, show_edge_type
from ooc.stores.arrays.zarr_write import Appender
from ooc.stores.build import finish_store
from ooc.stores.errors import ConfigError, InputError, StoreError
from ooc.stores.ingest import ids, ogb
from ooc.stores.ingest.arrange import MakeSink
from ooc.stores.ingest.arrays import Arrays, blocks_of, lazy_arrays
from ooc.stores.ingest.datasets import ARRAYS, gather, gather_typed, input_files, refuse_files_twice
from ooc.stores.ingest.duck import Duck, Progress, silent
from ooc.stores.ingest.edge_type import EdgeTypeIngest
from ooc.stores.ingest.graphs import GraphSteps
from ooc.stores.ingest.ids import EdgeScan
from ooc.stores.ingest.inputs import Inputs
from ooc.stores.ingest.lazy import EdgeStream
from ooc.stores.ingest.node_type import End, NodeTypeIngest
from ooc.stores.ingest.renumber import Renumbering
from ooc.stores.ingest.shards import finish_shard, input_key
from ooc.stores.ingest.spec import IngestResult, IngestSpec
from ooc.stores.ingest.steps import Steps, fingerprint
from ooc.stores.ingest.typed_spec import HeteroSpec, Spec
from ooc.stores.io.atomic import check_absent, partial_path, write_error
from ooc.stores.io.working import tidy
from ooc.stores.manifest import Manifest, Partition
from ooc.stores.sizes import format_bytes

_FREE = {"memory"}
"""settings that do not change the store, so a resumed ingest may change them"""
_OF_A_SHARD = dict.fromkeys(("memory", "out", "shard"), True)
"""settings in which the shards of one store may differ"""
TypedArrays = Mapping[str | EdgeKey, Arrays]
"""arrays of a heterogeneous graph in memory by type"""


def ingest(spec: Spec, progress: Progress | None = None, arrays: Arrays | TypedArrays | None = None) -> IngestResult:
    """Build the store `spec.out`; equal inputs give the same bytes for any memory and number of threads.

    (Except with `partitioner="auto"`, where the memory may select the partitioner; the manifest names it.) The store is built
    in `<out>.partial`. A killed ingest leaves no store, and the same call resumes after the last finished step if settings and
    input files are unchanged; otherwise it starts over and says so in the result's notes. After an error that directory is
    removed, unless it does not belong to an ingest.

    Args:
        spec: What to ingest.
        progress: Called with the step, the units done and in total.
        arrays: Arrays of a data set in memory (x, y, edge_index, train_mask, ...), instead of files. Further ones with a row
            per node or per edge are stored under their names. Of a heterogeneous graph: such arrays by type.

    Raises:
        InputError: If the input is wrong; names file, row and value.
        StoreError: If `out` exists or the disk is full.
        ConfigError: If settings are invalid.

    >>> ingest(IngestSpec(out="papers.ooc", edges="edges/*.parquet", num_nodes=8_000_000)).num_edges
    100000000
    """
    begin = time.perf_counter()
    spec = ogb.typed(spec) if isinstance(spec, IngestSpec) else spec
    if isinstance(spec, IngestSpec) and spec.reverse:
        raise ConfigError("`reverse` adds edge types, and the edges have none: give `undirected`")
    typed: Any = arrays if isinstance(spec, HeteroSpec) or arrays is None else {"": arrays}
    if spec.pyg is not None and arrays is None:
        raise ConfigError("PyG data sets are read by ooc.pyg.dataset_source.ingest, which imports torch: call that instead")
    tidy(spec.out)
    check_absent(spec.out)
    files, data = _files(spec), _data(typed)
    common = input_key(spec.model_dump(exclude=_of_a_shard(spec)), files, _creator() + data)
    steps = Steps(spec.out, fingerprint(spec.model_dump_json(exclude=_FREE) + _creator() + data, files))
    keep = False
    try:
        with Duck(spec.memory_bytes, steps.spill) as duck:
            result = _Build(spec, steps, duck, progress or silent, common).run(typed)
    except OSError as error:
        raise _disk(error, spec.out) from error
    except (KeyboardInterrupt, SystemExit, MemoryError):
        keep = steps.store.is_dir()  # interrupted, not failed: the same call resumes, unless the store was published
        raise
    finally:
        steps.close(keep)
    return IngestResult(**result, seconds=time.perf_counter() - begin, resumed=tuple(steps.resumed))


def _disk(error: OSError, out: Path) -> StoreError:
    if error.filename is None or Path(str(error.filename)).is_relative_to(partial_path(out)):
        return write_error(error, out)
    return StoreError(f"{error.filename} cannot be read: {error.strerror or error}; check the file and the permissions")


def _files(spec: Spec) -> list[Path]:
    """Every file the specification names. Raises InputError for a missing one, and for one that is listed twice."""
    if isinstance(spec, IngestSpec):
        return input_files(spec)
    refuse_files_twice(spec.nodes, "nodes", ["id"])
    refuse_files_twice(spec.edges, "edges", ["src", "dst"])
    return list(dict.fromkeys(path for each in (*spec.nodes.values(), *spec.edges.values()) for path in input_files(each)))


def _of_a_shard(spec: Spec) -> dict[str, Any]:
    of_types = () if isinstance(spec, IngestSpec) else ("nodes", "edges")
    return {**_OF_A_SHARD, **{name: {"__all__": _OF_A_SHARD} for name in of_types}}


def _data(arrays: TypedArrays | None) -> str:
    """Hex digest of arrays in memory."""
    digest = hashlib.sha256()
    for of_type, own in (arrays or {}).items():
        digest.update(str(of_type).encode())
        for name, given in sorted(own.items()):
            array = np.load(given, mmap_mode="r") if isinstance(given, Path) else given
            digest.update(f"{name} {array.dtype} {array.shape} ".encode())
            for block in blocks_of(array):
                digest.update(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _creator() -> str:
    try:
        return f"ooc {version('ooc')}"
    except PackageNotFoundError:  # a source tree that is not installed
        return "ooc"


class _Build:
    """One ingest. Each method is a step or two; results are passed on through the journal as JSON."""

    def __init__(self, spec: Spec, steps: Steps, duck: Duck, progress: Progress, key: str) -> None:
        self.spec, self.steps, self.duck, self.progress = spec, steps, duck, progress
        self.key = key
        """what shards of one store have in common"""
        self.nodes: dict[str, NodeTypeIngest] = {}
        self.edges: dict[EdgeKey, EdgeTypeIngest] = {}
        self.notes: list[str] = []
        self.graphs: GraphSteps | None = None

    def run(self, arrays: TypedArrays | None) -> dict[str, Any]:
        self._gather(arrays)
        self._choose_rows()
        self._check_counts()
        if self.graphs is not None:
            self.graphs.find()
        relations = {key: edges.mapped() for key, edges in self.edges.items()}
        order = self._renumber(relations)
        self._write_ids(order)
        added = self.spec.added_reverses
        for key, edges in self.edges.items():
            in_order = not edges.source.mapped and not edges.target.mapped and order is None
            check = None if self.graphs is None else self.graphs.edge_check(edges.columns)
            edges.write_graph(edges.without_loops(relations[key], in_order), added.get(key), check)
        partition = None if order is None else order.parts()
        graphs = None if self.graphs is None else self.graphs.write()
        self._write_arrays(order)
        manifest = self._manifest(partition, order).model_copy(update={"graphs": graphs})
        if self.spec.shard is None:
            finish_store(self.steps.store, self.spec.out, manifest)
        else:
            finish_shard(self.steps.store, self.spec.out, self.spec.part, self.key, manifest)
        return self._result(manifest, partition)

    def _gather(self, arrays: TypedArrays | None) -> None:
        """Step gather, of each type of a heterogeneous graph, and the types."""
        if isinstance(self.spec, IngestSpec):
            inputs = self._inputs(self.spec, self.steps, None, None if arrays is None else arrays[""])
            of_nodes: dict[str, Inputs] = dict.fromkeys(self.spec.node_types, inputs)
            of_edges: dict[EdgeKey, Inputs] = dict.fromkeys(self.spec.edge_types, inputs)
            self.notes += inputs.notes
            if inputs.of_graphs(self.spec):
                self.graphs = GraphSteps(self.spec.with_graphs(), self.steps, self.duck, self.progress, inputs)
        else:
            of_nodes = {name: self._inputs_of(name, each, arrays) for name, each in self.spec.node_types.items()}
            of_edges = {key: self._inputs_of(key, each, arrays) for key, each in self.spec.edge_types.items()}
        for name, each in self.spec.node_types.items():
            self.nodes[name] = NodeTypeIngest(name, each, self._steps_of(name), self.duck, self.progress, of_nodes[name])
        for key, each in self.spec.edge_types.items():
            given = (key, each, self._steps_of(key), self.duck, self.progress, of_edges[key])
            self.edges[key] = EdgeTypeIngest(*given, self.nodes[key[0]], self.nodes[key[2]], self.spec.part)

    def _steps_of(self, of_type: str | EdgeKey) -> Steps:
        if isinstance(self.spec, IngestSpec):
            return self.steps
        return self.steps.of(of_type if isinstance(of_type, str) else show_edge_type(of_type))

    def _inputs_of(self, of_type: str | EdgeKey, spec: IngestSpec, arrays: TypedArrays | None) -> Inputs:
        found = self._inputs(spec, self._steps_of(of_type), of_type, None if arrays is None else arrays[of_type])
        self.notes += found.notes
        return found

    def _inputs(self, spec: IngestSpec, steps: Steps, of_type: str | EdgeKey | None, arrays: Arrays | None) -> Inputs:
        def found() -> Inputs:
            if of_type is None:
                return gather(spec, self.duck, steps.stage, arrays, self.progress)
            return gather_typed(spec, of_type, self.duck, steps.stage, arrays, self.progress)

        inputs = Inputs.from_json(steps.run("gather", lambda: found().to_json(), [steps.stage]))
        inputs.lazy = lazy_arrays(arrays or {}, steps.stage / ARRAYS)
        if inputs.edges.view is not None:
            self.duck.register(inputs.edges.view, EdgeStream(inputs.lazy[inputs.edges.files[0].parquet]))
        return inputs

    def _ends(self, node: NodeTypeIngest) -> list[End]:
        """The ends of edges that are nodes of a type."""
        sides = [(edges, side, end) for edges in self.edges.values() for side, end in (("src", 0), ("dst", 2))]
        return [End(edges, side) for edges, side, end in sides if edges.key[end] == node.name]

    def _choose_rows(self) -> None:
        """Steps scan and ids: which ids there are, and which rows they have."""
        found = self.steps.run("scan", self._scan)
        for name, node in self.nodes.items():
            node.kind = found["kinds"][name]
        for key, edges in self.edges.items():
            edges.scan = EdgeScan.from_json(found["edges"][show_edge_type(key)])
        for node in self.nodes.values():
            node.choose_rows(self._ends(node))

    def _scan(self) -> dict[str, Any]:
        for node in self.nodes.values():
            node.refuse_text()
        for node in self.nodes.values():
            node.kind = node.choose_kind(self._ends(node))
        edges = {show_edge_type(key): asdict(edges.look()) for key, edges in self.edges.items()}
        return {"kinds": {name: node.kind for name, node in self.nodes.items()}, "edges": edges}

    def _check_counts(self) -> None:
        """Check that every array has one row per node or edge, and that the store has space, before the long work starts."""
        for node in self.nodes.values():
            asked = node.spec.num_nodes
            if asked is not None and asked != node.num_nodes:
                raise InputError(f"`num_nodes` is {asked}, but {node.why} has {node.num_nodes} rows: leave it out")
        free = shutil.disk_usage(self.steps.root).free
        largest = max(self.nodes.values(), key=lambda node: node.num_nodes)
        added = self.spec.added_reverses
        bounds = [(edges.target, *([edges.source] if key in added else [])) for key, edges in self.edges.items()]
        ranges = [self.spec.part.range(node.num_nodes) for of_edges in bounds for node in of_edges]
        needed = 8 * sum(each.stop - each.start for each in ranges)  # a range has no len beyond 2**63
        if needed > free:
            raise InputError(
                f"{largest.num_nodes:,} nodes ({largest.why}) need {format_bytes(needed)} for the offsets of their edges "
                f"alone, and {self.spec.out} has {format_bytes(free)} of disk: correct the number, or choose another disk"
            )
        for node in self.nodes.values():
            node.check_arrays()
        self._check_tasks()
        normalize = next(iter(self.spec.node_types.values())).normalize
        if normalize != "none" and not any(node.arrays.names for node in self.nodes.values()):
            raise ConfigError(f"`normalize={normalize!r}` scales features, and there are none: leave it out")
        for node in self.nodes.values():
            if node.spec.reduction is not None and "x" not in node.arrays.names:
                raise ConfigError(f"`reduce` and `select` make the feature x narrower, and there is none{node.of}")
        for edges in self.edges.values():
            edges.check(many=self.graphs is not None)

    def _check_tasks(self) -> None:
        """Check that something has labels where `task` says what they are."""
        parts: list[NodeTypeIngest | EdgeTypeIngest] = [*self.nodes.values(), *self.edges.values()]
        of_graphs = self.graphs is not None and self.graphs.has_labels
        for part in parts:
            labelled = of_graphs or any(other.has_labels for other in parts if other.spec is part.spec)
            if part.spec.task != "auto" and not labelled:
                raise ConfigError(
                    f"`task={part.spec.task!r}` says what the labels{part.of} are, and there are none: leave it out"
                )

    def _renumber(self, relations: dict[EdgeKey, str]) -> Renumbering | None:
        """The steps of another order of nodes, of a homogeneous graph: its edges in `relations` get the new rows."""
        spec, of_node = self.spec, None if self.graphs is None else self.graphs.of_node
        if not isinstance(spec, IngestSpec) or (spec.parts is None and spec.order == "input" and of_node is None):
            return None
        ((key, edges),) = self.edges.items()
        order = Renumbering(spec, self.steps, self.duck, self.progress, edges.target.num_nodes, of_node)
        relations[key] = order.edges(relations[key], edges.scan.edges, edges.columns.rest)
        return order

    def _write_ids(self, order: Renumbering | None) -> None:
        """Step ids.lmdb, if ids are not rows, or rows not the input's."""
        path = self.steps.store / names.IDS
        pairs = {node.name: node.pairs() for node in self.nodes.values() if node.mapped}
        if order is not None:
            pairs = {name: order.ids(pairs.get(name)) for name in self.nodes}

        def fill() -> dict[str, Any]:
            for name, each in pairs.items():
                node = self.nodes[name]
                ids.write_lmdb(self.duck, path, node.kind, each, node.num_nodes, self.progress, name)
            return {}

        if pairs and self.spec.part.index == 1:  # the ids of all shards
            self.steps.run("ids.lmdb", fill, [path])

    def _write_arrays(self, order: Renumbering | None) -> None:
        """The steps of node arrays and edge features."""
        make_sink: MakeSink = self.spec.part.sink(Appender if order is None else order.arranging().sink)
        for name, node in self.nodes.items():
            times = [edges.columns.time for key, edges in self.edges.items() if key[2] == name]
            node.write(make_sink, None if order is None else order.new, times[0] if times else None, self.graphs)
        for edges in self.edges.values():
            edges.write_features()

    def _manifest(self, partition: Partition | None, order: Renumbering | None) -> Manifest:
        if isinstance(self.spec, IngestSpec):
            return self._of_only_type(self.spec, partition, order)
        added, known = self.spec.added_reverses, self.spec.known_reverses
        types = [each.described(added.get(key), known.get(key)) for key, each in self.edges.items()]
        edge_types = [each[0] for each in types] + [reverse for each in types for reverse in each[1:]]
        node_types = [node.described() for node in self.nodes.values()]
        return Manifest.heterogeneous(node_types, edge_types, created_by=_creator())

    def _of_only_type(self, spec: IngestSpec, partition: Partition | None, order: Renumbering | None) -> Manifest:
        """The manifest of a homogeneous graph."""
        (node,), (edges,) = self.nodes.values(), self.edges.values()
        return Manifest.homogeneous(
            num_nodes=node.num_nodes,
            num_edges=int(edges.made["slots"]),
            arrays=node.array_names,
            splits=node.made["split"]["sizes"],
            reduced=node.reduced,
            id_kind=node.kind if node.mapped or order is not None else None,
            columns=edges.stored_columns,
            has_self_loops=edges.made["loops"] > 0,
            weighted=edges.columns.weight is not None,
            undirected=spec.undirected,
            partition=partition,
            order=spec.order,
            time=None if edges.events is None else edges.events.described(),
            input=edges.left_out(),
            created_by=_creator(),
            **node.made["labels"],
        ).with_edges([*edges.made["features"]], **edges.made["labels"])

    def _result(self, manifest: Manifest, partition: Partition | None) -> dict[str, Any]:
        """The fields of the result."""
        made = [each.made for each in self.nodes.values()] + [each.made for each in self.edges.values()]
        of_arrays = [each for part in made for each in part["features"].values()]
        reasons = ("missing", "self_loops", "duplicates")
        dropped = {name: sum(edges.dropped[name] for edges in self.edges.values()) for name in reasons}
        split_notes = [f"{note}{node.of}" for node in self.nodes.values() for note in node.made["split"]["notes"]]
        split_notes += [note for edges in self.edges.values() for note in edges.notes]
        split_notes += [] if self.graphs is None else self.graphs.splits()["notes"]
        below_zero = [note for edges in self.edges.values() for note in edges.below_zero()]
        return {
            "path": self.spec.out,
            "num_nodes": manifest.num_nodes,
            "num_edges": manifest.num_edges,
            "dropped": {name: count for name, count in dropped.items() if count},
            "non_finite": sum([each.scan.wild for each in self.edges.values()] + [int(each["wild"]) for each in of_arrays]),
            "partition": partition,
            "shard": self.spec.shard,
            "num_graphs": None if manifest.graphs is None else manifest.graphs.count,
            "notes": (*self.notes, *split_notes, *below_zero, *self._by_place(), *self._unused()),
        }

    def _by_place(self) -> list[str]:
        """Say which columns of tables without a header were taken as ends of edges, where others may be meant."""
        lines: list[str] = []
        for edges in self.edges.values():
            columns, table = edges.columns, edges.columns.table
            named = (columns.src, columns.dst) == (edges.spec.src, edges.spec.dst)
            if table.header or named or columns.taken == {*table.columns}:
                continue
            first = f"{table.shown} has no header: sources are {columns.src}, destinations {columns.dst}"
            lines.append(f"{first} of {len(table.columns)} columns; src and dst name others")
        return lines

    def _unused(self) -> list[str]:
        """Say which arrays are stored and reach no batch by themselves, a line for nodes and one for edges.

        Those of many graphs do.
        """
        lines: list[str] = []
        if self.graphs is not None:
            return lines
        for node in self.nodes.values():
            if others := sorted({*node.made["features"]} - {"x"}):
                read = "ds.rows(NAME)" if not node.of else f"ds.nodes({node.name!r}).rows(NAME)"
                lines.append(f"stored, but not in batches: {', '.join(others)} (of nodes: {read}, by batch.n_id)")
        for edges in self.edges.values():
            others = sorted({*edges.made["features"]} - {"edge_attr"})
            if others and edges.events is None:
                lines.append(f"stored, in batches on request: {', '.join(others)} (of edges: edge_features=[NAME] of a loader)")
        return lines
