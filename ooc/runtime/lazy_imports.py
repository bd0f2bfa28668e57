"""Names of a package that are imported on first use, and names of modules that have moved."""

import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any


def lazy_exports(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """A module `__getattr__` (PEP 562) that imports a name's module on first use; `modules` maps each name to its module."""

    def getattr_of(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    return getattr_of


class MovedModules(MetaPathFinder, Loader):
    """Finds modules under the names they had before; importing one warns and names the new module."""

    def __init__(self, moved: Mapping[str, str]) -> None:
        self._moved = moved

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in self._moved else None

    def exec_module(self, module: ModuleType) -> None:
        new = self._moved[module.__name__]
        warnings.warn(f"{module.__name__} is now {new}: import that", DeprecationWarning, stacklevel=2)
        moved = import_module(new)
        module.__dict__["__getattr__"] = lambda name: getattr(moved, name)


def keep_old_names(moved: Mapping[str, str]) -> None:
    """Let `import OLD` import NEW, with a DeprecationWarning, for every OLD -> NEW of `moved`."""
    sys.meta_path.append(MovedModules(moved))


class _Deferred(ModuleType):
    """A module whose code runs when a name of it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if not self._load():
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(self, name)

    def __dir__(self) -> list[str]:
        self._load()
        return list(ModuleType.__dir__(self))

    def _load(self) -> bool:
        loader = self.__spec__.loader if self.__spec__ is not None else None
        return isinstance(loader, _OnFirstUse) and loader.load(self)


class _OnFirstUse(SourceFileLoader):
    """Runs the code of a module on its first use, once, whichever threads use it."""

    def __init__(self, name: str, path: str) -> None:
        super().__init__(name, path)
        self._lock, self._loading, self._loaded = threading.RLock(), False, False

    def exec_module(self, module: ModuleType) -> None:
        module.__class__ = _Deferred

    def load(self, module: ModuleType) -> bool:
        """Run the code, or wait for the thread that does; False for that thread itself, which asks for a name too early."""
        with self._lock:
            if self._loading:
                return False
            if not self._loaded:
                self._loading = True
                try:
                    super().exec_module(module)
                finally:
                    self._loading = False
                self._loaded = True
                module.__class__ = ModuleType
        return True


class DeferredModules(MetaPathFinder):
    """Finds modules whose code is to run when they are used, not when they are imported.

    Only what `importlib` documents is used. A module that is installed in another way than as a source file is imported at
    once.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in self._names else None
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _OnFirstUse(spec.loader.name, spec.loader.path)
        return spec


def defer_modules(names: Iterable[str]) -> None:
    """Let `import NAME` run the code of that module on its first use.

    >>> defer_modules(["torch_geometric.datasets"])
    """
    sys.meta_path.insert(0, DeferredModules(names))
