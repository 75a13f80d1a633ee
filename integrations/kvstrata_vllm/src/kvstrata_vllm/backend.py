# SPDX-License-Identifier: Apache-2.0
"""The attention backend: rows of a batch, layer by layer, to the worker's half. vLLM's own cache stays empty."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import (AttentionBackend, AttentionImpl, AttentionMetadataBuilder, AttentionType,
                                       CommonAttentionMetadata, MultipleOf)

from .block_count import BlockCount
from .owned_connector import worker
from .geometry import HEAD_DIMS, Unsupported
from .worker import Rows

_blocks = BlockCount()


class KvstrataBackend(AttentionBackend):
    """--attention-backend CUSTOM."""

    forward_includes_kv_cache_update = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # vLLM looks it up in its enumeration

    @staticmethod
    def get_impl_cls() -> type[KvstrataAttention]:
        return KvstrataAttention

    @staticmethod
    def get_builder_cls() -> type[MetadataBuilder]:
        return MetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(HEAD_DIMS)

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return True

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """vLLM counts tokens by its blocks, so it must have them."""
        emptied = cls.emptied(spec)
        _blocks.tell(emptied)
        return emptied

    @staticmethod
    def emptied(spec: Any) -> Any:
        """Its contents shrink to one element a token."""
        return replace(spec, num_head_slots=1, state_content_bytes=spec.dtype.itemsize)


@dataclass
class Metadata:
    """tokens: of the batch, without padding."""

    tokens: int
    rows: Rows


class MetadataBuilder(AttentionMetadataBuilder[Metadata]):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._block_tokens = kv_cache_spec.block_size

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
              ) -> Metadata:
        common = common_attn_metadata
        starts = common.query_start_loc_cpu[:common.num_reqs + 1].tolist()
        last = common.slot_mapping[common.query_start_loc[1:common.num_reqs + 1].long() - 1]
        return Metadata(common.num_actual_tokens, Rows(starts, (last // self._block_tokens).tolist()))


class KvstrataAttention(AttentionImpl[Metadata]):
    """A layer's attention. index: which of the model's layers it is; set by the connector."""

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
                 alibi_slopes: list[float] | None = None, sliding_window: int | None = None,
                 kv_cache_dtype: str = "auto", logits_soft_cap: float | None = None,
                 attn_type: str = AttentionType.DECODER, kv_sharing_target_layer_name: str | None = None,
                 sinks: torch.Tensor | None = None, **others: Any) -> None:
        for name, value in (("alibi_slopes", alibi_slopes), ("sliding_window", sliding_window),
                            ("logits_soft_cap", logits_soft_cap), ("sinks", sinks),
                            ("kv_sharing_target_layer_name", kv_sharing_target_layer_name),
                            *others.items()):
            if value is not None and value is not False and value != 0:
                raise Unsupported(f"an attention layer has {name}: {value}; take --attention-backend CUSTOM and "
                                  "--kv-transfer-config away for this model, or start with KVSTRATA_DISABLE=1")
        if attn_type != AttentionType.DECODER or head_size not in HEAD_DIMS:
            raise Unsupported(f"an attention layer is {attn_type} with head_size {head_size}; served are decoders with "
                              f"{HEAD_DIMS}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads or num_heads, kv_cache_dtype
        self.index = -1
        _blocks.loading(get_current_vllm_config())

    def forward(self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
                attn_metadata: Metadata | None, output: torch.Tensor, output_scale: torch.Tensor | None = None,
                output_block_scale: torch.Tensor | None = None) -> torch.Tensor:
        """query, output [tokens and padding][num_heads][head_size]; key, value with num_kv_heads. vLLM has no
        metadata when it measures memory."""
        if attn_metadata is None:
            return output.zero_()
        n = attn_metadata.tokens
        out = output.view(-1, self.num_heads, self.head_size)[:n]
        worker().attend(self.index, attn_metadata.rows, query[:n], key[:n], value[:n], out, self.scale)
        return output
