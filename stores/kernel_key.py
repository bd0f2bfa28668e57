"""What the compiled code of a numba kernel depends on, as a hash: the kernel, the helpers it calls, the constants it reads.

The key is made of bytecode, not of files: it does not depend on where a checkout lies, on comments, docstrings or annotations,
or on anything in a file but the functions that the kernel uses. Python, numba, llvmlite and numpy count with their versions.
"""

import dis
import enum
import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

import llvmlite
import numba
import numpy as np
from numba import types

VERSIONS = (sys.implementation.cache_tag, numba.__version__, llvmlite.__version__, np.__version__)
_BY_NAME = frozenset({"numba", "llvmlite", "numpy", *sys.stdlib_module_names})
"""packages whose functions and constants are known by name: their versions are in the key"""
_SETTINGS = ("OPT", "BOUNDSCHECK", "LOOP_VECTORIZE", "SLP_VECTORIZE", "DEBUGINFO_DEFAULT")
"""of numba's configuration, those that change the code"""


class NoKeyError(Exception):
    """A kernel uses a value that cannot be described, so that its compiled code is not to be kept."""


def kernel_key(kernel: Callable[..., Any], signature: Any, target: Any = ()) -> str:
    """The name of a kernel's compiled code: 32 hexadecimal digits.

    Args:
        kernel: what `ooc.stores.jit.kernel` returned. All globals that it uses are defined by now.
        signature: the types of its arguments, as numba has them.
        target: what it is compiled for: the triple, name and features of the CPU.

    Raises:
        NoKeyError: the kernel uses a value of a kind that is not known here.

    >>> kernel_key(add, (types.int64, types.int64))
    '9f86d081884c7d659a2feaa0c55ad015'
    """
    settings = [getattr(numba.config, name, None) for name in _SETTINGS]
    seen: dict[int, int] = {}
    text = repr((VERSIONS, settings, target, str(signature), _fields_of(signature, seen), _describe(kernel, seen)))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _fields_of(signature: Any, seen: dict[int, int]) -> list[str]:
    """The named tuples among a signature's types: numba tells them apart by name, kernels read them by position."""
    found: list[str] = []
    for item in signature if isinstance(signature, tuple) else signature.args:
        if isinstance(item, types.BaseNamedTuple):
            found.append(_describe(item.instance_class, seen))
        if isinstance(item, types.BaseTuple):
            found.extend(_fields_of(tuple(item.types), seen))
    return found


