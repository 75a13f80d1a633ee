# SPDX-License-Identifier: Apache-2.0
"""Arrays of any library as kvs_tensor, without copies, and an engine's paged tensors as kvs_block_tensor.

An array is [tokens][heads][head_dim] with a contiguous last dimension: a torch tensor (CPU or CUDA), a numpy
array, or what else speaks DLPack (CuPy, JAX). Of float32, float16 or bfloat16; numpy and CuPy have no bf16, there
uint16 means its bit patterns. No array library but numpy is imported here.
"""

from __future__ import annotations

import builtins
import ctypes as c
import sys
from collections.abc import Sequence as Items
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from . import library as lib
from .errors import KvstrataError, error_of


class DType(IntEnum):
    """kvs_dtype."""

    F32 = 1
    F16 = 2
    BF16 = 3


class MemoryKind(IntEnum):
    """kvs_memory_kind: what an engine's memory is, and how the daemon opens it."""

    MEMFD = 1
    CUDA_FD = 2
    CUDA_IPC = 3
    PROCESS = 4


_OF_NUMPY = {np.dtype(np.float32): DType.F32, np.dtype(np.float16): DType.F16,
             np.dtype(np.uint16): DType.BF16}
_TO_NUMPY = {DType.F32: np.dtype(np.float32), DType.F16: np.dtype(np.float16),
             DType.BF16: np.dtype(np.uint16)}
TORCH_NAMES = {DType.F32: "float32", DType.F16: "float16", DType.BF16: "bfloat16"}
_OF_TORCH = {f"torch.{name}": dtype for dtype, name in TORCH_NAMES.items()}
_OF_ARRAY = {1: np.float32, 2: np.uint16, 3: np.int32, 4: np.uint8}
_BYTES = {DType.F32: 4, DType.F16: 2, DType.BF16: 2}


class View(lib.Tensor):
    """A kvs_tensor of somebody's array, valid while the array and the view live."""

    on_cuda = False
    owner: object = None  # what keeps an exported DLPack tensor alive


class _Memory(NamedTuple):
    """Where an array lies; strides in bytes."""

    address: int
    dtype: DType
    shape: Items[int]
    strides: Items[int]
    on_cuda: bool
    owner: object = None


def _type_name(array: object) -> str:
    return f"{type(array).__module__}.{type(array).__name__}"


def is_torch(array: object) -> bool:
    """By what this module uses of a tensor, so that torch need not be imported."""
    return hasattr(array, "data_ptr") and hasattr(array, "new_empty")


def _wrong_dtype(name: str, dtype: object) -> KvstrataError:
    return error_of(3, "TENSOR_DTYPE", f"{name} is {dtype}; allowed: float32, float16, bfloat16, and where a "
                    "library has no bfloat16, uint16 (bf16 bit patterns)")


def _read_only(name: str) -> KvstrataError:
    return error_of(3, "TENSOR_READ_ONLY", f"{name} is read-only; it is written to: pass an array of your own")


def _of_numpy(array: npt.NDArray[Any], name: str, writable: bool) -> _Memory:
    dtype = _OF_NUMPY.get(array.dtype)
    if dtype is None:
        raise _wrong_dtype(name, array.dtype)
    if writable and not array.flags.writeable:
        raise _read_only(name)
    return _Memory(array.__array_interface__["data"][0], dtype, array.shape, array.strides, False)


@cache  # the text is slow to make, and there are few dtypes
def _torch_dtype(dtype: Any) -> DType | None:
    return _OF_TORCH.get(str(dtype))


def _of_torch(tensor: Any, name: str) -> _Memory:
    dtype = _torch_dtype(tensor.dtype)
    if dtype is None:
        raise _wrong_dtype(name, tensor.dtype)
    on_cuda = tensor.is_cuda
    if not on_cuda and not tensor.is_cpu:
        raise error_of(3, "TENSOR_DEVICE", f"{name} is on {tensor.device}; pass a tensor of the CPU or of CUDA")
    if tensor.requires_grad:
        raise error_of(3, "TENSOR_REQUIRES_GRAD", f"{name} requires grad, and nothing is differentiated here; pass "
                       f"{name}.detach()")
    size = _BYTES[dtype]
    return _Memory(tensor.data_ptr(), dtype, tensor.shape, [size * n for n in tensor.stride()], on_cuda)


