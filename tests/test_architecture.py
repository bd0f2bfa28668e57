"""The laws of the house: which package may import which, and what may stand where."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.forked import python

ROOT = Path(__file__).resolve().parents[1]
FILES = [path for package in ("stores", "ooc", "tools") for path in sorted((ROOT / package).rglob("*.py"))]
FLOORS = (
    ("cli",),
    ("examples",),
    ("report",),
    ("training",),
    ("planning", "temporal"),
    ("fullgraph", "history"),
    ("layerwise", "pyg"),
    ("loading",),
    ("models", "metrics", "sampling"),
    ("graph",),
    ("config",),
    ("runtime",),
)
"""Packages of `ooc/` from the top floor down: each imports only what stands below its floor."""
STORE_FLOORS = (
    ("dataset", "info", "integrity"),
    ("edge_set", "node_set"),
    ("remote",),
    ("growth",),
    ("ingest",),
    ("build",),
    ("events", "fingerprints", "graph_set"),
    ("bounds", "feature_map", "ids"),
    ("arrays", "graph", "metadata"),
    ("io", "manifest"),
    ("array_names", "closest", "jit", "labels", "sizes"),
    ("atomics", "errors", "kernel_key", "prefetch", "process"),
)
"""The same for the packages of `stores/`, and for the modules beside them."""


def module_of(path: Path) -> str:
    """The dotted name of a file's module."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in FILES}


@cache  # not when the tests are collected, which every process does
def imports(module: str) -> frozenset[str]:
    """Every module that a module imports, at any depth; `ooc.stores.x`, in the folder `stores`, as `stores.x`."""
    return frozenset(name.removeprefix("ooc.") if name.startswith("ooc.stores") else name for name in imported(MODULES[module]))


def all_imports() -> dict[str, frozenset[str]]:
    """The imports of every module."""
    return {name: imports(name) for name in MODULES}


def imported(path: Path) -> Iterator[str]:
    """Every module that a file imports, by the name it is imported by."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            assert node.module is not None
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full.replace("ooc.stores", "stores") in MODULES else node.module


def classes(package: str) -> dict[str, list[str]]:
    """Class name -> the modules of `package` that define it."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, path in MODULES.items():
        if name.split(".")[0] == package:
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(name)
    return found


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_go_one_way(path: Path) -> None:
    forbidden = {"stores": {"torch", "torch_geometric", "torchmetrics", "ooc", "tools"}, "ooc": {"tools"}, "tools": set()}
    used = {name.partition(".")[0] for name in imports(module_of(path))}
    assert not used & forbidden[path.relative_to(ROOT).parts[0]]


@pytest.mark.parametrize(("package", "floors"), [("ooc", FLOORS), ("stores", STORE_FLOORS)])
def test_packages_import_only_lower_floors(package: str, floors: tuple[tuple[str, ...], ...]) -> None:
    floor = {f"{package}.{name}": number for number, names in enumerate(floors) for name in names}
    upward = [
        f"{name} imports {target}"
        for name, targets in all_imports().items()
        for target in sorted(targets)
        if (mine := ".".join(name.split(".")[:2])) in floor
        and (its := ".".join(target.split(".")[:2])) in floor
        and mine != its
        and floor[its] <= floor[mine]
    ]
    assert not upward


def test_no_modules_import_each_other_in_a_circle() -> None:
    known = {name: {target for target in targets if target in MODULES} for name, targets in all_imports().items()}
    left = {name: targets - {name} for name, targets in known.items()}
    while free := [name for name, targets in left.items() if not targets]:
        for name in free:
            del left[name]
        for targets in left.values():
            targets -= set(free)
    assert not left, "in a circle, or above one"


def test_ooc_holds_packages_only() -> None:
    assert sorted(path.name for path in (ROOT / "ooc").glob("*.py")) == ["__init__.py", "__main__.py"]
    packages = {path.parent.name for path in (ROOT / "ooc").glob("*/__init__.py")} - {"stores"}
    assert packages == {name for names in FLOORS for name in names}, "every package has a floor"


def test_everything_in_stores_has_a_floor() -> None:
    found = {path.parent.name for path in (ROOT / "stores").glob("*/__init__.py")}
    found |= {path.stem for path in (ROOT / "stores").glob("*.py")} - {"__init__"}
    assert found == {name for names in STORE_FLOORS for name in names}