def _describe(value: Any, seen: dict[int, int]) -> str:
    """A text that changes when what a kernel makes of the value does."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__module__}.{value} {value.value!r}"
    if value is None or value is Ellipsis or isinstance(value, bool | int | float | complex | str | bytes):
        return f"{type(value).__qualname__} {value!r}"
    if isinstance(value, np.ndarray | np.generic):
        held = np.asarray(value)
        return f"array {held.dtype.descr} {held.shape} {held.strides} {hashlib.sha256(held.tobytes()).hexdigest()}"
    if isinstance(value, np.dtype):
        return f"dtype {value.str} {value.fields}"
    if isinstance(value, types.ExternalFunction):
        return f"external {value.symbol} {value.sig}"
    if isinstance(value, types.Type):
        return f"type {value}"
    if isinstance(value, tuple | frozenset):
        items = [_describe(item, seen) for item in value]
        return f"{_describe(type(value), seen)} {sorted(items) if isinstance(value, frozenset) else items}"
    return _describe_code(value, seen)


def _describe_code(value: Any, seen: dict[int, int]) -> str:
    """What is defined in a module: a module, a class, a kernel, an intrinsic, or a function of Python."""
    if isinstance(value, ModuleType):
        if not _by_name(value.__name__):  # which of its attributes are read is not known
            raise NoKeyError(f"the module {value.__name__} is used as a value")
        return f"module {value.__name__}"
    if hasattr(value, "__qualname__") and _by_name(value.__module__):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, type):
        return _describe_class(value, seen)
    if id(value) in seen:
        return f"number {seen[id(value)]}"
    seen[id(value)] = len(seen)
    if isinstance(value, FunctionType):
        return _describe_function(value, seen)
    inner = getattr(value, "__wrapped__", None)  # of kernels and intrinsics
    if not isinstance(inner, FunctionType):
        raise NoKeyError(f"{value!r}, a {type(value).__qualname__}, cannot be described")
    options = sorted(getattr(value, "targetoptions", {}).items(), key=str)
    return f"{type(value).__qualname__} {options} {_describe(inner, seen)}"


def _describe_class(value: type, seen: dict[int, int]) -> str:
    """A named tuple is its fields, an enumeration its members; other classes are known by name."""
    name = f"class {value.__module__}.{value.__qualname__}"
    if issubclass(value, enum.Enum):
        return f"{name} {[(member.name, repr(member.value)) for member in value]}"
    if issubclass(value, tuple) and hasattr(value, "_fields"):
        defaults = getattr(value, "_field_defaults", {})
        return f"{name} {value._fields} {[(key, _describe(item, seen)) for key, item in defaults.items()]}"
    return name


def _describe_function(function: FunctionType, seen: dict[int, int]) -> str:
    """Its bytecode, and all that it refers to."""
    describe = partial(_describe, seen=seen)
    used = _describe_globals(function, seen)
    cells = [describe(cell.cell_contents) for cell in function.__closure__ or ()]
    defaults = [describe(value) for value in (*(function.__defaults__ or ()), *sorted((function.__kwdefaults__ or {}).items()))]
    overloads = [describe(value) for value in getattr(function, "overloads", ())]
    code = _describe_bytecode(function.__code__, function.__doc__, seen)
    return f"def {function.__module__}.{function.__qualname__} {code} {used} {cells} {defaults} {overloads}"


def _describe_bytecode(code: CodeType, doc: str | None, seen: dict[int, int]) -> str:
    """Instructions and what handles their exceptions, constants and names; neither lines nor the docstring."""
    constants = []
    for item in code.co_consts:
        if isinstance(item, CodeType):
            constants.append(_describe_bytecode(item, None, seen))
        else:
            constants.append("doc" if doc is not None and item == doc else _describe(item, seen))
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    return f"{hashlib.sha256(code.co_code + code.co_exceptiontable).hexdigest()} {constants} {names} {counts}"


def _describe_globals(function: FunctionType, seen: dict[int, int]) -> list[str]:
    """All globals that a function reads, by name.

    A global also counts where only an attribute of that name is read, as looking at instructions takes a third of a kernel's
    loading. They are looked at where a module of ours is read, or what seems to be read cannot be described.
    """
    code, namespace = function.__code__, function.__globals__
    named = [(name, namespace[name]) for name in _names_of(code) if name in namespace]
    if not any(isinstance(value, ModuleType) and not _by_name(value.__name__) for _, value in named):
        before = dict(seen)
        with suppress(NoKeyError):
            return [f"{name} {_describe(value, seen)}" for name, value in named]
        seen.clear()
        seen.update(before)  # what was described is not in the key yet
    return [f"{name} {_describe(value, seen)}" for name, value in _globals_of(code, namespace)]


def _names_of(code: CodeType) -> Iterator[str]:
    """The names of globals and attributes in the code, and in functions within."""
    yield from code.co_names
    for item in code.co_consts:
        if isinstance(item, CodeType):
            yield from _names_of(item)


def _globals_of(code: CodeType, namespace: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The names and values of all globals that the code reads, `module.name` as the value of that name."""
    instructions = list(dis.get_instructions(code))
    for k, instruction in enumerate(instructions):
        if instruction.opname == "LOAD_GLOBAL" and instruction.argval in namespace:
            yield instruction.argval, _attribute(namespace[instruction.argval], instructions[k + 1 :])
    for item in code.co_consts:
        if isinstance(item, CodeType):
            yield from _globals_of(item, namespace)


def _attribute(value: Any, following: Sequence[dis.Instruction]) -> Any:
    """What is meant by a global and the attributes that are read of it next, as far as it is a module."""
    for instruction in following:
        if not isinstance(value, ModuleType) or instruction.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            break
        name = instruction.argval
        value = f"{value.__name__}.{name}" if _by_name(value.__name__) else getattr(value, name)
    return value


def _by_name(module: str) -> bool:
    return module.split(".")[0] in _BY_NAME
