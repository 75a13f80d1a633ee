# SPDX-License-Identifier: Apache-2.0
"""A group of layers whose blocks have the form of planes: what of vLLM's batch libkvstrata is told each step, and the
memory beside the blocks. That is a slot for each request, where its newest rows lie, and the rows of one layer of one
prompt, which FlashAttention reads; with lower = "host" the blocks' lower planes (lower_planes.py), too.

Threads: the worker's.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from kvstrata.block_planes import BLOCK_TOKENS, BlockPlanes, PlanesShape, Rows, form_of
from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.attention.backend import CommonAttentionMetadata

from .block_rows import last_of_prompts
from .lower_planes import LowerPlanes
from .unsupported import Unsupported

_log = logging.getLogger("vllm.kvstrata")
_ALIGNED, _GPU = 512, "cuda"  # bytes; the process's current one


@dataclass(frozen=True)
class Piece:
    """What a step computes of a row's prompt: `count` tokens behind `before` others, at `start` among the step's."""

    row: int
    start: int
    before: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True)
class Pieces:
    """Side by side in the step, for one call of FlashAttention: one, or some that have no tokens before. q_starts,
    k_starts: int32 [pieces + 1] on the GPU; longest_q, longest_k: tokens."""

    of_rows: list[Piece]
    q_starts: torch.Tensor
    k_starts: torch.Tensor
    longest_q: int
    longest_k: int

    @property
    def tokens(self) -> slice:
        """Theirs among the step's."""
        return slice(self.of_rows[0].start, self.of_rows[-1].end)


def slots_of(common: CommonAttentionMetadata, ends: np.ndarray, new: np.ndarray) -> np.ndarray:
    """int32 [rows]: a row's index in the runner's table of requests; -1: it pads a graph, or vLLM made it up, to warm
    up or to capture. ends, new: each row's tokens, and those of the step. Unsupported: vLLM says no indexes."""
    if common.req_idx is None:
        raise Unsupported("plan strata needs vLLM's model runner V2, which says whose a row is; take "
                          "VLLM_USE_V2_MODEL_RUNNER=0 away, or the plan")
    slots = np.full(common.num_reqs, -1, np.int32)
    count = min(len(common.req_idx), common.num_reqs)
    requests = ends[:count] > new[:count]
    if common.is_prefilling is not None:  # a request that has no tokens yet
        requests |= common.is_prefilling[:count].numpy()
    slots[:count] = np.where(requests, common.req_idx[:count], -1)
    return slots


def pieces_of(starts: np.ndarray, ends: np.ndarray, slots: np.ndarray, decodes: int) -> list[list[Piece]]:
    """What rows behind the first `decodes` have, in a list what FlashAttention attends at once. starts: [rows + 1]."""
    found: list[list[Piece]] = []
    for row in range(decodes, len(slots)):
        start, count = int(starts[row]), int(starts[row + 1] - starts[row])
        if slots[row] < 0 or count == 0:
            continue
        piece = Piece(row, start, int(ends[row]) - count, count)
        last = found[-1][-1] if found else None
        if last is not None and piece.before == last.before == 0 and last.end == start:
            found[-1].append(piece)
        else:
            found.append([piece])
    return found