@pytest.mark.slow
def test_stores_is_installed_inside_ooc() -> None:
    """A package called `stores` in the user's environment, or beside their script, is another one."""
    assert (ROOT / "ooc" / "stores").resolve() == ROOT / "stores"
    files = [*FILES, *sorted((ROOT / "tests").rglob("*.py"))]
    assert [path for path in files if any(name.partition(".")[0] == "stores" for name in imported(path))] == []


def test_no_class_name_is_defined_twice() -> None:
    assert {name: where for name, where in classes("ooc").items() if len(where) > 1} == {}


def nodes_of(package: str) -> Iterator[tuple[str, ast.AST]]:
    """(module, node) of every node of the code of `package`."""
    for name, path in MODULES.items():
        if name.split(".")[0] == package:
            yield from ((name, node) for node in ast.walk(ast.parse(path.read_text())))


def test_only_the_registry_and_the_settings_know_modes_by_name() -> None:
    from ooc.config.modes import choices as settings
    from ooc.training.registry import MODES

    assert list(MODES) == list(settings()), "every task and mode has settings"
    modes = {mode for _, mode in MODES}
    compared, listed = [], []
    for module, node in nodes_of("ooc"):
        if module.startswith(("ooc.config", "ooc.training.registry")):
            continue
        if isinstance(node, ast.Dict | ast.List | ast.Set | ast.Tuple):
            several = node.keys if isinstance(node, ast.Dict) else node.elts
            names = {each.value for each in several if isinstance(each, ast.Constant)} & modes
            if len(names) > 1:
                listed.append(f"{module}:{node.lineno}: {ast.unparse(node)[:80]}")
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            words = {each.value for side in sides for each in ast.walk(side) if isinstance(each, ast.Constant)}
            if words & modes and any(re.search(r"\bmode$|[\[(]'mode'", ast.unparse(side)) for side in sides):
                compared.append(f"{module}:{node.lineno}: {ast.unparse(node)}")
    assert not compared
    assert not listed, "what is known of each mode stands in its class"