class _DLTensor(c.Structure):
    _fields_ = [("data", c.c_void_p), ("device_type", c.c_int32), ("device_id", c.c_int32), ("ndim", c.c_int32),
                ("code", c.c_uint8), ("bits", c.c_uint8), ("lanes", c.c_uint16), ("shape", c.POINTER(c.c_int64)),
                ("strides", c.POINTER(c.c_int64)), ("byte_offset", c.c_uint64)]


class _DLVersioned(c.Structure):
    _fields_ = [("major", c.c_uint32), ("minor", c.c_uint32), ("context", c.c_void_p), ("deleter", c.c_void_p),
                ("flags", c.c_uint64), ("tensor", _DLTensor)]


_DL_CPU, _DL_CUDA, _DL_CUDA_HOST, _DL_CUDA_MANAGED = 1, 2, 3, 13
_DL_DEVICES = (_DL_CPU, _DL_CUDA, _DL_CUDA_HOST, _DL_CUDA_MANAGED)
_DL_READ_ONLY = 1
_DL_DTYPES = {(2, 32): DType.F32, (2, 16): DType.F16, (4, 16): DType.BF16, (1, 16): DType.BF16}
_LEGACY_DEFAULT_STREAM = 1  # DLPack's name for CUDA's stream 0

_capsule_is = c.pythonapi.PyCapsule_IsValid
_capsule_is.restype, _capsule_is.argtypes = c.c_int, [c.py_object, c.c_char_p]
_capsule_pointer = c.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = c.c_void_p, [c.py_object, c.c_char_p]


def _export(array: Any, name: str, stream: int) -> object:
    """The array's DLPack capsule. On CUDA its producer orders what it has enqueued before `stream`."""
    device = array.__dlpack_device__()[0]
    if device not in _DL_DEVICES:
        raise error_of(3, "TENSOR_DEVICE", f"{name} is on DLPack device type {int(device)}; pass an array of the CPU "
                       "or of CUDA")
    order = (stream or _LEGACY_DEFAULT_STREAM) if device in (_DL_CUDA, _DL_CUDA_MANAGED) else None
    try:
        try:
            return array.__dlpack__(stream=order, max_version=(1, 0), copy=False)
        except TypeError:  # a producer from before DLPack 1.0 has no such arguments
            return array.__dlpack__(stream=order)
    except (BufferError, ValueError) as error:
        raise error_of(3, "TENSOR_DLPACK", f"{name} is a {_type_name(array)} that gives no DLPack view: {error}; pass "
                       "one that does, without a copy") from error


def _opened(capsule: object, name: str) -> tuple[_DLTensor, bool]:
    """The tensor of a capsule, and whether it is known to be read-only."""
    if _capsule_is(capsule, b"dltensor_versioned"):
        versioned = _DLVersioned.from_address(_capsule_pointer(capsule, b"dltensor_versioned"))
        if versioned.major != 1:
            raise error_of(3, "TENSOR_DLPACK", f"{name} has DLPack version {versioned.major}; 1 is understood")
        return versioned.tensor, bool(versioned.flags & _DL_READ_ONLY)
    if _capsule_is(capsule, b"dltensor"):
        return _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor")), False
    raise error_of(3, "TENSOR_DLPACK", f"{name} gave {capsule!r}, which is no unused DLPack capsule; pass an array "
                   "whose __dlpack__ makes a new one")


