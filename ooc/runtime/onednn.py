"""oneDNN's products of float32 matrices, called from kernels, which hold no interpreter's lock.

torch multiplies float32 by MKL, which uses AVX-512 on Intel's processors alone. oneDNN, which torch has as well, uses it on
AMD's too, and multiplies twice as fast there. The calls are those of torch's compiler for programs without Python
(AOTInductor's C interface), which has a tensor as a handle. All return 0 where they succeed.
"""

import ctypes
from functools import cache
from pathlib import Path

import llvmlite.binding
import numpy as np
import torch
from numba import carray, types
from numpy.typing import NDArray

from ooc.runtime.pointers import floats_at
from ooc.stores.jit import kernel

ROWS = 512
"""of a block: half a megabyte of an output of 256 columns. oneDNN prepares each new shape, so all blocks have one"""
ARGUMENTS = 7
"""int64 numbers in which a thread passes arguments of calls by address"""
_SIZES, _STRIDES, _MADE, _BIAS, _TEXT = 0, 2, 4, 5, 6
_FUNCTIONS = {
    "ooc_torch_tensor": "aoti_torch_create_tensor_from_blob",
    "ooc_torch_empty": "aoti_torch_empty_strided",
    "ooc_torch_delete": "aoti_torch_delete_tensor_object",
    "ooc_torch_address": "aoti_torch_get_data_ptr",
    "ooc_torch_copy": "aoti_torch_copy_",
    "ooc_torch_linear": "aoti_torch_cpu__linear_pointwise",
}
_FLOAT32, _CPU, _NO_ACTIVATION = 6, 0, int.from_bytes(b"none", "little")
_i32, _i64 = types.int32, types.int64
_tensor = types.ExternalFunction("ooc_torch_tensor", _i32(_i64, _i64, _i64, _i64, _i64, _i32, _i32, _i32, _i64))
_empty = types.ExternalFunction("ooc_torch_empty", _i32(_i64, _i64, _i64, _i32, _i32, _i32, _i64))
_delete = types.ExternalFunction("ooc_torch_delete", _i32(_i64))
_address = types.ExternalFunction("ooc_torch_address", _i32(_i64, _i64))
_copy = types.ExternalFunction("ooc_torch_copy", _i32(_i64, _i64, _i32))
_linear = types.ExternalFunction("ooc_torch_linear", _i32(*[_i64] * 8))


@cache
def here() -> bool:
    """Whether this torch has the calls. Kernels that make them can be loaded from then on in any case."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    except OSError:  # it has another name elsewhere than on Linux
        return False
    has_all = torch.backends.mkldnn.is_available() and all(  # type: ignore[no-untyped-call]
        hasattr(library, name) for name in _FUNCTIONS.values()
    )
    never_called = ctypes.CDLL(None).abort
    for name, of_torch in _FUNCTIONS.items():
        function = getattr(library, of_torch) if has_all else never_called
        llvmlite.binding.add_symbol(name, ctypes.cast(function, ctypes.c_void_p).value)
    return has_all


@kernel
def tensor_at(data: int, rows: int, columns: int, by_row: int, by_column: int, own: NDArray[np.int64]) -> int:
    """A tensor [rows, columns] of the numbers at an address, a vector where `columns` is 0; 0 where it cannot be made.

    own: int64[ARGUMENTS], here and below. `free` gives the tensor back, and not the numbers.
    """
    at = own.ctypes.data
    own[_SIZES], own[_SIZES + 1], own[_STRIDES], own[_STRIDES + 1], own[_MADE] = rows, columns, by_row, by_column, 0
    dimensions = 2 if columns > 0 else 1
    failed = _tensor(data, dimensions, at + 8 * _SIZES, at + 8 * _STRIDES, 0, _FLOAT32, _CPU, 0, at + 8 * _MADE)
    return 0 if failed != 0 else own[_MADE]


@kernel
def free(tensor: int) -> None:
    if tensor != 0:
        _delete(tensor)


@kernel
def turned_block(data: int, columns: int, by_row: int, skip: int, own: NDArray[np.int64]) -> int:
    """A new tensor [columns, ROWS] of ROWS rows at an address, the first `skip` of them zeros; 0 where it cannot be made."""
    at = own.ctypes.data
    given = tensor_at(data, columns, ROWS, 1, by_row, own)
    own[_SIZES], own[_SIZES + 1], own[_STRIDES], own[_STRIDES + 1], own[_MADE] = columns, ROWS, ROWS, 1, 0
    made = given != 0 and _empty(2, at + 8 * _SIZES, at + 8 * _STRIDES, _FLOAT32, _CPU, 0, at + 8 * _MADE) == 0
    turned = own[_MADE] if made else 0
    if turned != 0 and _copy(turned, given, 0) != 0:
        free(turned)
        turned = 0
    free(given)
    if turned != 0 and skip > 0:
        _address(turned, at + 8 * _MADE)
        rows = carray(floats_at(own[_MADE]), (columns, ROWS))
        for i in range(columns):
            rows[i, :skip] = 0
    return turned


@kernel
def multiply_block(
    left: int, right: int, bias: int, out: NDArray[np.float32], skip: int, add: bool, own: NDArray[np.int64]
) -> bool:
    """Set rows `out` [n, m] to rows skip:skip + n of left @ right.T + bias, or add these. Returns whether it could be done.

    left, right, bias: tensors, of which `bias` may be 0 for none.
    """
    if left == 0 or right == 0:
        return False
    at = own.ctypes.data
    own[_MADE], own[_BIAS], own[_TEXT] = 0, bias, _NO_ACTIVATION
    of_bias = at + 8 * _BIAS if bias != 0 else 0
    if _linear(left, right, of_bias, at + 8 * _TEXT, 0, 0, 0, at + 8 * _MADE) != 0:
        return False
    made = own[_MADE]
    _address(made, at + 8 * _MADE)
    rows = carray(floats_at(own[_MADE]), (skip + len(out), out.shape[1]))
    for i in range(len(out)):
        given, result = rows[skip + i], out[i]
        for j in range(len(result)):
            result[j] = result[j] + given[j] if add else given[j]
    free(made)
    return True