class PlanesRows:
    """layers: vLLM's, by name, all of `shape`'s geometry; their `impl.index` becomes their place here. The stride and
    the limits of `shape` are found out."""

    # The process's, by the layers' names. vLLM makes its blocks twice, the first time to measure what graphs take.
    _of_process: ClassVar[dict[tuple[str, ...], PlanesRows]] = {}
    _engine: ClassVar[Any] = None  # the configuration that memory is reserved for
    _reserved: ClassVar[torch.Tensor | None] = None  # what no group of layers has taken yet
    _prompt: ClassVar[torch.Tensor | None] = None  # keys and values of a layer, for all of them in turn

    def __init__(self, plan: str, shape: PlanesShape, layers: Mapping[str, Any], config: Any, device: torch.device
                 ) -> None:
        self._plan, self._layers, self._device = plan, layers, device
        self._shape = limited(replace(shape, scale=float(next(iter(layers.values())).impl.scale)), config)
        for index, layer in enumerate(layers.values()):
            layer.impl.index = index
        self._planes: BlockPlanes | None = None
        self._first, self._bound = next(iter(layers.values())), (0, 0)
        self._ends = np.zeros(self._shape.slots, np.int32)  # tokens of whoever was last in a slot
        before = self._of_process.get(tuple(layers))
        self._workspace = None if before is None else before._workspace
        self._lower = None if before is None else before._lower
        self._of_process[tuple(layers)] = self

    def begin(self, common: CommonAttentionMetadata, decodes: int) -> list[Pieces]:
        """A step, before its graph: `decodes` rows in front decode, and the answer are the others."""
        planes, rows = self._living(), common.num_reqs
        assert common.seq_lens_cpu_upper_bound is not None  # exact without drafts
        starts = common.query_start_loc_cpu[:rows + 1].numpy()
        ends, new = common.seq_lens_cpu_upper_bound[:rows].numpy(), starts[1:] - starts[:-1]
        slots = slots_of(common, ends, new)
        self._go_on(slots, ends, ends - new)
        self._slots, self._flags = self._there(slots), last_of_prompts(common, decodes, self._device)
        table = common.block_table_tensor
        planes.begin(blocks=table.data_ptr(), blocks_of_row=table.stride(0), tokens=common.seq_lens.data_ptr(),
                     query_starts=common.query_start_loc.data_ptr(), slots=self._slots.data_ptr(),
                     in_full=None if self._flags is None else self._flags.data_ptr(), rows=rows, decodes=decodes,
                     stream=self._stream())
        return self._placed(pieces_of(starts, ends, slots, decodes))

    def decode(self, index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor
               ) -> None:
        """query, output: [rows][heads][head_dim]; key, value: [rows][kv_heads][head_dim]. What has other strides than
        rows of heads is copied. Captured or not."""
        assert self._planes is not None
        q, k, v = (whole(tensor) for tensor in (query, key, value))
        self._planes.decode(index, rows_of(q), rows_of(k), rows_of(v), output.data_ptr(), len(query), self._stream())

    def prompt(self, index: int, pieces: Pieces, key: torch.Tensor, value: torch.Tensor
               ) -> tuple[torch.Tensor, torch.Tensor]:
        """key, value: [tokens of the step][kv_heads][head_dim]. All that the pieces attend, until the next call:
        [tokens][kv_heads][head_dim] each."""
        assert self._planes is not None
        for piece in pieces.of_rows:
            keys, values = self._rows_of_prompt(piece.before + piece.count)
            new_k, new_v = (whole(tensor[piece.start:piece.end]) for tensor in (key, value))
            self._planes.prompt(index, piece.row, piece.before, piece.count, rows_of(new_k), rows_of(new_v),
                                keys.data_ptr(), values.data_ptr(), self._stream())
        if pieces.of_rows[0].before == 0:
            return key[pieces.tokens], value[pieces.tokens]
        return keys, values

    def _rows_of_prompt(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert PlanesRows._prompt is not None
        heads, size = self._shape.kv_heads, self._shape.head_dim
        keys, values = (half[:tokens * heads * size].view(tokens, heads, size) for half in PlanesRows._prompt)
        return keys, values

    def _go_on(self, slots: np.ndarray, ends: np.ndarray, before: np.ndarray) -> None:
        """A row goes on where its request ended, or begins with a whole group: rows of others are nowhere."""
        requests = slots >= 0
        mine, there = slots[requests], before[requests]
        lost = (there % BLOCK_TOKENS != 0) & (there != self._ends[mine]) & (ends[requests] != self._ends[mine])
        if lost.any():
            at = int(np.flatnonzero(lost)[0])
            raise RuntimeError(f"a request goes on behind {there[at]} tokens, and its newest rows end at "
                               f"{self._ends[mine[at]]}: sessions whose input streams in are not served under plan "
                               f"{self._plan!r}; take them or the plan away")
        self._ends[mine] = ends[requests]

    def _placed(self, found: list[list[Piece]]) -> list[Pieces]:
        """One copy to the GPU for all."""
        starts: list[int] = []
        for pieces in found:
            starts += [piece.start - pieces[0].start for piece in pieces] + [pieces[-1].end - pieces[0].start]
            if pieces[0].before:
                starts += [0, pieces[0].before + pieces[0].count]
        if not found:
            return []
        there, at, placed = self._there(np.array(starts, np.int32)), 0, []
        for pieces in found:
            q_starts = k_starts = there[at:at + len(pieces) + 1]
            at += len(q_starts)
            if pieces[0].before:
                k_starts = there[at:at + 2]
                at += 2
            placed.append(Pieces(pieces, q_starts, k_starts, max(piece.count for piece in pieces),
                                 max(piece.before + piece.count for piece in pieces)))
        return placed

    def _there(self, values: np.ndarray) -> torch.Tensor:
        here = torch.from_numpy(values)
        return (here.pin_memory() if PIN_MEMORY else here).to(self._device, non_blocking=True)

    def _living(self) -> BlockPlanes:
        """Over the blocks that vLLM has given the layers."""
        cache = self._first.kv_cache
        blocks = cache.data_ptr(), len(cache)
        if self._planes is None or blocks != self._bound:
            self._planes, self._bound = self._bind(len(cache)), blocks
        return self._planes

    def _bind(self, blocks: int) -> BlockPlanes:
        caches = [layer.kv_cache for layer in self._layers.values()]
        strides = {cache.stride(0) * cache.element_size() for cache in caches}
        if len(strides) > 1:
            raise Unsupported("layers of one group have blocks of several strides; take the plan away")
        if self._planes is not None:
            self._planes.close()
        shape = replace(self._shape, block_stride=strides.pop())
        form = form_of(self._plan, shape)
        count = form.workspace_bytes
        if self._workspace is None or self._workspace.numel() < count:
            self._workspace = self._take(count, self._device)
        planes = BlockPlanes(self._plan, shape)
        planes.bind([cache.data_ptr() for cache in caches], self._workspace.zero_().data_ptr())
        if form.lower_token_bytes:
            planes.bind_lower(self._lower_of(blocks, form.lower_token_bytes).addresses())
        return planes

    def _lower_of(self, blocks: int, token_bytes: int) -> LowerPlanes:
        """For so many blocks; memory for another number is given back first."""
        if self._lower is not None and self._lower.blocks != blocks:
            self._lower.release()
            self._lower = None
        if self._lower is None:
            stride = BLOCK_TOKENS * self._shape.kv_heads * token_bytes
            self._lower = LowerPlanes(self._plan, self._shape.layers, blocks, stride)
        return self._lower

    def _stream(self) -> int:
        return torch.cuda.current_stream(self._device).cuda_stream

    @classmethod
    def _take(cls, count: int, device: torch.device) -> torch.Tensor:
        """What was reserved, else new."""
        left = cls._reserved
        if left is None or left.numel() < count:
            return torch.empty(count, dtype=torch.uint8, device=device)
        cls._reserved = left[_aligned(count):]
        return left[:count]

    @classmethod
    def reserve(cls, plan: str, layers: Iterable[PlanesShape], dtype: torch.dtype, config: Any) -> None:
        """Slots of all layers and the rows of a prompt, while vLLM loads the model: they count as the model's memory
        then, and vLLM makes its blocks of what is left. Once an engine. layers: a shape of one layer for each."""
        if cls._engine is config:
            return
        cls._engine, cls._reserved, cls._prompt = config, None, None
        cls._of_process.clear()
        shapes = [limited(replace(shape, layers=count), config) for shape, count in Counter(layers).items()]
        forms = [form_of(plan, shape) for shape in shapes]
        count = sum(_aligned(form.workspace_bytes) for form in forms)
        cls._reserved = torch.empty(count, dtype=torch.uint8, device=_GPU)
        numbers = max(shape.max_tokens * shape.kv_heads * shape.head_dim for shape in shapes)
        cls._prompt = torch.empty(2, numbers, dtype=dtype, device=_GPU)
        _log.info("plan %s: newest rows of %d requests take %d MiB of the GPU, %.1f MiB each (--max-num-seqs); rows of "
                  "a layer for a prompt of %d tokens %d MiB (--max-model-len)", plan, shapes[0].slots, count >> 20,
                  sum(form.slot_bytes for form in forms) / 2**20, shapes[0].max_tokens,
                  cls._prompt.numel() * cls._prompt.element_size() >> 20)


def _aligned(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED


def limited(shape: PlanesShape, config: Any) -> PlanesShape:
    """With the engine's limits."""
    rows = config.scheduler_config.max_num_seqs
    return replace(shape, slots=rows, max_rows=rows, max_tokens=config.model_config.max_model_len)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """[rows][heads][head_dim], a row's heads side by side: itself, or a copy. Rows may have others between them."""
    _, heads, size = tensor.shape
    side_by_side = tensor.stride(2) == 1 and (heads == 1 or tensor.stride(1) == size)
    return tensor if side_by_side else tensor.contiguous()


def rows_of(tensor: torch.Tensor) -> Rows:
    rows, heads, size = tensor.shape
    stride = tensor.stride(0) if rows > 1 else heads * size  # torch has any stride for one row
    return Rows(tensor.data_ptr(), stride * tensor.element_size())
