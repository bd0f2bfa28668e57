"""Asking the processor for memory before a kernel comes to it."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_READ, _KEEP, _DATA = 0, 3, 1
"""llvm.prefetch: to be read, in all caches, data"""


@intrinsic
def prefetch(typing: Any, array: Any, index: Any) -> Any:
    """prefetch(array, index): in a kernel, the cache line of array[index] (one dimension, contiguous) is under way from now on.

    It reads nothing, so `index` may lie anywhere. For loops that go through memory in an order that the processor cannot guess.

    >>> @kernel
    ... def add(near, to):
    ...     prefetch(near, to[k + 8] * width)
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        held = context.make_array(signature.args[0])(context, builder, arguments[0])
        at = context.cast(builder, arguments[1], signature.args[1], types.intp)
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        shape = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", (byte,), shape)
        address = builder.bitcast(builder.gep(held.data, [at]), byte)
        builder.call(function, [address, number(_READ), number(_KEEP), number(_DATA)])
        return context.get_dummy_value()

    return types.void(array, index), generate


AHEAD = 24
"""How many elements ahead a pass prefetches: about a memory latency's worth of work."""
