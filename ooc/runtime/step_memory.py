"""Which layer and which operation of a training step holds how much memory.

A dispatch mode of torch sees every operation below autograd, forward and backward, and so every storage that torch allocates
for one: it is booked to the line of code, the operation and the module under way, and is gone once its weak reference says so.
Sizes are read again at every operation, as code may resize a storage that it made, which no operation tells.
Modules are known by hooks of all modules, not of the model's own, as a layer with hooks may compute in another way. In the
backward pass an operation belongs to the module that made its autograd node, by the nodes' numbers.

Storages on all devices are counted alike. What was there before the block is not counted, nor what other threads allocate.
"""

import sys
from bisect import bisect_right
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.multiprocessing import reductions
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

MOST_POINTS = 1000
"""of a timeline; of more every second one is dropped, but for peaks"""
OUTSIDE = "(outside the model)"
_TORCH = str(Path(torch.__file__).parent)
_OWN = __file__
_STORAGE_OF: Any = torch.UntypedStorage._new_with_weak_ptr
_NEXT_NODE: Any = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


def weak_storage(storage: torch.UntypedStorage) -> Any:
    """Return a weak reference, whose `expired()` says whether the storage is gone; until then no other one has its address."""
    return reductions.StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def nbytes_of(reference: Any) -> int | None:
    """Return the bytes that the storage of a weak reference has now; None: it is gone."""
    storage = _STORAGE_OF(reference.cdata)
    return None if storage is None else storage.nbytes()


class MemoryLine(NamedTuple):
    """What one operation on one line of code allocated, in bytes of storages.

    kept: what stood between the forward pass and the backward pass; at_peak: when the most was there; allocated: in all. What
    a storage grows by later is of the line that made it.
    """

    layer: str
    """name of the module under way, as in `named_modules`"""
    op: str
    """torch's name: of the operation, in the backward pass of the autograd node too"""
    line: str
    """file:line (function) that called torch; of the backward pass "backward" """
    backward: bool
    calls: int
    allocated: int
    at_peak: int
    kept: int


class TimelinePoint(NamedTuple):
    """Bytes that stood at one moment, by layer."""

    op: int
    """number of the operation"""
    backward: bool
    bytes: dict[str, int]


class _Line:
    """A `MemoryLine` under way."""

    def __init__(self) -> None:
        self.calls = self.allocated = self.now = self.at_peak = self.kept = 0


class _Live(NamedTuple):
    """A storage that is not gone, with the bytes it had when they were read last."""

    reference: Any
    nbytes: int
    line: _Line
    layer: str


class StepMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the storages of everything that happens within; see `ooc.runtime.memory.MemoryMeter`.

    Args:
        model: Its modules give their names to the layers.

    >>> with StepMemory(model) as step:
    ...     loss(model(batch.x, batch.blocks)).backward()
    >>> step.lines[0].layer, step.lines[0].at_peak
    ('layers.0.conv', 8192)
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = (
            {} if model is None else {id(module): name or type(module).__name__ for name, module in model.named_modules()}
        )
        self._hooks = ExitStack()
        self._stack: list[str] = []
        self._begins, self._owners = [0], [OUTSIDE]
        """numbers of autograd nodes from which on they are of a module"""
        self._found: dict[tuple[str, str, str, bool], _Line] = {}
        self._live: dict[int, _Live] = {}
        self._layers: dict[str, int] = {}
        self._ops, self._every, self._total = 0, 1, 0
        self._highest: TimelinePoint | None = None
        self._backward = False
        self.peak = 0
        """the most bytes at a time"""
        self.kept: int | None = None
        """bytes that stood when the backward pass began, or at the end where there was none"""
        self.timeline: list[TimelinePoint] = []

    @property
    def lines(self) -> list[MemoryLine]:
        """Those that were there when the most was, then the others, each by their bytes."""
        found = [MemoryLine(*key, each.calls, each.allocated, each.at_peak, each.kept) for key, each in self._found.items()]
        return sorted(found, key=lambda line: (-line.at_peak, -line.kept, -line.allocated))

    def by_layer(self) -> dict[str, tuple[int, int]]:
        """Layer -> (bytes at the peak, bytes between the forward and the backward pass)."""
        found: dict[str, tuple[int, int]] = {}
        for line in self.lines:
            at_peak, kept = found.get(line.layer, (0, 0))
            found[line.layer] = at_peak + line.at_peak, kept + line.kept
        return found

    def __enter__(self) -> Self:
        for register, hook in (
            (register_module_forward_pre_hook, self._begin_module),
            (register_module_forward_hook, self._end_module),
        ):
            options: dict[str, Any] = {"always_call": True} if register is register_module_forward_hook else {}
            self._hooks.callback(register(hook, **options).remove)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self._hooks.close()
        if self._read_sizes():
            self._mark(self._backward)
        if self.kept is None:
            self._keep()

    def _begin_module(self, module: nn.Module, args: Any) -> None:
        self._stack.append(self._names.get(id(module)) or (self._stack[-1] if self._stack else OUTSIDE))
        self._owned(self._stack[-1])

    def _end_module(self, module: nn.Module, args: Any, out: Any) -> None:
        if self._stack:
            self._stack.pop()
        self._owned(self._stack[-1] if self._stack else OUTSIDE)

    def _owned(self, layer: str) -> None:
        """Autograd nodes from now on are of a layer."""
        self._begins.append(_NEXT_NODE())
        self._owners.append(layer)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        node = torch._C._current_autograd_node()
        if node is not None and not self._backward:
            self._backward = True
            self._read_sizes()
            self._keep()
        out = func(*args, **(kwargs or {}))
        self._ops += 1
        grown = self._read_sizes()
        if self._book(func, node, out) or grown:
            self._mark(node is not None)
        return out

    def _book(self, func: Any, node: Any, out: Any) -> bool:
        """Book what an operation allocated; returns whether it did."""
        if any(each.alias_info is not None for each in func._schema.returns):
            return False  # in place, or a view
        line: _Line | None = None
        layer = ""
        for tensor in tree_iter(out):
            if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
                continue
            storage = tensor.untyped_storage()
            nbytes = storage.nbytes()
            if not nbytes or storage._cdata in self._live:
                continue
            if line is None:
                layer = self._layer_of(node)
                name = func.name().replace("::", ".").partition(".default")[0]
                where, op = ("backward", f"{node.name()}: {name}") if node is not None else (_caller(), name)
                line = self._found.setdefault((layer, op, where, node is not None), _Line())
                line.calls += 1
            self._live[storage._cdata] = live = _Live(weak_storage(storage), nbytes, line, layer)
            self._count(live, nbytes)
        return line is not None

    def _layer_of(self, node: Any) -> str:
        if self._stack:
            return self._stack[-1]
        if node is None:
            return OUTSIDE
        return self._owners[bisect_right(self._begins, node._sequence_nr()) - 1]

    def _read_sizes(self) -> bool:
        """Count what storages have now, and drop those that are gone; returns whether any has grown."""
        changed = [
            (address, live, nbytes)
            for address, live in self._live.items()
            if (nbytes := nbytes_of(live.reference)) != live.nbytes
        ]
        for address, live, nbytes in changed:
            if nbytes is None:
                del self._live[address]
            else:
                self._live[address] = live._replace(nbytes=nbytes)
            self._count(live, (nbytes or 0) - live.nbytes)
        return any((nbytes or 0) > live.nbytes for _, live, nbytes in changed)

    def _count(self, live: _Live, more: int) -> None:
        """So many bytes more, or less, of a storage."""
        live.line.allocated += max(more, 0)
        live.line.now += more
        self._layers[live.layer] = self._layers.get(live.layer, 0) + more
        self._total += more

    def _mark(self, backward: bool) -> None:
        """A point of the timeline; the peak where it is one."""
        point: TimelinePoint | None = None
        if self._total > self.peak:
            point = TimelinePoint(self._ops, backward, {name: size for name, size in self._layers.items() if size})
            self.peak, self._highest = self._total, point
            for line in self._found.values():
                line.at_peak = line.now
        if point is None and self._ops % self._every == 0:
            point = TimelinePoint(self._ops, backward, {name: size for name, size in self._layers.items() if size})
        if point is not None:
            self.timeline.append(point)
        if len(self.timeline) > MOST_POINTS:
            self.timeline = [p for n, p in enumerate(self.timeline) if n % 2 == 0 or p is self._highest]
            self._every *= 2

    def _keep(self) -> None:
        self.kept = self._total
        for line in self._found.values():
            line.kept = line.now


def _caller() -> str:
    """The innermost line of code outside of torch and of this module."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        wraps = frame.f_code.co_name == "__torch_function__"
        if file != _OWN and not wraps and not file.startswith((_TORCH, "<")):
            return f"{_shortened(file)}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    return ""


def _shortened(file: str) -> str:
    """The last parts of a path, for people."""
    return "/".join(Path(file).parts[-3:])
