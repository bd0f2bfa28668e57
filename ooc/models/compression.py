"""What autograd keeps of a model's activations, in 8, 4 or 2 bits an element until the backward pass wants it.

torch's saved-tensor hooks see every tensor that an operation saves. Matrices of floats become codes (`ooc.models.quantization`)
and masks bits, from which the backward pass makes them again. The outputs of the forward pass do not change; gradients are the
same on average, as the rounding is. (EXACT: Liu et al., 2022; GACT: Liu et al., 2022.)

Left as they are: parameters and the batch's own tensors, which are in memory anyway; integers; vectors and narrow matrices,
such as factors of edges, the statistics of norms and attention's scores by head, by which gradients are divided, so that errors
there would not be right on average; and what is too small to matter.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ooc.models.memory_efficient import relu
from ooc.models.quantization import BITS, GROUP, Compression, Quantized, quantized, restored
from ooc.runtime.keyed_random import Purpose, key, numbered
from ooc.runtime.step_memory import weak_storage

LEAST = 16 * GROUP
"""elements of a tensor that is compressed"""
NARROW = 16
"""columns below which a matrix of floats is left as it is"""
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_BITS = (1, 2, 4, 8, 16, 32, 64, 128)


class CompressedTensor(NamedTuple):
    """A tensor that autograd keeps. elements: codes, or of a mask uint8 with eight elements each."""

    elements: Quantized | Tensor
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self.elements.nbytes


def compresses(tensor: Tensor) -> bool:
    """Whether a tensor that autograd keeps is worth compressing: a wide matrix of floats, or a mask, of many elements."""
    if tensor.layout is not torch.strided:
        return False
    repeats = tensor.nbytes > tensor.untyped_storage().nbytes()  # an expanded one takes less than its elements
    wide = tensor.dtype in _FLOATS and tensor.dim() >= 2 and tensor.size(-1) >= NARROW
    return tensor.numel() >= LEAST and not repeats and (wide or tensor.dtype is torch.bool)


def compressed(tensor: Tensor, bits: int, key: int) -> CompressedTensor:
    """Return a tensor with its floats in so many bits, drawn by `key`, or its bools in one."""
    elements = packed_bits(tensor) if tensor.dtype is torch.bool else quantized(tensor.float(), key, bits)
    return CompressedTensor(elements, tensor.shape, tensor.dtype)


def uncompressed(packed: CompressedTensor) -> Tensor:
    """Return the tensor that `compressed` was given, but for the rounding."""
    elements, shape, dtype = packed
    return unpacked_bits(elements, shape) if isinstance(elements, Tensor) else restored(elements, shape).to(dtype)


def step_key() -> int:
    """Return the key of the step's draws: of torch's seed, which a run sets at every step, not of its generator's state."""
    return key(torch.initial_seed(), Purpose.COMPRESS)


class _Compressor:
    """The hooks of a forward pass. own: addresses of storages that stay as they are.

    A tensor that several operations save is compressed once. Draws are keyed by torch's seed, which a run sets at every step,
    and by the number of the tensor; nothing is drawn from torch's generator, so that dropout is what it is without compression.
    """

    def __init__(self, bits: int, own: set[int]) -> None:
        self._bits, self._own = bits, own
        self._key, self._count = step_key(), 0
        self._seen: dict[int, tuple[Any, dict[Any, CompressedTensor]]] = {}

    def pack(self, tensor: Tensor) -> Tensor | CompressedTensor:
        if not compresses(tensor) or tensor.untyped_storage().data_ptr() in self._own:
            return tensor
        storage = tensor.untyped_storage()
        # The weak reference keeps the address of a storage that is gone from being another one's.
        _, views = self._seen.setdefault(storage._cdata, (weak_storage(storage), {}))
        view = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version
        if view not in views:
            self._count += 1
            views[view] = compressed(tensor, self._bits, numbered(self._key, self._count))
        return views[view]

    @staticmethod
    def unpack(packed: Tensor | CompressedTensor) -> Tensor:
        return packed if isinstance(packed, Tensor) else uncompressed(packed)

    def forget(self) -> None:
        """The forward pass is done: what is compressed is autograd's alone."""
        self._seen.clear()


class _MaskedDropout(torch.autograd.Function):
    """torch's dropout on the CPU, which keeps a mask of floats, with its draws and a mask of bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        noise = torch.empty_like(x).bernoulli_(1 - p)
        ctx.save_for_backward(noise != 0)
        ctx.scale = 1 / (1 - p) if p < 1 else 0.0
        return x * noise.mul_(ctx.scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (kept,) = ctx.saved_tensors
        return grad.mul(ctx.scale).masked_fill_(~kept, 0), None


class _RandomLeak(torch.autograd.Function):
    """torch's RReLU in training, in place, with its draws. torch's own saves the slopes before they are drawn."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lower: float, upper: float) -> Tensor:
        slopes = torch.ones_like(x)
        torch.ops.aten.rrelu_with_noise_(x, slopes, lower, upper, True)
        ctx.mark_dirty(x)
        ctx.save_for_backward(slopes)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slopes,) = ctx.saved_tensors
        return grad * slopes, None, None


