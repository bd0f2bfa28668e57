"""Atomic operations in kernels of several threads, on integers of one-dimensional contiguous arrays."""

from typing import Any

from numba import types
from numba.extending import intrinsic


def _known(array: Any) -> bool:
    """Whether it is an array that elements are addressed in by their number alone."""
    return isinstance(array, types.Array) and array.ndim == 1 and array.layout == "C" and isinstance(array.dtype, types.Integer)


def _element(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    """The address of array[index], the first two arguments."""
    data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
    return builder.gep(data, [context.cast(builder, arguments[1], signature.args[1], types.intp)])


@intrinsic
def load_acquire(typing: Any, array: Any, index: Any) -> Any:
    """load_acquire(array, index): load array[index] before any later load or store."""

    if not _known(array):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_element(context, builder, signature, arguments), "acquire", array.dtype.bitwidth // 8)

    return array.dtype(array, index), generate


@intrinsic
def store_release(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """store_release(array, index, value): store to array[index] after any earlier load or store."""

    if not _known(array):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        element = _element(context, builder, signature, arguments)
        builder.store_atomic(arguments[2], element, "release", array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, index, array.dtype), generate


@intrinsic
def fetch_add(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """fetch_add(array, index, value): add to array[index], and return what it was."""

    if not _known(array):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", _element(context, builder, signature, arguments), arguments[2], "seq_cst")

    return array.dtype(array, index, array.dtype), generate


@intrinsic
def compare_and_swap(typing: Any, array: Any, index: Any, expected: Any, value: Any) -> Any:
    """compare_and_swap(array, index, expected, value): store value where array[index] is as expected; return whether it was."""

    if not _known(array):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        element = _element(context, builder, signature, arguments)
        return builder.extract_value(builder.cmpxchg(element, arguments[2], arguments[3], "seq_cst", "seq_cst"), 1)

    return types.boolean(array, index, array.dtype, array.dtype), generate
