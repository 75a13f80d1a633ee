# SPDX-License-Identifier: Apache-2.0
"""Finds and declares libkvstrata: the functions of kvstrata.h with their C types.

Looked for in this order: KVSTRATA_LIBRARY (a file, or a folder that holds both libraries), beside this
package (a wheel has the linked one there), build/lib of a source tree around it, the system's search path, there by
its ABI version. Loaded once a transport for the process.
"""

from __future__ import annotations

import ctypes as c
import os
import pathlib
from collections.abc import Iterator

from .errors import KvstrataError, error_of

ABI_VERSION = 2
NAMES = {"linked": "libkvstrata.so", "remote": "libkvstrata_remote.so"}


class AttachOptions(c.Structure):
    _fields_ = [("size", c.c_size_t), ("device_uuid", c.c_char_p), ("client_name", c.c_char_p),
                ("backend", c.c_char_p), ("threads", c.c_uint32), ("timeout_ms", c.c_uint32)]


class ModelDesc(c.Structure):
    _fields_ = [("size", c.c_size_t), ("name", c.c_char_p), ("digest", c.c_char_p),
                ("adapter", c.c_char_p), ("layers", c.c_int32), ("query_heads", c.c_int32),
                ("kv_heads", c.c_int32), ("head_dim", c.c_int32), ("page_tokens", c.c_int32),
                ("dtype", c.c_int32), ("keys_pre_rope", c.c_int32), ("rank", c.c_int32),
                ("ranks", c.c_int32), ("boundary_tokens", c.POINTER(c.c_int32)),
                ("boundary_count", c.c_size_t), ("rope_theta", c.c_double), ("rope_dim", c.c_int32),
                ("rope_interleaved", c.c_int32), ("scale", c.c_double)]


class LookupOptions(c.Structure):
    _fields_ = [("size", c.c_size_t), ("plan", c.c_char_p), ("device_uuid", c.c_char_p),
                ("lease_ms", c.c_uint32), ("reserved", c.c_uint32)]


class LookupResult(c.Structure):
    _fields_ = [("size", c.c_size_t), ("held", c.c_uint32), ("indexed", c.c_uint32),
                ("device_tokens", c.c_uint32), ("host_tokens", c.c_uint32),
                ("disk_tokens", c.c_uint32), ("reserved", c.c_uint32)]


class Room(c.Structure):
    _fields_ = [("tokens", c.c_uint64), ("bytes", c.c_uint64)]


class PoolCapacity(c.Structure):
    _fields_ = [("free", Room), ("after_eviction", Room), ("limit", Room)]


class CapacityResult(c.Structure):
    _fields_ = [("size", c.c_size_t), ("device", PoolCapacity), ("host", PoolCapacity),
                ("open_tokens", c.c_uint32), ("reserved", c.c_uint32)]


class Tensor(c.Structure):
    _fields_ = [("data", c.c_void_p), ("dtype", c.c_int32), ("heads", c.c_int32),
                ("head_dim", c.c_int32), ("tokens", c.c_int32), ("token_stride", c.c_int64),
                ("head_stride", c.c_int64)]


class MemoryHandle(c.Structure):
    _fields_ = [("size", c.c_size_t), ("kind", c.c_int32), ("fd", c.c_int32), ("ipc", c.c_uint8 * 64),
                ("bytes", c.c_uint64)]


class BlockTensor(c.Structure):
    _fields_ = [("size", c.c_size_t), ("memory", c.POINTER(MemoryHandle)), ("offset", c.c_uint64),
                ("address", c.c_void_p), ("dtype", c.c_int32), ("blocks", c.c_int32),
                ("block_tokens", c.c_int32), ("heads", c.c_int32), ("head_dim", c.c_int32),
                ("block_stride", c.c_int64), ("slot_stride", c.c_int64), ("head_stride", c.c_int64),
                ("dim_stride", c.c_int64)]


class StepOptions(c.Structure):
    _fields_ = [("size", c.c_size_t), ("stream", c.c_void_p), ("padding", c.c_uint32), ("reserved", c.c_uint32)]


class StepMember(c.Structure):
    _fields_ = [("sequence", c.c_uint64), ("tokens", c.POINTER(c.c_int32)), ("n", c.c_uint32)]


class BuildResult(c.Structure):
    _fields_ = [("size", c.c_size_t), ("indexed_tokens", c.c_uint32), ("built_blocks", c.c_uint32),
                ("extents", c.c_uint32), ("reserved", c.c_uint32)]


class AttendCost(c.Structure):
    _fields_ = [("size", c.c_size_t), ("rows", c.c_uint64), ("coarse_rows", c.c_uint64),
                ("attend_bytes", c.c_uint64), ("select_bytes", c.c_uint64)]


