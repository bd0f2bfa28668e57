"""Software prefetching in kernels."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_READ, _KEEP, _DATA = 0, 3, 1
"""arguments of llvm.prefetch: read access, all cache levels, data"""


@intrinsic
def prefetch(typing: Any, array: Any, index: Any) -> Any:
    """prefetch(array, index): in a kernel, start loading the cache line of array[index] (one-dimensional, contiguous).

    It reads nothing, so `index` may be anything. For loops with an access order the processor cannot predict.

    >>> @kernel
    ... def add(sums, to):
    ...     prefetch(sums, to[k + 8] * width)
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
"""elements to prefetch ahead: about a memory latency's worth of work"""