def test_nothing_is_decided_by_the_class_of_a_loader_settings_or_a_plan() -> None:
    asked = [
        f"{module}:{node.lineno}: {ast.unparse(node)}"
        for module, node in nodes_of("ooc")
        if isinstance(node, ast.Call)
        and called(node) == "isinstance"
        and re.search(r"(Loader|Config|Plan|Mode)\b", ast.unparse(node.args[1]))
    ]
    assert not asked


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("ooc", ["torch", "numba", "zarr", "numpy"]),
        ("ooc.stores.dataset", ["torch", "pyarrow", "duckdb"]),
        ("ooc.cli.main", ["torch", "numba", "pydantic", "typer"]),
        ("ooc.cli.commands", ["torch", "numba", "zarr", "numpy", "lmdb"]),  # of `ooc --help`
        ("ooc.stores.info", ["torch", "torch_geometric", "pyarrow", "duckdb", "matplotlib"]),
    ],
)
def test_importing_is_light(module: str, heavy: list[str]) -> None:
    code = f"import sys, {module}; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_package_offers_what_it_names() -> None:
    import ooc

    for name in ooc.__all__:
        assert getattr(ooc, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ooc.nothing


FRESH = """
import sys
for name in [name for name in sys.modules if name.partition(".")[0] == "ooc"]:
    del sys.modules[name]
sys.meta_path[:] = [each for each in sys.meta_path if not type(each).__module__.startswith("ooc")]
"""
"""forgets what the process it is forked from has imported of this project"""
STRICT = "import warnings; warnings.filterwarnings('error', category=DeprecationWarning, module='ooc|__main__')"


@pytest.mark.parametrize(
    "statement",
    [
        "from ooc.temporal.recurrent import WindowModel",
        "from ooc.temporal.run import train",
        "from ooc.progress import terminal_watcher",
        "from ooc.summary import score_lines",
    ],
)
def test_modules_that_moved_warn_and_work(statement: str) -> None:
    lines = [
        FRESH,
        "import warnings",
        "with warnings.catch_warnings(record=True) as seen:",
        "    warnings.simplefilter('always')",
        f"    {statement}",
        "print([str(each.message) for each in seen if each.category is DeprecationWarning])",
    ]
    done = python("-c", "\n".join(lines))
    assert f"{statement.split()[1]} is now ooc." in done.stdout


@pytest.mark.parametrize(
    "statement",
    [
        "from ooc.pyg import OocFeatureStore, OocGraphStore, OocSampler",
        "from ooc.models import build_model, full_blocks, summing_of",
        "from ooc.config import EventsConfig, FullConfig, SnapshotsConfig, TrainConfig, load_config",
        "from ooc.report import write_report",
    ],
)
def test_documented_names_are_where_they_were(statement: str) -> None:
    done = python("-c", f"{FRESH}\n{STRICT}\n{statement}")
    assert done.returncode == 0, done.stderr


def test_a_documented_name_that_has_moved_would_be_noticed() -> None:
    assert "DeprecationWarning: ooc.progress is now" in python("-c", f"{FRESH}\n{STRICT}\nimport ooc.progress").stderr


CONTAINERS = {"Counter", "OrderedDict", "defaultdict", "deque", "dict", "list", "set"}
CONTAINERS |= {"WeakKeyDictionary", "WeakSet", "WeakValueDictionary"}
CHANGES = {"add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault"}
CHANGES |= {"update"}
SHARED = {
    "ooc.graph.mapped_topology._topologies": "whose reading a child process begins anew",
    "ooc.graph.mapped_topology._touched": "counts which pages the process has mapped, for all loaders of a graph",
    "ooc.loading.feature_cache._registries": "rows kept in memory for the next pipeline: which are read, not what they are",
    "ooc.loading.row_pool._pools": "rows in the memory of GPUs: which are read, not what they are",
    "ooc.runtime.buffers._owners": "memory that is page-locked: how it is read, not what is there",
    "ooc.runtime.crew._thread_counts": "functions of libraries that torch has loaded",
    "ooc.models.products._onednn_is_faster": "a fact of the processor and of torch",
    "ooc.runtime.onednn.here": "a fact of torch",
    "ooc.runtime.product_kernels.here": "a function of a library that torch has loaded",
    "ooc.runtime.shared_work._helpers": "threads that wait for pieces of work: who computes, not what",
    "ooc.models.user_models._of_method": "parameters of a function, which do not change",
    "ooc.runtime.memory._occupied": "free blocks of the C library's heap, to give back when it may cache blocks again",
    "ooc.runtime.memory._policy": "what the C library was told to do with freed blocks, to restore it after a run",
    "ooc.runtime.pipeline._RUNNING": "pipelines to end before the interpreter does",
    "ooc.sampling.device_draws.compiled_for": "kernels that were found to give what torch gives",
    "ooc.sampling.device_topology._made": "topologies for GPUs, the same for all loaders of a graph",
    "ooc.sampling.host_edges.reader_for": "a kernel that was found to read what is there",
    "ooc.sampling.temporal_neighbor._shared": "open columns of a data set, the same for all its loaders",
}
"""State of a module that functions change, and why no result depends on it."""


def called(node: ast.AST | None) -> str:
    """The name of what an expression calls, "" where it is no call."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def containers(tree: ast.Module | ast.ClassDef) -> set[str]:
    """Names at the top of a module or class that are bound to a container."""
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            literal = isinstance(node.value, ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp)
            if literal or called(node.value) in CONTAINERS:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def changed(tree: ast.Module) -> set[str]:
    """Names of containers that functions of a module change."""
    found: set[str] = set()
    for node in [node for each in ast.walk(tree) if isinstance(each, ast.FunctionDef) for node in ast.walk(each)]:
        target: ast.AST | None = None
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            target = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            target = node.func.value
        found |= {target.id} if isinstance(target, ast.Name) else set()
    return found


def remembering(tree: ast.Module) -> set[str]:
    """Functions that keep their results for the next call (`functools.cache`, `lru_cache`)."""
    found: set[str] = set()
    for node in ast.walk(tree):
        for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else []:
            plain = decorator.attr if isinstance(decorator, ast.Attribute) else getattr(decorator, "id", "")
            found |= {node.name} if (called(decorator) or plain) in ("cache", "lru_cache") else set()
    return found


def changed_of_classes(tree: ast.Module) -> set[str]:
    """Attributes of classes that functions change: set by a class's name, or containers of a class that are not an object's."""
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    nodes = [node for each in ast.walk(tree) if isinstance(each, ast.FunctionDef) for node in ast.walk(each)]
    stored = [node for node in nodes if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)]
    owners = {*classes, "cls", "type(self)", "self.__class__"}
    spelled = lambda node: node.id if isinstance(node, ast.Name) else ast.unparse(node)  # noqa: E731
    found = {node.attr for node in stored if spelled(node.value) in owners}
    shared = {name for node in classes.values() for name in containers(node)} - {node.attr for node in stored}
    for node in nodes:
        target: ast.AST | None = None
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            target = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            target = node.func.value
        found |= {target.attr} & shared if isinstance(target, ast.Attribute) else set()
    return found


def state_of(source: str) -> set[str]:
    """What functions change of a module and its classes: state that a call leaves behind for the next one."""
    tree = ast.parse(source)
    rebound = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    return (containers(tree) & changed(tree)) | rebound | remembering(tree) | changed_of_classes(tree)


def test_no_result_depends_on_state_of_a_module() -> None:
    found = {
        f"{name}.{each}" for name, path in MODULES.items() if name.startswith("ooc.") for each in state_of(path.read_text())
    }
    assert found == set(SHARED)


@pytest.mark.parametrize(
    "source",
    [
        "_budgets: Kept = weakref.WeakKeyDictionary()\ndef budget_of(ds):\n    _budgets[ds] = divide(ds)",
        "_made = {}\ndef of(key):\n    return _made.setdefault(key, make(key))",
        "_last = None\ndef of(key):\n    global _last\n    _last = key",
        "@cache\ndef of(key):\n    return make(key)",
        "@functools.lru_cache(maxsize=8)\ndef of(key):\n    return make(key)",
        "class Plan:\n    made = {}\n    def of(self, key):\n        self.made[key] = make(key)",
        "class Plan:\n    last = None\n    def of(self, key):\n        Plan.last = key",
        "class Plan:\n    @classmethod\n    def of(cls, key):\n        cls.last = key",
    ],
)
def test_state_of_a_module_is_found(source: str) -> None:
    assert state_of(source)


def test_shares_of_the_memory_stand_in_its_plan() -> None:
    plan = "ooc.runtime.memory_plan"
    found = {
        f"{name}.{each.id}"
        for name, path in MODULES.items()
        if name.startswith("ooc.") and name != plan
        for each in ast.walk(ast.parse(path.read_text()))
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store) and each.id.endswith("SHARE")
    }
    assert not found, f"a share of the memory is {plan}'s; what is no memory is no share"


COMMANDS = {
    "ooc.config.topics": "headings of the help",
    "ooc.planning.choose_mode": "the command line of the recommended mode, in a plan's JSON",
    "ooc.training.comparison": "the command line of a run in a process of its own",
}
"""Modules below the command line whose strings name flags, and why."""


def messages(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of every string but docstrings and helps of flags; an f-string is one text."""
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    helps = [node.value for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == "description"]
    parts = [part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values]
    told |= {id(each) for node in [*helps, *parts] for each in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in told:
            yield node.lineno, ast.unparse(node)


def flags_named(source: str) -> list[str]:
    """The messages of a module that name a flag of the command line."""
    flag = re.compile(r"(?<![\w-])--[a-z{]")
    if not flag.search(source):  # no string of it names one
        return []
    return [f"{line}: {text}" for line, text in messages(ast.parse(source)) if flag.search(text)]


def test_messages_name_arguments_not_flags() -> None:
    """Below the command line, which puts its flags in their place: `ooc.cli.messages.name_flags`."""
    found = {
        name: flags
        for name, path in MODULES.items()
        if not name.startswith(("ooc.cli", "ooc.examples", "tools"))
        and name not in COMMANDS
        and (flags := flags_named(path.read_text()))
    }
    assert found == {}


@pytest.mark.parametrize(
    "source",
    ['raise ConfigError("give --nodes too")', 'raise ConfigError(f"{path}: give --{name}")', 'advice = "more --memory"'],
)
def test_flags_in_messages_are_found(source: str) -> None:
    assert flags_named(source)


def test_the_command_line_shows_flags_in_place_of_arguments() -> None:
    import ooc.cli.commands  # noqa: F401 - registers the verbs
    from ooc.cli.messages import name_flags

    shown = {
        "give `drop_missing=True`": "give --drop-missing",
        "pass `header=False` if": "pass --no-header if",
        "`dtype='int8'`, `parts=7`": "--dtype int8, --parts 7",
        "as `store` or in": "as the argument STORE or in",
        "`model_class='net:Net'`": "--model net:Net",
        "leave out `num_parts`": "leave out --parts",
        "run `ooc verify`, `self.layers`": "run `ooc verify`, `self.layers`",
    }
    assert {text: name_flags(text) for text in shown} == shown