class OpenOptions(c.Structure):
    _fields_ = [("size", c.c_size_t), ("max_held", c.c_uint32), ("only_reported", c.c_int32),
                ("reserve_tokens", c.c_uint32), ("private_pages", c.c_uint32), ("key", c.c_char_p)]


class Opened(c.Structure):
    _fields_ = [("size", c.c_size_t), ("sequence", c.c_uint64), ("held", c.c_uint32),
                ("indexed", c.c_uint32), ("surprisal_tokens", c.c_uint32),
                ("boundary_tokens", c.c_uint32)]


class Page(c.Structure):
    _fields_ = [("address", c.c_void_p), ("tier", c.c_uint32), ("flags", c.c_uint32)]


class BlockShape(c.Structure):
    _fields_ = [("size", c.c_size_t), ("layers", c.c_int32), ("query_heads", c.c_int32), ("kv_heads", c.c_int32),
                ("head_dim", c.c_int32), ("dtype", c.c_int32), ("block_tokens", c.c_int32), ("scale", c.c_double),
                ("block_stride", c.c_int64), ("head_stride", c.c_int64), ("slot_stride", c.c_int64),
                ("value_offset", c.c_int64), ("index_offset", c.c_int64), ("max_rows", c.c_int32),
                ("max_decodes", c.c_int32), ("max_tokens", c.c_int32), ("reserved", c.c_int32)]


class BlockNeeds(c.Structure):
    _fields_ = [("size", c.c_size_t), ("workspace_bytes", c.c_uint64), ("unit_tokens", c.c_int32),
                ("min_tokens", c.c_int32)]


class BlockBatch(c.Structure):
    _fields_ = [("size", c.c_size_t), ("blocks", c.c_void_p), ("blocks_of_row", c.c_int64), ("tokens", c.c_void_p),
                ("query_starts", c.c_void_p), ("in_full", c.c_void_p), ("rows", c.c_int32), ("new_tokens", c.c_int32),
                ("sampled", c.c_int32), ("reserved", c.c_int32)]


class PlanesShape(c.Structure):
    _fields_ = [("size", c.c_size_t), ("layers", c.c_int32), ("query_heads", c.c_int32), ("kv_heads", c.c_int32),
                ("head_dim", c.c_int32), ("dtype", c.c_int32), ("block_tokens", c.c_int32), ("scale", c.c_double),
                ("block_stride", c.c_int64), ("slots", c.c_int32), ("max_rows", c.c_int32), ("max_tokens", c.c_int32),
                ("reserved", c.c_int32)]


class PlanesForm(c.Structure):
    _fields_ = [("size", c.c_size_t), ("token_bytes", c.c_int64), ("slot_bytes", c.c_uint64),
                ("workspace_bytes", c.c_uint64), ("lower_token_bytes", c.c_int64)]


class PlanesBatch(c.Structure):
    _fields_ = [("size", c.c_size_t), ("blocks", c.c_void_p), ("blocks_of_row", c.c_int64), ("tokens", c.c_void_p),
                ("query_starts", c.c_void_p), ("slots", c.c_void_p), ("in_full", c.c_void_p), ("rows", c.c_int32),
                ("decodes", c.c_int32)]


class PlanesRows(c.Structure):
    _fields_ = [("data", c.c_void_p), ("stride", c.c_int64)]


class Array(c.Structure):
    _fields_ = [("type", c.c_int32), ("dims", c.c_int32), ("shape", c.c_int64 * 4),
                ("data", c.c_void_p), ("bytes", c.c_size_t)]


_SESSION, _STEP, _MODEL, _SEQUENCE = c.c_void_p, c.c_void_p, c.c_uint64, c.c_uint64
_INT, _SIZE, _U32, _TEXT = c.c_int, c.c_size_t, c.c_uint32, c.c_char_p
_P = c.POINTER