def _of_dlpack(array: Any, name: str, stream: int, writable: bool) -> _Memory:
    # The capsule is never renamed, so its own destructor calls the deleter when the view is gone.
    capsule = _export(array, name, stream)
    tensor, read_only = _opened(capsule, name)
    dtype = _DL_DTYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if dtype is None:
        raise _wrong_dtype(name, getattr(array, "dtype", f"DLPack type ({tensor.code}, {tensor.bits})"))
    if writable and read_only:
        raise _read_only(name)
    shape, size = tensor.shape[:tensor.ndim], _BYTES[dtype]
    strides = [size * n for n in tensor.strides[:tensor.ndim]] if tensor.strides else _contiguous(shape, size)
    on_cuda = tensor.device_type in (_DL_CUDA, _DL_CUDA_MANAGED)
    return _Memory((tensor.data or 0) + tensor.byte_offset, dtype, shape, strides, on_cuda, capsule)


def _contiguous(shape: Items[int], size: int) -> list[int]:
    strides = []
    for n in reversed(shape):
        strides.append(size)
        size *= n
    return strides[::-1]


def _memory_of(array: Any, name: str, stream: int, writable: bool) -> _Memory:
    if isinstance(array, np.ndarray):
        return _of_numpy(array, name, writable)
    if is_torch(array):
        return _of_torch(array, name)
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return _of_dlpack(array, name, stream, writable)
    raise error_of(3, "TENSOR_TYPE", f"{name} is a {_type_name(array)}; pass a torch tensor, a numpy array, or an "
                   "object with __dlpack__ and __dlpack_device__")


def tensor_of(array: Any, name: str, stream: int = 0, writable: bool = False) -> View:
    """A view of the array [tokens][heads][head_dim], valid while both live. stream: on which it is used."""
    memory = _memory_of(array, name, stream, writable)
    if len(memory.shape) != 3:
        raise error_of(3, "TENSOR_SHAPE", f"{name} has shape {tuple(memory.shape)}; it must be "
                       "[tokens][heads][head_dim]")
    tokens, heads, dim = memory.shape
    token_stride, head_stride, inner = memory.strides
    # A stride of 0 is an expanded array's, and means "contiguous" to the library.
    if ((inner != _BYTES[memory.dtype] and dim > 1) or token_stride < (tokens > 1) or head_stride < (heads > 1)):
        raise error_of(3, "TENSOR_STRIDE", f"{name} has strides {tuple(memory.strides)} in bytes; the last dimension "
                       "must be contiguous, the others positive: pass a contiguous copy of it")
    view = View(memory.address, memory.dtype, heads, dim, tokens, token_stride, head_stride)
    if memory.on_cuda:
        view.on_cuda = True
    if memory.owner is not None:
        view.owner = memory.owner
    return view


def lse_of(array: Any, queries: View, stream: int) -> _Memory:
    """The memory of a writable, contiguous float32 array [tokens][query_heads], beside its queries."""
    memory = _memory_of(array, "lse", stream, True)
    shape = (queries.tokens, queries.heads)
    if (tuple(memory.shape) != shape or memory.dtype != DType.F32
            or list(memory.strides) != _contiguous(shape, 4)):
        raise error_of(3, "LSE_SHAPE", f"lse is {memory.dtype.name} {tuple(memory.shape)}; it must be a writable, "
                       f"contiguous float32 array of shape {shape}")
    return memory


def empty_like(q: Any, dtype: DType | None) -> Any:
    """A new array of q's library, shape and device. dtype None: q's own of torch, float32 of numpy."""
    if isinstance(q, np.ndarray):
        return np.empty(q.shape, _TO_NUMPY[DType.F32 if dtype is None else DType(dtype)])
    if is_torch(q):
        wanted = q.dtype if dtype is None else getattr(sys.modules["torch"], TORCH_NAMES[DType(dtype)])
        return q.new_empty(q.shape, dtype=wanted)
    raise error_of(3, "TENSOR_OUT", f"out is None and q is a {_type_name(q)}; pass an out of your library")


