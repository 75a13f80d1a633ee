# SPDX-License-Identifier: Apache-2.0
"""Decode steps over an engine's own blocks on a GPU attend by a plan, in the engine's own graphs. No daemon is asked.

    shape = BlockShape(layers=32, query_heads=32, kv_heads=8, head_dim=128, dtype="bf16", block_tokens=16, ...)
    more = index_bytes("quest", shape)                     # that each block of a layer has behind its rows
    attention = BlockAttention("quest", shape)
    attention.bind([layer.data_ptr() for layer in layers], workspace.data_ptr())
    attention.begin(...)                                   # each step, outside of graphs
    attention.attend(layer, q, stride, out, rows, stream)  # each layer, captured or not

All addresses are of the GPU. include/kvstrata/block_attention.h has the contract. Errors: KvstrataError's kinds. Threads: one
call at a time.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Sequence
from dataclasses import dataclass, fields

from . import library as lib

DTYPES = {"f16": 2, "bf16": 3}


@dataclass(frozen=True)
class BlockShape:
    """A model's keys and values in blocks. Strides, offsets: bytes, multiples of 16, as kvs_block_shape has them. dtype:
    "f16" or "bf16". scale: of a query's products with keys; 0: 1 / sqrt(head_dim). max_rows: sequences of a step;
    max_decodes: of those, that attend by the plan; max_tokens: of a sequence."""

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    block_tokens: int
    scale: float = 0.0
    block_stride: int = 0
    head_stride: int = 0
    slot_stride: int = 0
    value_offset: int = 0
    index_offset: int = 0
    max_rows: int = 0
    max_decodes: int = 0
    max_tokens: int = 0

    def _raw(self) -> lib.BlockShape:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return lib.BlockShape(c.sizeof(lib.BlockShape), **{**values, "dtype": DTYPES.get(self.dtype, 0)})


def index_bytes(plan: str, shape: BlockShape) -> int:
    """What a plan adds to each block of a layer; strides and limits of the shape do not count. Needs no GPU.
    Unimplemented: a plan that needs a state by sequence."""
    library, out = lib.load(), c.c_int64()
    library.check(library.kvs_block_attention_index_bytes(plan.encode(), c.byref(shape._raw()), c.byref(out)))
    return out.value


class BlockAttention:
    """On the process's current GPU. workspace_bytes: of the zeroed memory that bind() takes, which stays the engine's.
    unit_tokens: that the index keeps together; 0: the plan has none. min_tokens: shorter sequences attend everything.
    Unavailable: no GPU, or not its library."""

    def __init__(self, plan: str, shape: BlockShape) -> None:
        self._library, self._handle = lib.load(), c.c_void_p()
        needs = lib.BlockNeeds(c.sizeof(lib.BlockNeeds))
        self._check(self._library.kvs_block_attention_open(plan.encode(), c.byref(shape._raw()), c.byref(self._handle),
                                                           c.byref(needs)))
        self.workspace_bytes, self.unit_tokens = int(needs.workspace_bytes), int(needs.unit_tokens)
        self.min_tokens = int(needs.min_tokens)

    def _check(self, code: int) -> None:
        if code:
            self._library.check(code)

    def bind(self, layers: Sequence[int], workspace: int) -> None:
        """layers: the address of each layer's first key."""
        addresses = (c.c_uint64 * len(layers))(*layers)
        self._check(self._library.kvs_block_attention_bind(self._handle, addresses, len(layers), workspace))

    def begin(self, *, blocks: int, blocks_of_row: int, tokens: int, query_starts: int, in_full: int | None, rows: int,
              new_tokens: int, stream: int, sampled: int | None = None) -> None:
        """A step's rows, decoding or not. blocks: int32 [rows][blocks_of_row]; tokens: int32 [rows], with the step's own;
        query_starts: int32 [rows + 1]; in_full: bool [rows] of those that attend everything; new_tokens: of a row at most,
        0 where none completes a unit; sampled: a row that decodes, for audit()."""
        batch = lib.BlockBatch(c.sizeof(lib.BlockBatch), blocks, blocks_of_row, tokens, query_starts, in_full, rows,
                               new_tokens, 0 if sampled is None else sampled + 1)
        self._check(self._library.kvs_block_attention_begin(self._handle, c.byref(batch), stream))

    def attend(self, layer: int, q: int, q_stride: int, out: int, rows: int, stream: int) -> None:
        """The first rows of the step, at most max_decodes: q, out [rows][query_heads][head_dim], out contiguous.
        q_stride: bytes from a row's queries to the next's, a multiple of 16."""
        self._check(self._library.kvs_block_attention_attend(self._handle, layer, q, q_stride, out, rows, stream))

    def audit(self, layer: int, outputs: int, lse: int, stream: int) -> None:
        """A layer of the row that begin() sampled, behind its step: float [2][query_heads][head_dim] and [2][query_heads],
        the plan's, then full attention's, in memory of the GPU or page-locked of the host."""
        self._check(self._library.kvs_block_attention_audit(self._handle, layer, outputs, lse, stream))

    def index(self, blocks: int, count: int, stream: int) -> None:
        """Full blocks that were filled otherwise than by steps: int32 [count]. Between steps."""
        self._check(self._library.kvs_block_attention_index(self._handle, blocks, count, stream))

    def close(self) -> None:
        """Again is harmless."""
        handle, self._handle = self._handle, c.c_void_p()
        self._library.kvs_block_attention_close(handle)
