# SPDX-License-Identifier: Apache-2.0
"""A group of layers that decodes by a plan: what of vLLM's batch libkvstrata is told each step, and where it works.

Threads: the worker's.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from kvstrata.block_attention import BlockAttention, BlockShape
from kvstrata.chunks import LayerRecall
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.attention.backend import CommonAttentionMetadata

from .block_audit import BlockAudit
from .unsupported import Unsupported

_log = logging.getLogger("vllm.kvstrata")

# Bytes in which a step may choose; they grow with the sequences that it decodes at once.
_MOST_WORKSPACE = 1 << 30


class BlockRows:
    """layers: vLLM's, by name, all of `shape`'s geometry; their `impl.index` becomes their place here. The strides and
    limits of `shape` are found out."""

    # The process's, by the layers' names. vLLM makes its blocks twice, the first time to measure what graphs take.
    _of_process: ClassVar[dict[tuple[str, ...], BlockRows]] = {}
    _reserved: ClassVar[torch.Tensor | None] = None

    def __init__(self, plan: str, shape: BlockShape, layers: Mapping[str, Any], config: Any, device: torch.device
                 ) -> None:
        self._plan, self._layers, self._device = plan, layers, device
        self._shape = limited(plan, replace(shape, scale=float(next(iter(layers.values())).impl.scale)), config)
        for index, layer in enumerate(layers.values()):
            layer.impl.index = index
        self._attention: BlockAttention | None = None
        self._audit: BlockAudit | None = None
        self._workspace: torch.Tensor | None = None
        self._steps: Any = None  # the stream of the last step
        self._first, self._bound = next(iter(layers.values())), 0
        before = self._of_process.get(tuple(layers))
        if before is not None:
            self._workspace, before._workspace = before._workspace, None
        self._of_process[tuple(layers)] = self

    def begin(self, common: CommonAttentionMetadata, decodes: int) -> int:
        """A step, before its graph. How many of the rows in front attend by the plan: `decodes`, or none where there are
        more of them than choose at once."""
        attention, audit = self._living()
        self._steps = torch.cuda.current_stream(self._device)
        audit.measure(self._steps)
        table, plans = common.block_table_tensor, decodes if decodes <= self._shape.max_decodes else 0
        attention.begin(blocks=table.data_ptr(), blocks_of_row=table.stride(0), tokens=common.seq_lens.data_ptr(),
                        query_starts=common.query_start_loc.data_ptr(), in_full=self._in_full(common, decodes),
                        rows=common.num_reqs, new_tokens=self._new_tokens(common), stream=self._stream(),
                        sampled=audit.sample(common, plans))
        return plans

    def attend(self, index: int, query: torch.Tensor, output: torch.Tensor, rows: int) -> None:
        """query, output: [rows][heads][head_size]. Queries may lie in rows with keys and values; what has other strides is
        copied. Captured or not."""
        assert self._attention is not None
        _, heads, size = query.shape
        if query.stride(2) != 1 or (heads > 1 and query.stride(1) != size):
            query = query.contiguous()
        stride = query.stride(0) if rows > 1 else heads * size  # torch has any stride for one row
        self._attention.attend(index, query.data_ptr(), stride * query.element_size(), output.data_ptr(), rows,
                               self._stream())

    @classmethod
    def filled(cls, blocks: torch.Tensor) -> None:
        """Blocks that a connector has filled: ids, int32 on the host, of all groups of layers. Between steps."""
        for rows in cls._of_process.values():
            attention, audit = rows._living()
            with torch.cuda.stream(rows._steps):
                audit.measure(rows._steps)
                there = blocks.to(rows._device)
                attention.index(there.data_ptr(), len(there), rows._stream())

    @classmethod
    def losses(cls) -> list[LayerRecall]:
        """What plans have lost by layer, since the last call."""
        audits = [rows._audit for rows in cls._of_process.values()]
        return [loss for audit in audits if audit is not None for loss in audit.losses()]

    def _new_tokens(self, common: CommonAttentionMetadata) -> int:
        """How many a row has at most; 0 where none completes a unit, as far as the host knows."""
        assert self._attention is not None
        unit, upper = self._attention.unit_tokens, common.seq_lens_cpu_upper_bound
        if unit == 0:
            return 0
        if upper is not None:
            starts = common.query_start_loc_cpu[:common.num_reqs + 1].numpy()
            ends, new = upper[:common.num_reqs].numpy(), starts[1:] - starts[:-1]
            if not (ends // unit > (ends - new) // unit).any():
                return 0
        return common.max_query_len

    def _in_full(self, common: CommonAttentionMetadata, decodes: int) -> int | None:
        self._flags = last_of_prompts(common, decodes, self._device)
        return None if self._flags is None else self._flags.data_ptr()

    def _living(self) -> tuple[BlockAttention, BlockAudit]:
        """Over the blocks that vLLM has given the layers."""
        if self._attention is None or self._audit is None or self._first.kv_cache.data_ptr() != self._bound:
            self._attention = self._bind()
            numbers = [extract_layer_index(name) for name in self._layers]
            self._audit = BlockAudit(self._attention, self._plan, self._shape, numbers)
        return self._attention, self._audit

    def _bind(self) -> BlockAttention:
        caches = [layer.kv_cache for layer in self._layers.values()]
        block, head, slot = self._strides(caches[0])
        if any(self._strides(cache) != self._strides(caches[0]) for cache in caches):
            raise Unsupported("layers of one group have blocks of several strides; take --attention-backend CUSTOM away")
        element = caches[0].element_size()
        rows_bytes = self._shape.kv_heads * self._shape.block_tokens * 2 * self._shape.head_dim * element
        shape = replace(self._shape, block_stride=block, head_stride=head, slot_stride=slot,
                        value_offset=self._shape.head_dim * element, index_offset=rows_bytes)
        if self._attention is not None:
            self._attention.close()
        attention = BlockAttention(self._plan, shape)
        self._workspace = self._room(attention.workspace_bytes)
        attention.bind([cache.data_ptr() for cache in caches], self._workspace.data_ptr())
        self._bound = caches[0].data_ptr()
        return attention

    @staticmethod
    def _strides(cache: torch.Tensor) -> tuple[int, int, int]:
        """Bytes from a block, a head, a slot to the next of a tensor [blocks][heads][slots][2 * head_dim]."""
        block, head, slot, channel = (stride * cache.element_size() for stride in cache.stride())
        assert channel == cache.element_size()
        return block, head, slot

    def _room(self, count: int) -> torch.Tensor:
        """Zeroed: what this group had, else what was reserved, else new."""
        had = self._workspace
        if had is None:
            had, BlockRows._reserved = BlockRows._reserved, None
        if had is not None and had.numel() >= count:
            return had.zero_()
        return torch.zeros(count, dtype=torch.uint8, device=self._device)

    def _stream(self) -> int:
        return torch.cuda.current_stream(self._device).cuda_stream

    @classmethod
    def reserve(cls, plan: str, shape: BlockShape, config: Any) -> None:
        """The workspace, while vLLM loads the model: it counts as the model's memory then, and vLLM makes its blocks of
        what is left. Once a process."""
        if cls._reserved is None and not cls._of_process:
            shape = limited(plan, shape, config)
            count = workspace_of(plan, shape)
            cls._reserved = torch.zeros(count, dtype=torch.uint8, device="cuda")
            _log.info("plan %s: up to %d of %d sequences of a step attend by it, in %d MiB of the GPU", plan,
                      shape.max_decodes, shape.max_rows, count >> 20)


def last_of_prompts(common: CommonAttentionMetadata, decodes: int, device: torch.device) -> torch.Tensor | None:
    """uint8 [rows] on the device: rows in front whose token is a prompt's last. They attend all, as prompts do. None:
    there is none."""
    prompts = common.is_prefilling
    if prompts is None or not decodes or not bool(prompts[:decodes].any()):
        return None
    # vLLM's has no entries for rows that pad a graph.
    flags = torch.zeros(common.num_reqs, dtype=torch.uint8, pin_memory=PIN_MEMORY)
    flags[:len(prompts)] = prompts[:common.num_reqs]
    return flags.to(device, non_blocking=True)


def limited(plan: str, shape: BlockShape, config: Any) -> BlockShape:
    """With the engine's limits; of a step so many sequences attend by the plan as have room to choose in."""
    rows = config.scheduler_config.max_num_seqs
    shape = replace(shape, max_rows=rows, max_decodes=rows, max_tokens=config.model_config.max_model_len)
    while shape.max_decodes > 1 and workspace_of(plan, shape) > _MOST_WORKSPACE:
        shape = replace(shape, max_decodes=shape.max_decodes // 2)
    return shape


def workspace_of(plan: str, shape: BlockShape) -> int:
    """Bytes; strides do not count."""
    attention = BlockAttention(plan, replace(shape, block_stride=16, head_stride=16, slot_stride=16, value_offset=16,
                                             index_offset=16))
    attention.close()
    return attention.workspace_bytes
