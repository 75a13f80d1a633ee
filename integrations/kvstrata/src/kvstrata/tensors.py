"""numpy arrays as kvs_tensor and back, without copies.

An array is [tokens][heads][head_dim] with a contiguous last dimension, of float32, float16, or uint16,
which means bf16 bit patterns (numpy has no bf16).
"""

from __future__ import annotations

import ctypes
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import error_of
from .library import Array, Library, Tensor


class DType(IntEnum):
    """kvs_dtype."""

    F32 = 1
    F16 = 2
    BF16 = 3


_OF_NUMPY = {np.dtype(np.float32): DType.F32, np.dtype(np.float16): DType.F16,
             np.dtype(np.uint16): DType.BF16}
TO_NUMPY = {DType.F32: np.dtype(np.float32), DType.F16: np.dtype(np.float16),
            DType.BF16: np.dtype(np.uint16)}
_OF_ARRAY = {1: np.float32, 2: np.uint16, 3: np.int32, 4: np.uint8}


def dtype_of(array: npt.NDArray[Any], name: str) -> DType:
    if not isinstance(array, np.ndarray):
        kind = f"{type(array).__module__}.{type(array).__name__}"
        raise error_of(3, "TENSOR_TYPE", f"{name} is a {kind}, not a numpy array; of a torch tensor pass "
                       f"{name}.detach().cpu().numpy(), if it is bfloat16 "
                       f"{name}.detach().cpu().view(torch.uint16).numpy()")
    try:
        return _OF_NUMPY[array.dtype]
    except KeyError:
        raise error_of(3, "TENSOR_DTYPE", f"{name} is {array.dtype}; allowed: float32, float16, "
                       "uint16 (bf16 bit patterns)") from None


def tensor_of(array: npt.NDArray[Any], name: str, writable: bool = False) -> Tensor:
    """A view of the array, valid while the array lives."""
    dtype = dtype_of(array, name)
    if array.ndim != 3:
        raise error_of(3, "TENSOR_SHAPE",
                       f"{name} has shape {array.shape}; it must be [tokens][heads][head_dim]")
    tokens, heads, dim = array.shape
    token_stride, head_stride, inner = array.strides
    if (inner != array.itemsize and dim > 1) or token_stride < 0 or head_stride < 0:
        raise error_of(3, "TENSOR_STRIDE", f"{name} has strides {array.strides}; the last dimension must be "
                       "contiguous and none negative: pass numpy.ascontiguousarray of it")
    if writable and not array.flags.writeable:
        raise error_of(3, "TENSOR_READ_ONLY", f"{name} is read-only; it is written to")
    address = array.__array_interface__["data"][0]
    return Tensor(address, dtype, heads, dim, tokens, token_stride, head_stride)


def take_array(library: Library, array: Array) -> npt.NDArray[Any]:
    """A copy of what kvs_inspect returned, which is freed."""
    try:
        shape = tuple(array.shape[:array.dims])
        kind = np.dtype(_OF_ARRAY[array.type])
        raw = ctypes.string_at(array.data, array.bytes) if array.bytes else b""
        return np.frombuffer(raw, kind).reshape(shape).copy()
    finally:
        library.kvs_array_free(array)
