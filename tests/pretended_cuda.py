"""A pretended CUDA device: tensors "on" it are CPU tensors whose storages are marked, so that code for a GPU runs anywhere.

What it shows: host and device tensors mixed in an operation, device memory read as if it were the host's, page-locked buffers
that are used again before a copy from them is done, waits for the device, copies from pageable memory, page-locking. What it
cannot show: speed, kernels' own nondeterminism, `torch.compile`, memory that is full.

Copies from page-locked memory are carried out as late as the order of streams allows, and their targets hold garbage until
then, so that a race changes numbers; one that a stream could see is an error at once. Modes are a thread's own in torch, so
threads that begin meanwhile get them too.
"""

import contextlib
import threading
import traceback
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # now: it reads what is in torch.cuda, and is imported by the first mode
import torch.autograd
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
_ROOT = Path(__file__).resolve().parents[1]
_GARBAGE = 0xAB
_MOST_MARKS = 20_000

SYNC, PAGEABLE, REGISTERED, COPIED, OPERATION = "sync", "pageable copy", "registration", "copy", "operation"
"""what is counted: waits of the main thread for the device, copies from or to pageable memory, calls that page-lock memory,
copies that run beside the host, and operations on device tensors"""

_WAITS = {
    "aten._local_scalar_dense",
    "aten.nonzero",
    "aten.masked_select",
    "aten.unique_consecutive",
    "aten._unique2",
    "aten.repeat_interleave",
    "aten.bincount",
    "aten.equal",
    "aten.is_nonzero",
}
"""operations whose result's size or value the host must have"""
_INDEXING = {"aten.index", "aten._unsafe_index", "aten.index_put", "aten.index_put_", "aten._index_put_impl_"}
"""operations whose indices may be the host's, copied when they are called"""
_MAKERS = "empty zeros ones full arange linspace rand randn randint randperm tensor as_tensor eye empty_strided normal"
_LIKE = "full_like zeros_like ones_like empty_like rand_like randn_like randint_like"
_FACTORIES = {getattr(torch, name) for name in f"{_MAKERS} {_LIKE}".split()}
_NEW = {Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_empty, Tensor.new_tensor}


class PretendedError(RuntimeError):
    """What CUDA would have refused, or a race."""


class PretendedStream:
    """Stands for `torch.cuda.Stream`."""

    def __init__(self, owner: "PretendedDevice") -> None:
        self._owner, self.device, self.cuda_stream = owner, CUDA, id(self)

    def synchronize(self) -> None:
        self._owner.wait_for(self)
        self._owner.count_wait()

    def wait_stream(self, other: "PretendedStream") -> None:
        self._owner.wait_for(other)

    def wait_event(self, event: "PretendedEvent") -> None:
        event.wait(self)

    def record_event(self, event: "PretendedEvent | None" = None) -> "PretendedEvent":
        event = PretendedEvent(self._owner) if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        return True


class PretendedEvent:
    """Stands for `torch.cuda.Event`."""

    def __init__(self, owner: "PretendedDevice", *_: Any, **__: Any) -> None:
        self._owner = owner
        self._before: list[_Copy] = []

    def record(self, stream: PretendedStream | None = None) -> None:
        self._before = self._owner.under_way(stream or self._owner.stream)

    def synchronize(self) -> None:
        self._owner.carry_out(self._before)
        self._owner.count_wait()

    def wait(self, _stream: PretendedStream | None = None) -> None:
        self._owner.carry_out(self._before)

    def query(self) -> bool:
        return not any(copy.waits for copy in self._before)

    def elapsed_time(self, _other: "PretendedEvent") -> float:
        return 1.0


@dataclass
class _Copy:
    """A copy that waits for its stream's turn."""

    stream: PretendedStream
    target: int
    """its storage"""
    run: Callable[[], Any] | None

    @property
    def waits(self) -> bool:
        return self.run is not None


@dataclass
class Counts:
    """How often each kind of event happened, in all and by the line of the project that caused it."""

    number: Counter[str] = field(default_factory=Counter)
    nbytes: Counter[str] = field(default_factory=Counter)
    places: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    def add(self, kind: str, nbytes: int = 0) -> None:
        self.number[kind] += 1
        self.nbytes[kind] += nbytes
        if kind != OPERATION:
            self.places[kind][_place()] += 1

    def __getitem__(self, kind: str) -> int:
        return self.number[kind]

    def told(self, kind: str) -> str:
        """Where events of a kind came from, the most frequent first."""
        return "; ".join(f"{place}: {number}" for place, number in self.places[kind].most_common())


