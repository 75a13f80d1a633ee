# SPDX-License-Identifier: Apache-2.0
"""Plan `strata` over an engine's own blocks on a GPU, in the engine's own graphs. No daemon is asked.

    shape = PlanesShape(layers=32, query_heads=32, kv_heads=8, head_dim=128, dtype="bf16", ...)
    form = form_of("strata", shape)                            # by which the engine makes its blocks
    planes = BlockPlanes("strata", shape)
    planes.bind([layer.data_ptr() for layer in layers], workspace.data_ptr())
    planes.begin(...)                                          # each step, outside of graphs
    planes.decode(layer, q, k, v, out, rows, stream)           # each layer, captured or not
    planes.prompt(layer, row, before, count, ...)              # each layer and row that is of a prompt

Blocks hold no rows: a block of a layer is the sealed groups of its tokens. Rows of groups that are not full yet lie in
a slot of the request's, in the workspace. All addresses are of the GPU, but that with lower = "host" lower runs lie
where bind_lower() says. include/kvstrata/block_planes.h has the
contract. Errors: KvstrataError's kinds. Threads: one call at a time.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from . import library as lib
from .block_attention import DTYPES

BLOCK_TOKENS = 64  # the plan's unit


@dataclass(frozen=True)
class PlanesShape:
    """A model's layers over blocks, as kvs_planes_shape has them. dtype, of queries, keys, values and outputs: "f16" or
    "bf16". scale: of a query's products with keys; 0: 1 / sqrt(head_dim). block_stride: bytes, a multiple of 32. slots:
    requests that may be under way; max_rows: sequences of a step; max_tokens: of a sequence."""

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    block_tokens: int = BLOCK_TOKENS
    scale: float = 0.0
    block_stride: int = 0
    slots: int = 0
    max_rows: int = 0
    max_tokens: int = 0

    def _raw(self) -> lib.PlanesShape:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return lib.PlanesShape(c.sizeof(lib.PlanesShape), **{**values, "dtype": DTYPES.get(self.dtype, 0)})


class PlanesForm(NamedTuple):
    """Bytes. token_bytes: of a block, for each KV head and token of it; slot_bytes: of the workspace, for each slot;
    workspace_bytes: that bind() takes, slots included; 0 without a GPU; lower_token_bytes: beside token_bytes, of the host
    memory that bind_lower() takes; 0: lower runs are in blocks."""

    token_bytes: int
    slot_bytes: int
    workspace_bytes: int
    lower_token_bytes: int


class Rows(NamedTuple):
    """Rows of heads on the GPU, a row's heads side by side. stride: bytes from a row to the next. Both are multiples of
    16."""

    address: int
    stride: int

    def _raw(self) -> lib.PlanesRows:
        return lib.PlanesRows(*self)


def form_of(plan: str, shape: PlanesShape) -> PlanesForm:
    """By the shape's geometry and limits; its stride does not count. Unimplemented, BLOCK_PLAN: another plan than
    planes, or with options that are not served."""
    library, form = lib.load(), lib.PlanesForm(c.sizeof(lib.PlanesForm))
    library.check(library.kvs_block_planes_form(plan.encode(), c.byref(shape._raw()), c.byref(form)))
    return PlanesForm(form.token_bytes, form.slot_bytes, form.workspace_bytes, form.lower_token_bytes)


class BlockPlanes:
    """On the process's current GPU. Unavailable: no GPU, or not its library."""

    def __init__(self, plan: str, shape: PlanesShape) -> None:
        self._library, self._handle = lib.load(), c.c_void_p()
        self._check(self._library.kvs_block_planes_open(plan.encode(), c.byref(shape._raw()), c.byref(self._handle)))

    def _check(self, code: int) -> None:
        if code:
            self._library.check(code)

    def bind(self, layers: Sequence[int], workspace: int) -> None:
        """layers: where each layer's first block lies. workspace: form_of()'s workspace_bytes, zeroed, the engine's
        until close()."""
        addresses = (c.c_uint64 * len(layers))(*layers)
        self._check(self._library.kvs_block_planes_bind(self._handle, addresses, len(layers), workspace))

    def bind_lower(self, layers: Sequence[int]) -> None:
        """With lower = "host". layers: where the lower runs of each layer's first block lie, a multiple of 32; those of
        others follow, 64 * kv_heads * lower_token_bytes each. Host memory that is registered with CUDA until the stream is
        behind the last call."""
        addresses = (c.c_uint64 * len(layers))(*layers)
        self._check(self._library.kvs_block_planes_bind_lower(self._handle, addresses, len(layers)))

    def begin(self, *, blocks: int, blocks_of_row: int, tokens: int, query_starts: int, slots: int,
              in_full: int | None, rows: int, decodes: int, stream: int) -> None:
        """A step's rows: `decodes` that decode, of one token each, then those of prompts. blocks: int32
        [rows][blocks_of_row]; tokens: int32 [rows], with the step's own; query_starts: int32 [rows + 1]; slots: int32
        [rows], below 0 of a row that pads; in_full: bool [rows] of those that attend all of it finely."""
        batch = lib.PlanesBatch(c.sizeof(lib.PlanesBatch), blocks, blocks_of_row, tokens, query_starts, slots, in_full,
                                rows, decodes)
        self._check(self._library.kvs_block_planes_begin(self._handle, c.byref(batch), stream))

    def decode(self, layer: int, q: Rows, k: Rows, v: Rows, out: int, rows: int, stream: int) -> None:
        """The first rows of the step: k, v [rows][kv_heads] join the sequences, q and out [rows][query_heads], out
        contiguous. What a captured call does depends on `rows` alone."""
        self._check(self._library.kvs_block_planes_decode(self._handle, layer, q._raw(), k._raw(), v._raw(), out, rows,
                                                          stream))

    def prompt(self, layer: int, row: int, before: int, count: int, k: Rows, v: Rows, all_k: int, all_v: int,
               stream: int) -> None:
        """Row `row` of the step, of which `before` tokens were there; k, v [count][kv_heads] are the next. All its rows
        go to all_k and all_v [before + count][kv_heads][head_dim], contiguous, for the engine's own attention."""
        self._check(self._library.kvs_block_planes_prompt(self._handle, layer, row, before, count, k._raw(), v._raw(),
                                                          all_k, all_v, stream))

    def close(self) -> None:
        """Again is harmless."""
        handle, self._handle = self._handle, c.c_void_p()
        self._library.kvs_block_planes_close(handle)