def stream_of(stream: Any) -> int:
    """The handle of a CUDA stream: an int, or what torch (cuda_stream) and CuPy (ptr) call theirs."""
    handle = getattr(stream, "cuda_stream", getattr(stream, "ptr", stream))
    if not isinstance(handle, int) or handle < 0:
        raise error_of(3, "STREAM_TYPE", f"stream is {stream!r}; pass a torch.cuda.Stream, a cupy.cuda.Stream, or a "
                       "handle as int")
    return handle


@dataclass(frozen=True)
class MemoryHandle:
    """kvs_memory_handle: memory of an engine that the daemon opens to read. bytes: of the whole memory.

    fd: of MEMFD (sealed with F_SEAL_SHRINK) and CUDA_FD; it may be closed after the call. ipc: the 64 bytes of
    CUDA_IPC. PROCESS: this process's own memory, of which the library copies blocks when they are sealed.
    """

    kind: MemoryKind
    bytes: int
    fd: int = -1
    ipc: builtins.bytes = b""

    def native(self) -> lib.MemoryHandle:
        wanted = 64 if self.kind == MemoryKind.CUDA_IPC else 0
        if len(self.ipc) != wanted:
            raise error_of(3, "TENSOR_MEMORY", f"ipc has {len(self.ipc)} bytes; of kind {self.kind!r} pass {wanted}")
        if self.bytes < 0:
            raise error_of(3, "TENSOR_MEMORY", f"bytes is {self.bytes}; pass the size of the whole memory")
        ipc = (c.c_uint8 * 64)(*self.ipc)
        return lib.MemoryHandle(c.sizeof(lib.MemoryHandle), self.kind, self.fd, ipc, self.bytes)


@dataclass(frozen=True)
class BlockTensor:
    """kvs_block_tensor: the keys or the values of one layer, [block][slot][head][dim] in an engine's memory.

    offset and strides in bytes. block_tokens: a multiple or a divisor of the model's page_tokens. address: where
    (block 0, slot 0, head 0) lies in this process, for Sequence.load; 0: never loaded. dim_stride: 0: contiguous, as
    all but PROCESS must be. of(): from a tensor of this process.
    """

    memory: MemoryHandle
    offset: int
    dtype: DType
    blocks: int
    block_tokens: int
    heads: int
    head_dim: int
    block_stride: int
    slot_stride: int
    head_stride: int
    address: int = 0
    dim_stride: int = 0

    @classmethod
    def of(cls, array: Any, name: str = "tensor") -> BlockTensor:
        """Describes a numpy array or a CPU tensor [block][slot][head][dim] of any strides, in this process's memory:
        the caller keeps it alive while the session lasts."""
        memory = _memory_of(array, name, 0, True)
        if len(memory.shape) != 4 or memory.on_cuda:
            raise error_of(3, "TENSOR_SHAPE", f"{name} has shape {tuple(memory.shape)}; it must be "
                           "[block][slot][head][dim], in host memory")
        return cls(MemoryHandle(MemoryKind.PROCESS, 0), 0, memory.dtype, *memory.shape, *memory.strides[:3],
                   memory.address, memory.strides[3])

    def native(self, memory: lib.MemoryHandle) -> lib.BlockTensor:
        if self.offset < 0:
            raise error_of(3, "TENSOR_OFFSET", f"offset is {self.offset}; pass bytes from the memory's begin")
        return lib.BlockTensor(c.sizeof(lib.BlockTensor), c.pointer(memory), self.offset, self.address or None,
                               self.dtype, self.blocks, self.block_tokens, self.heads, self.head_dim,
                               self.block_stride, self.slot_stride, self.head_stride, self.dim_stride)


def take_array(library: lib.Library, array: lib.Array) -> npt.NDArray[Any]:
    """A copy of what kvs_inspect returned, which is freed."""
    try:
        shape = tuple(array.shape[:array.dims])
        kind = np.dtype(_OF_ARRAY[array.type])
        raw = c.string_at(array.data, array.bytes) if array.bytes else b""
        return np.frombuffer(raw, kind).reshape(shape).copy()
    finally:
        library.kvs_array_free(array)