# name: (result, arguments)
_FUNCTIONS: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "kvs_abi_version": (_INT, ()),
    "kvs_version": (_TEXT, ()),
    "kvs_transport": (_TEXT, ()),
    "kvs_code_name": (_TEXT, (_INT,)),
    "kvs_error_message": (_TEXT, ()),
    "kvs_error_reason": (_TEXT, ()),
    "kvs_attach": (_INT, (_TEXT, _P(AttachOptions), _P(_SESSION))),
    "kvs_detach": (None, (_SESSION,)),
    "kvs_ping": (_INT, (_SESSION,)),
    "kvs_model_register": (_INT, (_SESSION, _P(ModelDesc), _P(_MODEL))),
    "kvs_sequence_open": (_INT, (_SESSION, _MODEL, _TEXT, _P(c.c_int32), _SIZE, _P(_SEQUENCE), _P(_U32))),
    "kvs_sequence_open_with": (_INT, (_SESSION, _MODEL, _TEXT, _P(c.c_int32), _SIZE, _P(OpenOptions),
                                      _P(Opened))),
    "kvs_lookup": (_INT, (_SESSION, _MODEL, _P(LookupOptions), _P(c.c_int32), _SIZE, _P(LookupResult))),
    "kvs_capacity": (_INT, (_SESSION, _MODEL, _TEXT, _P(CapacityResult))),
    "kvs_sequence_fork": (_INT, (_SESSION, _SEQUENCE, _P(_SEQUENCE))),
    "kvs_close_key": (_INT, (_SESSION, _TEXT)),
    "kvs_truncate_key": (_INT, (_SESSION, _TEXT, _U32)),
    "kvs_sequence_truncate": (_INT, (_SESSION, _SEQUENCE, _U32)),
    "kvs_sequences_reorder": (_INT, (_SESSION, _P(_SEQUENCE), _SIZE, _P(_U32), _SIZE, _P(_SEQUENCE))),
    "kvs_sequence_close": (_INT, (_SESSION, _SEQUENCE)),
    "kvs_sequence_tokens": (_INT, (_SESSION, _SEQUENCE, _P(_U32))),
    "kvs_sequence_status": (_INT, (_SESSION, _SEQUENCE, c.c_void_p, _SIZE)),
    "kvs_sequence_plan": (_INT, (_SESSION, _SEQUENCE, c.c_void_p, _SIZE)),
    "kvs_prefill_done": (_INT, (_SESSION, _SEQUENCE)),
    "kvs_report_verified": (_INT, (_SESSION, _SEQUENCE, _U32, _U32, c.c_int32)),
    "kvs_report": (_INT, (_SESSION, _SEQUENCE, _U32, _U32, c.c_void_p, c.c_void_p, c.c_void_p)),
    "kvs_settle": (_INT, (_SESSION, _SEQUENCE)),
    "kvs_plan_needs": (_INT, (_SESSION, _TEXT, _P(_U32), c.c_void_p, _SIZE)),
    "kvs_sequence_build": (_INT, (_SESSION, _SEQUENCE, _TEXT, _P(BuildResult))),
    "kvs_sequence_recompress": (_INT, (_SESSION, _SEQUENCE)),
    "kvs_work_cancel": (_INT, (_SESSION, _SEQUENCE)),
    "kvs_tensors_register": (_INT, (_SESSION, _MODEL, c.c_int32, _P(BlockTensor), _P(BlockTensor))),
    "kvs_blocks_seal": (_INT, (_SESSION, _SEQUENCE, _U32, _P(c.c_int32), _SIZE, _P(c.c_int32), _SIZE)),
    "kvs_blocks_acknowledged": (_INT, (_SESSION, _SEQUENCE, _P(_U32))),
    "kvs_blocks_load": (_INT, (_SESSION, _SEQUENCE, _U32, _P(c.c_int32), _SIZE, c.c_void_p)),
    "kvs_step_begin": (_INT, (_SESSION, _P(StepMember), _SIZE, c.c_void_p, _P(_STEP), c.c_void_p)),
    "kvs_step_begin_with": (_INT, (_SESSION, _P(StepMember), _SIZE, _P(StepOptions), _P(_STEP), c.c_void_p)),
    "kvs_late_tokens": (_INT, (_SESSION, _P(StepMember), _SIZE, c.c_int32)),
    "kvs_append": (_INT, (_STEP, c.c_int32, _P(Tensor), _P(Tensor))),
    "kvs_select": (_INT, (_STEP, c.c_int32, _P(Tensor))),
    "kvs_attend": (_INT, (_STEP, c.c_int32, _P(Tensor), _P(Tensor), c.c_void_p)),
    "kvs_step_replay": (_INT, (_STEP,)),
    "kvs_step_end": (_INT, (_STEP, c.c_void_p)),
    "kvs_step_abort": (None, (_STEP,)),
    "kvs_selection_groups": (_INT, (_STEP, _U32, _P(_U32))),
    "kvs_selection": (_INT, (_STEP, _U32, _U32, _INT, c.c_void_p, _SIZE, _P(_SIZE))),
    "kvs_attend_cost": (_INT, (_STEP, _U32, _P(AttendCost))),
    "kvs_page_table": (_INT, (_SESSION, _SEQUENCE, c.c_void_p, _SIZE, _P(_SIZE), _P(c.c_uint64))),
    "kvs_inspect": (_INT, (_SESSION, _SEQUENCE, _TEXT, _P(Array))),
    "kvs_array_free": (None, (_P(Array),)),
    "kvs_block_attention_index_bytes": (_INT, (_TEXT, _P(BlockShape), _P(c.c_int64))),
    "kvs_block_attention_open": (_INT, (_TEXT, _P(BlockShape), _P(c.c_void_p), _P(BlockNeeds))),
    "kvs_block_attention_bind": (_INT, (c.c_void_p, _P(c.c_uint64), _SIZE, c.c_void_p)),
    "kvs_block_attention_begin": (_INT, (c.c_void_p, _P(BlockBatch), c.c_void_p)),
    "kvs_block_attention_attend": (_INT, (c.c_void_p, c.c_int32, c.c_void_p, c.c_int64, c.c_void_p, c.c_int32,
                                           c.c_void_p)),
    "kvs_block_attention_audit": (_INT, (c.c_void_p, c.c_int32, c.c_void_p, c.c_void_p, c.c_void_p)),
    "kvs_block_attention_index": (_INT, (c.c_void_p, c.c_void_p, _SIZE, c.c_void_p)),
    "kvs_block_attention_close": (None, (c.c_void_p,)),
    "kvs_block_planes_form": (_INT, (_TEXT, _P(PlanesShape), _P(PlanesForm))),
    "kvs_block_planes_open": (_INT, (_TEXT, _P(PlanesShape), _P(c.c_void_p))),
    "kvs_block_planes_bind": (_INT, (c.c_void_p, _P(c.c_uint64), _SIZE, c.c_void_p)),
    "kvs_block_planes_bind_lower": (_INT, (c.c_void_p, _P(c.c_uint64), _SIZE)),
    "kvs_block_planes_begin": (_INT, (c.c_void_p, _P(PlanesBatch), c.c_void_p)),
    "kvs_block_planes_decode": (_INT, (c.c_void_p, c.c_int32, PlanesRows, PlanesRows, PlanesRows, c.c_void_p, c.c_int32,
                                       c.c_void_p)),
    "kvs_block_planes_prompt": (_INT, (c.c_void_p, c.c_int32, c.c_int32, c.c_int32, c.c_int32, PlanesRows, PlanesRows,
                                       c.c_void_p, c.c_void_p, c.c_void_p)),
    "kvs_block_planes_close": (None, (c.c_void_p,)),
}

