# SPDX-License-Identifier: Apache-2.0
"""--attention-backend CUSTOM under plan `strata`: vLLM's blocks hold 8 bits a number, cut into planes.

    vllm serve MODEL --attention-backend CUSTOM --additional-config '{"kvstrata": {"plan": "strata"}}'

Rows of one token go to libkvstrata's ops, in vLLM's full graphs. Prompts attend with FlashAttention: a piece behind
other tokens over rows that one layer has widened for it. Layers with sliding windows keep FlashAttention's blocks.
Threads: the worker's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from kvstrata.block_planes import PlanesShape
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadata, AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.fa_utils import is_flash_attn_varlen_func_available
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl, FlashAttentionMetadataBuilder
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from .attention import DTYPES, KvstrataImpl, why_unserved
from .plan_choice import PLANES_HEAD_DIMS, plan_of, refuse
from .planes_rows import Pieces, PlanesRows
from .planes_spec import PlanesSpec
from .unsupported import Unsupported

if is_flash_attn_varlen_func_available():
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func


@dataclass
class PlanesMetadata(AttentionMetadata):
    """decodes: rows in front, of one token each; prompts: those behind them; rows: where they are attended."""

    num_actual_tokens: int
    decodes: int
    prompts: list[Pieces]
    rows: PlanesRows


class PlanesBuilder(FlashAttentionMetadataBuilder):
    """FlashAttention's for layers whose blocks are FlashAttention's."""

    supports_update_block_table = False

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.rows: PlanesRows | None = None
        if isinstance(kv_cache_spec, PlanesSpec):
            self._init_reorder_batch_threshold(1)
            layers = vllm_config.compilation_config.static_forward_context
            shape = PlanesShape(len(layer_names), self.num_heads_q, kv_cache_spec.num_kv_heads,
                                kv_cache_spec.head_size, DTYPES[vllm_config.model_config.dtype])
            self.rows = PlanesRows(plan_of(vllm_config), shape, {name: layers[name] for name in layer_names},
                                   vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
              ) -> Any:
        if self.rows is None:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        decodes, *_ = split_decodes_and_prefills(common_attn_metadata, 1)
        prompts = self.rows.begin(common_attn_metadata, decodes)
        return PlanesMetadata(common_attn_metadata.num_actual_tokens, decodes, prompts, self.rows)


class PlanesImpl(FlashAttentionImpl):
    """A layer's attention. index: among the layers whose blocks are planes, -1: its blocks are FlashAttention's."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._config = config = get_current_vllm_config()
        refuse(config)
        KvstrataImpl.plan = plan_of(config)
        self.index = -1
        windows, why = self.sliding_window != (-1, -1), why_unserved(self, PLANES_HEAD_DIMS)
        if windows and config.scheduler_config.disable_hybrid_kv_cache_manager:
            why = "it has a sliding window, and vLLM's hybrid manager is off: blocks of all layers would be alike"
        elif windows or self.attn_type != AttentionType.DECODER:
            why = None  # it has blocks of its own, or none
        if why is not None:
            raise Unsupported(f"a layer of the model is not for plan {plan_of(config)!r}: {why}; take the plan away")
        self._served = not windows and self.attn_type == AttentionType.DECODER

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """All layers are there: memory for all of them is taken."""
        super().process_weights_after_loading(act_dtype)
        layers = self._config.compilation_config.static_forward_context.values()
        served = [layer.impl for layer in layers if isinstance(getattr(layer, "impl", None), PlanesImpl)
                  and layer.impl._served]
        dtype = self._config.model_config.dtype
        if served and dtype in DTYPES:
            shapes = [PlanesShape(1, impl.num_heads, impl.num_kv_heads, impl.head_size, DTYPES[dtype])
                      for impl in served]
            PlanesRows.reserve(plan_of(self._config), shapes, dtype, self._config)

    def do_kv_cache_update(self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
                           slot_mapping: torch.Tensor) -> None:
        """Blocks of planes take whole groups, by forward()."""
        if self.index < 0:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)

    def forward(self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
                attn_metadata: Any, output: torch.Tensor, output_scale: torch.Tensor | None = None,
                output_block_scale: torch.Tensor | None = None) -> torch.Tensor:
        """query, output [tokens and padding][num_heads][head_size]; key, value with num_kv_heads."""
        if not isinstance(attn_metadata, PlanesMetadata):
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, output_scale,
                                   output_block_scale)
        decodes, rows = attn_metadata.decodes, attn_metadata.rows
        if decodes:
            rows.decode(self.index, query[:decodes], key[:decodes], value[:decodes], output[:decodes])
        for pieces in attn_metadata.prompts:
            self._attend(pieces, query, *rows.prompt(self.index, pieces, key, value), output)
        return output

    def _attend(self, pieces: Pieces, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
                output: torch.Tensor) -> None:
        flash_attn_varlen_func(q=query[pieces.tokens], k=keys, v=values, out=output[pieces.tokens],
                               cu_seqlens_q=pieces.q_starts, max_seqlen_q=pieces.longest_q,
                               cu_seqlens_k=pieces.k_starts, max_seqlen_k=pieces.longest_k, softmax_scale=self.scale,
                               causal=True, fa_version=self.vllm_flash_attn_version,
                               num_splits=int(self.batch_invariant_enabled))
