"""Names of a package that are imported on first use, and names of modules that have moved."""

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
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