_loaded: dict[str, Library] = {}


class Library:
    """A loaded libkvstrata. Attributes are its functions; `check` raises a failed call's error."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self.dll = c.CDLL(path)
        except OSError as error:
            raise KvstrataError(f"{path} cannot be loaded: {error}", "LIBRARY_UNUSABLE") from error
        for name, (result, arguments) in _FUNCTIONS.items():
            try:
                function = getattr(self.dll, name)
            except AttributeError as error:
                raise KvstrataError(f"{path} has no {name}: it is not libkvstrata, or another version",
                                    "LIBRARY_UNUSABLE") from error
            function.restype, function.argtypes = result, list(arguments)
            setattr(self, name, function)
        found = self.kvs_abi_version()
        if found != ABI_VERSION:
            raise KvstrataError(f"{path} has ABI version {found}; this package speaks {ABI_VERSION}",
                                "LIBRARY_UNUSABLE")

    def __getattr__(self, name: str) -> c._NamedFuncPointer:  # for type checkers: set in __init__
        raise AttributeError(name)

    def check(self, code: int) -> None:
        """Raises the calling thread's last failure unless `code` is 0."""
        if code:
            reason, message = self.kvs_error_reason().decode(), self.kvs_error_message().decode()
            raise error_of(code, reason, message or self.kvs_code_name(code).decode())


def _candidates(name: str) -> Iterator[str]:
    here = pathlib.Path(__file__).resolve()
    yield str(here.parent / name)
    for parent in here.parents:
        yield str(parent / "build" / "lib" / name)


def find(transport: str = "linked") -> str:
    """Path of the library of a transport; a bare name where the system's search path is to find it."""
    if transport not in NAMES:
        raise error_of(3, "TRANSPORT_UNKNOWN", f"transport {transport!r}; allowed: {', '.join(NAMES)}")
    name = NAMES[transport]
    if given := os.environ.get("KVSTRATA_LIBRARY"):
        path = pathlib.Path(given)
        if path.is_dir():
            path = path / name
        elif transport != "linked":
            path = path.with_name(name)
        if not path.exists():
            raise KvstrataError(f"KVSTRATA_LIBRARY = {given!r}: there is no {path}", "LIBRARY_MISSING")
        return str(path)
    return next((path for path in _candidates(name) if os.path.exists(path)), f"{name}.{ABI_VERSION}")


def load(transport: str = "linked") -> Library:
    path = find(transport)
    if path not in _loaded:
        if os.sep not in path:
            try:
                c.CDLL(path)
            except OSError as error:
                name = NAMES[transport]
                raise KvstrataError(f"{name} is not beside {pathlib.Path(__file__).parent} or in build/lib of a folder "
                                    f"above it, nor {path} on the system's search path; install the package libkvstrata, "
                                    f"or set KVSTRATA_LIBRARY to the one of a source tree, build/lib/{name} (make build)",
                                    "LIBRARY_MISSING") from error
        _loaded[path] = Library(path)
    return _loaded[path]