def _place() -> str:
    """The innermost line of the project that is being executed, tests left out."""
    for frame, line in traceback.walk_stack(None):
        if (path := _of_project(frame.f_code.co_filename)) is not None:
            return f"{path}:{line}"
    return "outside the project"


@cache
def _of_project(filename: str) -> Path | None:
    """The path of a file of the project, None of others and of tests."""
    path = Path(filename)
    ours = _ROOT in path.parents and path.relative_to(_ROOT).parts[0] in ("ooc", "stores", "tools")
    return path.relative_to(_ROOT) if ours else None


@cache
def _name_of(operation: Any) -> str:
    """Such as "aten.copy_"."""
    return str(operation).rsplit(".", 1)[0]


def _tensors_in(value: Any) -> list[Tensor]:
    """Of arguments or results, in order; torch's pytrees know more containers and take most of a test's time."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for each in value for tensor in _tensors_in(each)]


class PretendedDevice:
    """The state of the device: whose storages are on it, what is page-locked, which copies wait; see the module."""

    def __init__(self) -> None:
        self.counts = Counts()
        self._marks: dict[int, StorageWeakRef] = {}
        self._locked: dict[int, int] = {}
        self._copies: dict[int, list[_Copy]] = {}
        self._lock = threading.RLock()
        self._own = threading.local()
        self.refuses = 0
        """the error with which it refuses to page-lock memory; 0: it does it"""
        self._grouped = torch._C._group_tensors_by_device_and_dtype
        self.default_stream = PretendedStream(self)

    # Where tensors are.

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor is on the device."""
        try:
            return tensor.untyped_storage()._cdata in self._marks
        except (NotImplementedError, RuntimeError):  # sparse tensors have no storage of their own
            return False

    def mark(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        with self._lock:
            self._marks[storage._cdata] = StorageWeakRef(storage)
            if len(self._marks) > _MOST_MARKS:
                self._marks = {each: ref for each, ref in self._marks.items() if not ref.expired()}
        return tensor

    @property
    def locked(self) -> dict[int, int]:
        """What is page-locked: bytes by address."""
        return self._locked.copy()

    def is_locked(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory is page-locked."""
        address = tensor.data_ptr()
        return any(begin <= address < begin + nbytes for begin, nbytes in self._locked.copy().items())

    def lock_pages(self, tensor: Tensor) -> Tensor:
        """Mark a new tensor's memory as page-locked while it lives."""
        address = tensor.data_ptr()
        self._locked[address] = max(1, tensor.nbytes)
        weakref.finalize(tensor.untyped_storage(), self._locked.pop, address, None)
        return tensor

    def cudaHostRegister(self, address: int, nbytes: int, _flags: int) -> int:
        if self.refuses:
            self._own.error = self.refuses
            return self.refuses
        if any(begin < address + nbytes and address < begin + size for begin, size in self.locked.items()):
            self._own.error = 712
            return 712
        self.counts.add(REGISTERED, nbytes)
        self._locked[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self._locked.pop(address, None)
        return 0

    def launch(self) -> None:
        """A kernel is started: torch asks for the thread's last error then, whichever call it is of, and clears it."""
        error, self._own.error = getattr(self._own, "error", 0), 0
        if error:
            raise PretendedError(f"CUDA error {error}, of a call before")

    def read_locked(self, numbers: Tensor, slot: Tensor) -> Tensor:
        """A kernel that reads memory of the host over the bus: numbers[slot], int64[e], with `slot` on the device."""
        if not self.is_locked(numbers):
            raise PretendedError("illegal memory access: a kernel reads memory of the host that is not page-locked")
        if not self.has(slot):
            raise PretendedError("illegal memory access: a kernel reads positions in the host's memory")
        if not (numbers.is_contiguous() and slot.is_contiguous()):
            raise PretendedError("illegal memory access: a kernel reads tensors with gaps as if they had none")
        self.touch(slot, by_host=False)
        self.counts.add(OPERATION)
        with torch._C._DisableTorchDispatch():
            found = numbers[slot].to(torch.int64)
        return self.mark(found)

    # What a thread is in.

    def grouped(self, lists: Any, with_indices: bool = False) -> Any:
        """As torch groups tensors by device and type, which it asks in C++."""
        groups = self._grouped(lists, with_indices)
        return {(CUDA if self.has(group[0][0][0]) else at[0], *at[1:]): group for at, group in groups.items()}

    @property
    def stream(self) -> PretendedStream:
        return getattr(self._own, "stream", self.default_stream)

    @contextlib.contextmanager
    def streaming(self, stream: PretendedStream | None) -> Iterator[None]:
        before, self._own.stream = self.stream, stream or self.stream
        try:
            yield
        finally:
            self._own.stream = before

    @property
    def makes_here(self) -> bool:
        """Whether operations without a tensor make theirs on the device."""
        return getattr(self._own, "makes_here", False)

    @contextlib.contextmanager
    def making(self, here: bool) -> Iterator[None]:
        before, self._own.makes_here = self.makes_here, here
        try:
            yield
        finally:
            self._own.makes_here = before

    # Copies in the order of streams.

    def later(self, target: Tensor, run: Callable[[], Any]) -> None:
        """Carry out a copy into `target` when its stream's turn has come; until then it holds garbage."""
        if target.numel() and target.is_contiguous():
            torch.empty(0, dtype=torch.uint8).set_(
                target.untyped_storage(), target.storage_offset() * target.element_size(), (target.nbytes,), (1,)
            ).fill_(_GARBAGE)
        storage = target.untyped_storage()._cdata
        with self._lock:
            self._copies.setdefault(storage, []).append(_Copy(self.stream, storage, run))

    def under_way(self, stream: PretendedStream) -> list[_Copy]:
        with self._lock:
            return [copy for copies in self._copies.values() for copy in copies if copy.stream is stream]

    def carry_out(self, copies: list[_Copy]) -> None:
        with self._lock:
            for copy in copies:
                run, copy.run = copy.run, None
                if run is not None:
                    self._copies[copy.target].remove(copy)
                    if not self._copies[copy.target]:
                        del self._copies[copy.target]
                    run()

    def wait_for(self, stream: PretendedStream | None) -> None:
        """Carry out the copies of a stream, None for all."""
        with self._lock:
            every = [copy for copies in self._copies.values() for copy in copies]
        self.carry_out([copy for copy in every if stream is None or copy.stream is stream])

    def touch(self, tensor: Tensor, by_host: bool) -> None:
        """A tensor is used: copies into it on the thread's stream are done by then, on others they may not be."""
        waiting = self._copies.get(tensor.untyped_storage()._cdata)
        if not waiting:
            return
        if by_host:
            raise PretendedError("race: the host reads memory that a copy may still write; wait for its event first")
        if any(copy.stream is not self.stream for copy in waiting):
            raise PretendedError("race: a stream reads memory that a copy on another stream may still write")
        self.carry_out(list(waiting))

    def count_wait(self) -> None:
        """Count a wait for the device, if it is the main thread's, whose wait is the step's."""
        if threading.current_thread() is threading.main_thread():
            self.counts.add(SYNC)

    def synchronize(self, _device: Any = None) -> None:
        self.wait_for(None)
        self.count_wait()


class _Operations(TorchDispatchMode):
    """Sees every operation, those of the backward pass too: checks devices, counts, and marks what is made on the device."""

    def __init__(self, device: PretendedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, _name_of(func)
        if name == "aten.copy_":
            return self._copy(func, args, kwargs)
        device = self._device
        tensors = _tensors_in((args, kwargs))
        here = [tensor for tensor in tensors if device.has(tensor)]
        for tensor in tensors if not func.is_view else ():
            device.touch(tensor, not here)
        if here:
            self._check(name, func, args, [tensor for tensor in tensors if not device.has(tensor)])
        out = func(*args, **kwargs)
        if here or (not tensors and device.makes_here):
            for tensor in _tensors_in(out):
                device.mark(tensor)
        return out

    def _check(self, name: str, func: Any, args: Any, others: list[Tensor]) -> None:
        """Count an operation on the device, and refuse one that mixes devices as CUDA does."""
        device = self._device
        device.launch()
        device.counts.add(OPERATION)
        indices: list[Any] = [each for each in args[1] if each is not None] if name in _INDEXING else []
        if name in _WAITS or any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            device.count_wait()
        wrong = [tensor for tensor in others if tensor.dim()]
        if indices and device.has(args[0]):
            for index in indices:
                if not device.has(index):
                    device.counts.add(PAGEABLE, index.nbytes)
            wrong = [tensor for tensor in wrong if not any(tensor is index for index in indices)]
        if wrong and not name.startswith(("aten.set_", "aten._foreach", "aten._fused")):
            shapes = [tuple(tensor.shape) for tensor in wrong]
            raise PretendedError(f"{func}: expected all tensors on one device, found cuda:0 and cpu (of the host: {shapes})")

    def _copy(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        target, source, device = args[0], args[1], self._device
        later = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        to, of = device.has(target), device.has(source)
        device.touch(source, not to and not of)
        device.touch(target, not to and not of)
        if to == of:
            device.counts.add(OPERATION) if to else None
            return func(*args, **kwargs)
        if not self._count_copy(source, target, bool(later)):
            return func(*args, **kwargs)

        def run() -> None:
            with torch.inference_mode(target.is_inference()), torch.no_grad(), torch._C._DisableTorchDispatch():
                func(target, source)

        device.later(target, run)
        return target

    def _count_copy(self, source: Tensor, target: Tensor, later: bool) -> bool:
        """Count a copy between host and device; whether it runs beside the host."""
        device = self._device
        host = target if device.has(source) else source
        locked = not source.numel() or device.is_locked(host)
        beside = later and locked
        device.counts.add(COPIED if locked else PAGEABLE, source.nbytes)
        if not beside:
            device.count_wait()
        return beside


_GETTERS: dict[Any, Callable[[PretendedDevice, Tensor], Any]] = {
    Tensor.device.__get__: lambda device, tensor: CUDA if device.has(tensor) else CPU,  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__: lambda device, tensor: device.has(tensor),  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: lambda device, tensor: not device.has(tensor),  # type: ignore[attr-defined]
    Tensor.get_device: lambda device, tensor: 0 if device.has(tensor) else -1,
    Tensor.is_pinned: lambda device, tensor, *_: device.is_locked(tensor),
}


class _Functions(TorchFunctionMode):
    """Answers where tensors are, and does what names a device: conversions, and functions that make tensors."""

    def __init__(self, device: PretendedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is not None and func in _GETTERS:
            return _GETTERS[func](self._device, first)
        if first is not None and func in (Tensor.numpy, Tensor.__array__, Tensor.tolist, Tensor.data_ptr):
            self._used_by_host(func, first)
        if func in (Tensor.to, Tensor.cuda, Tensor.cpu) and first is not None and first.layout == torch.strided:
            return self._converted(func, first, args[1:], kwargs)
        if func is Tensor.pin_memory:
            return self._device.lock_pages(first.clone())
        if func in _FACTORIES or func in _NEW or kwargs.get("device") is not None:
            return self._made(func, args, kwargs)
        here = any(map(self._device.has, _tensors_in((args, kwargs))))
        with self._device.making(here):
            return func(*args, **kwargs)

    def _used_by_host(self, func: Any, tensor: Tensor) -> None:
        device = self._device
        if not device.has(tensor):
            if func is not Tensor.data_ptr:
                device.touch(tensor, by_host=True)
        elif func in (Tensor.numpy, Tensor.__array__):
            raise PretendedError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
        elif func is Tensor.tolist:
            device.touch(tensor, by_host=False)
            device.counts.add(PAGEABLE, tensor.nbytes)
            device.count_wait()

    def _converted(self, func: Any, tensor: Tensor, args: Any, kwargs: dict[str, Any]) -> Tensor:
        """`Tensor.to`, `cuda` and `cpu`: new memory and a copy, if the device changes."""
        has, dtype, later = self._device.has(tensor), None, bool(kwargs.get("non_blocking", False))
        other = next((each for each in (*args, kwargs.get("other")) if isinstance(each, Tensor)), None)
        if func is not Tensor.to:
            to: torch.device | None = CUDA if func is Tensor.cuda else CPU
        elif other is not None:
            to, dtype = (CUDA if self._device.has(other) else CPU), other.dtype
        else:
            named = {name: value for name, value in kwargs.items() if name != "copy"}
            to, dtype, later, _ = torch._C._nn._parse_to(*args, **named)
        if to is None or (to.type == "cuda") == has:
            kwargs = {name: value for name, value in kwargs.items() if name in ("copy", "memory_format")}
            with self._device.making(has):
                return tensor.to(dtype or tensor.dtype, **kwargs)
        if not has and dtype is not None and dtype != tensor.dtype:
            tensor = tensor.to(dtype)  # as torch does: converted by the host, then copied
        with self._device.making(to.type == "cuda"):
            made = torch.empty_strided(tensor.size(), _dense_strides(tensor), dtype=dtype or tensor.dtype)
        return made.copy_(tensor, non_blocking=bool(later))

    def _made(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What a function makes that may name a device."""
        device, named = self._device, kwargs.get("device")
        like = args[0] if args and isinstance(args[0], Tensor) and func is not torch.tensor else None
        here = torch.device(named).type == "cuda" if named is not None else like is not None and device.has(like)
        if func in (torch.as_tensor, torch.asarray) and like is not None:
            return like.to(CUDA if here else CPU) if named is not None else func(*args, **kwargs)
        if named is not None:
            kwargs["device"] = CPU
        locked = kwargs.pop("pin_memory", False)
        with device.making(False):
            made = func(*args, **kwargs)
        if locked:
            device.lock_pages(made)
        if here:
            for tensor in _tensors_in(made):
                device.mark(tensor)
            if "empty" not in func.__name__:
                device.launch()
            if func in (torch.tensor, torch.as_tensor, Tensor.new_tensor):
                device.counts.add(PAGEABLE, made.nbytes)
                device.count_wait()
        return made


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Those of a copy: its own, unless elements lie apart or share memory."""
    return torch.empty_like(tensor, device="meta").stride()


@contextlib.contextmanager
def _modes(device: PretendedDevice) -> Iterator[None]:
    with _Operations(device), _Functions(device):
        yield


def _of_both(real: Any) -> Any:
    """`torch.autocast` that for CUDA casts on the CPU, where operations really run."""

    class Autocast(real):  # type: ignore[misc, valid-type]
        def __init__(self, device_type: str, **settings: Any) -> None:
            settings = {name: value for name, value in settings.items() if name != "cache_enabled" or value is not None}
            super().__init__("cpu" if device_type == "cuda" else device_type, **settings)

    return Autocast


def _torch_cuda(device: PretendedDevice) -> dict[str, Any]:
    """What stands in torch.cuda while the device is there."""
    state = torch.Generator().manual_seed(0).get_state()
    nothing: dict[str, Any] = dict.fromkeys(
        ("_lazy_init", "init", "manual_seed", "manual_seed_all", "set_rng_state", "set_rng_state_all", "set_device"),
        lambda *_, **__: None,
    )
    numbers = dict.fromkeys(
        ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "current_device"),
        lambda *_, **__: 0,
    )
    return {
        **nothing,
        **numbers,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "memory_stats_as_nested_dict": lambda *_: {},
        "get_device_name": lambda *_: "pretended",
        "get_device_capability": lambda *_: (8, 0),
        "is_bf16_supported": lambda *_, **__: True,
        "is_current_stream_capturing": lambda: False,
        "mem_get_info": lambda *_: (8 * 10**9, 10**10),
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda: None,
        "synchronize": device.synchronize,
        "device": lambda *_: contextlib.nullcontext(),
        "Stream": lambda *_, **__: PretendedStream(device),
        "Event": lambda *given, **options: PretendedEvent(device, *given, **options),
        "stream": device.streaming,
        "current_stream": lambda *_: device.stream,
        "default_stream": lambda *_: device.default_stream,
        "cudart": lambda: device,
        "get_rng_state": lambda *_: state.clone(),
        "get_rng_state_all": lambda: [state.clone()],
    }


@contextlib.contextmanager
def pretended_cuda() -> Iterator[PretendedDevice]:
    """A CUDA device for the block, of this thread and those that begin in it."""
    device, run = PretendedDevice(), threading.Thread.run
    backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def in_modes(thread: threading.Thread) -> None:
        with _modes(device):
            run(thread)

    def backward_in_modes(roots: Any, *rest: Any, **named: Any) -> Any:
        with _Functions(device), device.making(any(device.has(root) for root in roots)):
            return backward(roots, *rest, **named)

    with pytest.MonkeyPatch.context() as patch:
        for name, value in _torch_cuda(device).items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
        patch.setattr(Tensor, "record_stream", lambda *_: None)
        patch.setattr("ooc.sampling.device_draws.compiled_for", lambda *_: None)  # Triton would ask for the real device
        patch.setattr("ooc.sampling.host_edges.reader_for", lambda _: device.read_locked)
        patch.setattr(torch, "autocast", _of_both(torch.autocast))
        casts = torch.is_autocast_enabled
        patch.setattr(torch, "is_autocast_enabled", lambda of=None: casts("cpu" if of == "cuda" else of or "cpu"))
        # Tensors are compared where this mode does not answer for their devices.
        patch.setitem(checkpoint._allowed_determinism_checks_to_fns, "default", lambda x: {"shape": x.shape, "dtype": x.dtype})
        patch.setattr(torch._C, "_group_tensors_by_device_and_dtype", device.grouped)
        patch.setattr(torch.autograd, "_engine_run_backward", backward_in_modes)
        patch.setattr(threading.Thread, "run", in_modes)
        with _modes(device):
            yield device
        device.wait_for(None)