class ExactMasks(TorchFunctionMode):
    """Has torch's ReLU and dropout keep a mask: which elements pass would follow from rounded floats only nearly.

    RReLU keeps its slopes as they were drawn.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func in _RELUS and torch.is_grad_enabled():
            x, in_place = _relu_arguments(func, *args, **named)
            return relu(x if in_place else x.clone())
        if func in _RRELUS and torch.is_grad_enabled() and "generator" not in named:
            x, lower, upper, training, in_place = _rrelu_arguments(func, *args, **named)
            if training and x.requires_grad:
                return _RandomLeak.apply(x if in_place else x.clone(), lower, upper)  # type: ignore[no-untyped-call]
        if func is F.dropout and torch.is_grad_enabled():
            x, p, training = _dropout_arguments(*args, **named)
            if training and 0 < p < 1 and x.device.type == "cpu" and x.is_floating_point() and x.requires_grad:
                return _MaskedDropout.apply(x, p)  # type: ignore[no-untyped-call]
        return func(*args, **named)


_RELUS_IN_PLACE = frozenset({torch.relu_, Tensor.relu_})
_RELUS = frozenset({F.relu, torch.relu, Tensor.relu, *_RELUS_IN_PLACE})
_RRELUS = frozenset({F.rrelu, torch.rrelu, torch.rrelu_})


def _relu_arguments(func: Any, input: Tensor, inplace: bool = False) -> tuple[Tensor, bool]:
    return input, inplace or func in _RELUS_IN_PLACE


def _rrelu_arguments(
    func: Any, input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: Any = False
) -> tuple[Tensor, float, float, bool, bool]:
    return input, lower, upper, training, func is torch.rrelu_ or inplace is True


def _dropout_arguments(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> tuple[Tensor, float, bool]:
    return input, p, training and not inplace


def packed_bits(mask: Tensor) -> Tensor:
    """Return the elements of a bool tensor, eight in a byte: uint8[-(-n // 8)]. The first is the lowest bit.

    >>> packed_bits(torch.tensor([True, False, True]))
    tensor([5], dtype=torch.uint8)
    """
    flat = mask.reshape(-1)
    if mask.device.type == "cpu":
        return torch.from_numpy(np.packbits(flat.numpy(), bitorder="little"))
    flat = torch.cat([flat, flat.new_zeros(-len(flat) % 8)]).view(-1, 8)
    return (flat.to(torch.uint8) * _powers(mask)).sum(1, dtype=torch.uint8)


def unpacked_bits(packed: Tensor, shape: torch.Size) -> Tensor:
    """Return the bool tensor of that shape that `packed_bits` was given."""
    size = shape.numel()
    if packed.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(packed.numpy(), count=size, bitorder="little").view(np.bool_)).view(shape)
    return (packed[:, None] & _powers(packed) != 0).view(-1)[:size].view(shape)


def _powers(beside: Tensor) -> Tensor:
    return torch.tensor(_BITS, dtype=torch.uint8, device=beside.device)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in a batch, in PyG's Data and HeteroData, and in mappings, tuples and lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_in(each)
    elif hasattr(value, "stores"):
        for store in value.stores:
            yield from tensors_in(list(store.values()))


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    """Addresses of what tensors hold; sparse ones, which are never compressed, have none of their own."""
    return {each.untyped_storage().data_ptr() for each in tensors if each.layout is torch.strided and each.numel()}


@contextmanager
def compressed_activations(name: Compression | None, model: nn.Module, batch: Any = ()) -> Iterator[None]:
    """Compress what autograd keeps of the operations within; not at all with None.

    Args:
        name: "int8", "int4" or "int2": 1/4, 1/8 or 1/16 of the bytes of float32, and 4 bytes for each 256 elements.
        model: Its parameters and buffers stay as they are.
        batch: Its tensors do so too; see `tensors_in`.

    The same seed of torch, set before the forward pass, gives the same gradients to the bit.

    >>> with compressed_activations("int4", model, batch):
    ...     loss = F.cross_entropy(model(batch.x, batch.blocks), y)
    >>> loss.backward()
    """
    if name is None:
        yield
        return
    beside: Iterable[Tensor] = (*model.parameters(), *model.buffers(), *tensors_in(batch))
    compressor = _Compressor(BITS[name], _storages(beside))
    try:
        with saved_tensors_hooks(compressor.pack, compressor.unpack), ExactMasks():
            yield
    finally:
        compressor.forget()
