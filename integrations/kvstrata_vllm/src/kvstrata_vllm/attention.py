# SPDX-License-Identifier: Apache-2.0
"""--attention-backend CUSTOM: vLLM's FlashAttention, but that decode steps attend by a plan over vLLM's own blocks.

    vllm serve MODEL --attention-backend CUSTOM --additional-config '{"kvstrata": {"plan": "quest{budget = 2048}"}}'

Rows of one token go to libkvstrata's ops, in vLLM's full graphs; prompts, mixed with them or not, to FlashAttention, as
does all of a layer that a plan does not serve (sliding windows, sinks, softcap, ALiBi). Blocks have a plan's index behind
their rows, so a block's memory is a little more, and vLLM counts it. Nothing waits for the GPU, and a replay runs no
Python. Under plan `strata` blocks have a form of their own (planes_attention.py). Threads: the worker's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from kvstrata.block_attention import BlockShape, index_bytes
from kvstrata.block_planes import BLOCK_TOKENS, PlanesShape, form_of
from vllm.config import get_current_vllm_config, get_current_vllm_config_or_none
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, CommonAttentionMetadata, MultipleOf
from vllm.v1.attention.backends.flash_attn import (FlashAttentionBackend, FlashAttentionImpl, FlashAttentionMetadata,
                                                   FlashAttentionMetadataBuilder)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout

from .block_rows import BlockRows
from .plan_choice import FULL, PLANES_HEAD_DIMS, of_planes, plan_of, refuse

DTYPES = {torch.float16: "f16", torch.bfloat16: "bf16"}
HEAD_DIMS = (64, 128, 256)
GROUP = 8  # query heads of a KV head, at most
# Those in which a block of a layer is one run of bytes, as it has to be under strata.
_WHOLE_BLOCKS = (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC, KVCacheLayout.BLHNC, KVCacheLayout.BLNHC)


def _plan() -> str:
    config = get_current_vllm_config_or_none()
    return KvstrataImpl.plan if config is None else plan_of(config)


class KvstrataBackend(FlashAttentionBackend):
    """Under plan `full` it is FlashAttention and nothing else."""

    supports_kv_cache_update_bypass = False  # vLLM 0.33: no model writes to blocks whose form it does not know

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # vLLM looks it up in its enumeration

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        if of_planes(_plan()):
            from .planes_attention import PlanesImpl
            return PlanesImpl
        return KvstrataImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        if of_planes(_plan()):
            from .planes_attention import PlanesBuilder
            return PlanesBuilder
        return KvstrataBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...] | None:
        return _WHOLE_BLOCKS if of_planes(_plan()) else super().supported_kv_cache_layouts()

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """A block is of whole units of the plan's index."""
        size, plan = super().get_preferred_block_size(default_block_size), _plan()
        unit = BLOCK_TOKENS if of_planes(plan) else KvstrataImpl.unit_of(plan)
        return -(-size // unit) * unit

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        plan = _plan()
        if of_planes(plan):
            from .planes_spec import PlanesSpec  # a block is one group
            return ([BLOCK_TOKENS] if kv_cache_spec is None or isinstance(kv_cache_spec, PlanesSpec) else
                    super().get_supported_kernel_block_sizes(kv_cache_spec))
        unit = KvstrataImpl.unit_of(plan)
        return super().get_supported_kernel_block_sizes(kv_cache_spec) if unit <= 16 else [MultipleOf(unit)]

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Room for the index behind the rows of each block of a layer that is served; or a form of its own."""
        plan = _plan()
        if plan == FULL or not cls.serves(spec):
            return spec
        if of_planes(plan):
            return cls._of_planes(plan, spec)
        more = index_bytes(plan, cls.shape_of(spec, layers=1, query_heads=spec.num_kv_heads))
        return replace(spec, page_size_padded=spec.unpadded_page_size_bytes + more) if more else spec

    @staticmethod
    def _of_planes(plan: str, spec: Any) -> Any:
        if spec.non_causal or spec.head_size not in PLANES_HEAD_DIMS:
            return spec
        from .planes_spec import planes_spec
        shape = PlanesShape(1, spec.num_kv_heads, spec.num_kv_heads, spec.head_size, DTYPES[spec.dtype])
        return planes_spec(spec, form_of(plan, shape).token_bytes)

    @staticmethod
    def serves(spec: Any) -> bool:
        return (type(spec) is FullAttentionSpec and spec.sliding_window is None and spec.attention_chunk_size is None
                and spec.dtype in DTYPES and spec.head_size in HEAD_DIMS and spec.head_size_v == spec.head_size)

    @staticmethod
    def shape_of(spec: Any, layers: int, query_heads: int) -> BlockShape:
        return BlockShape(layers=layers, query_heads=query_heads, kv_heads=spec.num_kv_heads, head_dim=spec.head_size,
                          dtype=DTYPES[spec.dtype], block_tokens=spec.block_size)


@dataclass
class KvstrataMetadata(FlashAttentionMetadata):
    """FlashAttention's of the whole batch, for layers that are not served. decodes: rows in front that attend by the
    plan, of one token each; rest: FlashAttention's of those behind them, if any. rows: None where none does."""

    decodes: int = 0
    rest: FlashAttentionMetadata | None = None
    rows: BlockRows | None = None


class KvstrataBuilder(FlashAttentionMetadataBuilder):
    supports_update_block_table = False

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        if plan_of(vllm_config) == FULL:
            return super().get_cudagraph_support(vllm_config, kv_cache_spec)
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.rows: BlockRows | None = None
        plan = plan_of(vllm_config)
        if plan == FULL or not KvstrataBackend.serves(kv_cache_spec):
            return
        layers = vllm_config.compilation_config.static_forward_context
        served = [name for name in layer_names if layers[name].impl.unserved is None]
        if served:
            self._init_reorder_batch_threshold(1)
            shape = KvstrataBackend.shape_of(kv_cache_spec, len(served), self.num_heads_q)
            self.rows = BlockRows(plan, shape, {name: layers[name] for name in served}, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
              ) -> FlashAttentionMetadata:
        common = common_attn_metadata
        if self.rows is None:
            return super().build(common_prefix_len, common, fast_build)
        decodes, prefills, tokens, _ = split_decodes_and_prefills(common, 1)
        decodes = self.rows.begin(common, decodes)
        # FlashAttention's schedule is for what it attends, which is nothing of a batch that decodes.
        alone = decodes > 0 and prefills == 0
        whole = super().build(common_prefix_len, common, fast_build or decodes > 0)
        rest = None if not decodes or alone else super().build(0, behind(common, decodes), fast_build)
        return KvstrataMetadata(**{field.name: getattr(whole, field.name) for field in fields(whole)}, decodes=decodes,
                                rest=rest, rows=self.rows if decodes else None)


def behind(common: CommonAttentionMetadata, rows: int) -> CommonAttentionMetadata:
    """The same batch without its first rows, of one token each."""
    def after(of: Any) -> Any:
        return None if of is None else of[rows:]

    return replace(common, query_start_loc=common.query_start_loc[rows:] - rows,
                   query_start_loc_cpu=common.query_start_loc_cpu[rows:] - rows, seq_lens=common.seq_lens[rows:],
                   num_reqs=common.num_reqs - rows, num_actual_tokens=common.num_actual_tokens - rows,
                   block_table_tensor=common.block_table_tensor[rows:], slot_mapping=common.slot_mapping[rows:],
                   causal=after(common.causal) if isinstance(common.causal, torch.Tensor) else common.causal,
                   positions=after(common.positions), is_prefilling=after(common.is_prefilling),
                   seq_lens_cpu_upper_bound=after(common.seq_lens_cpu_upper_bound), req_idx=after(common.req_idx),
                   _num_computed_tokens_cache=None, _token_to_req_indices_cache=None)


class KvstrataImpl(FlashAttentionImpl):
    """A layer's attention. unserved: why the plan is not for it, None where it is."""

    plan: ClassVar[str] = FULL  # the plan of this process's engine
    _units: ClassVar[dict[str, int]] = {}

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        config = get_current_vllm_config()
        refuse(config)
        self.unserved, self.index = why_unserved(self, HEAD_DIMS), -1  # index: among the layers that its builder serves
        KvstrataImpl.plan = plan = plan_of(config)
        dtype = DTYPES.get(config.model_config.dtype)
        if plan != FULL and self.unserved is None and dtype is not None:
            BlockRows.reserve(plan, BlockShape(layers=1, query_heads=self.num_heads, kv_heads=self.num_kv_heads,
                                               head_dim=self.head_size, dtype=dtype, block_tokens=self.unit_of(plan)),
                              config)

    @classmethod
    def unit_of(cls, plan: str) -> int:
        """Tokens that must lie in one block: the least of 16 to 128 that the plan's index takes."""
        if plan not in cls._units:
            cls._units[plan] = next((size for size in (16, 32, 64) if _fits(plan, size)), 128)
        return cls._units[plan]

    def forward(self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
                attn_metadata: FlashAttentionMetadata, output: torch.Tensor, output_scale: torch.Tensor | None = None,
                output_block_scale: torch.Tensor | None = None) -> torch.Tensor:
        """query, output [tokens and padding][num_heads][head_size]; key, value with num_kv_heads."""
        rows = getattr(attn_metadata, "rows", None)
        if rows is None or self.index < 0 or output_scale is not None or output_block_scale is not None:
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, output_scale,
                                   output_block_scale)
        decodes: int = attn_metadata.decodes
        rows.attend(self.index, query[:decodes], output[:decodes], decodes)
        if attn_metadata.rest is not None:
            super().forward(layer, query[decodes:], key[decodes:], value[decodes:], kv_cache, attn_metadata.rest,
                            output[decodes:])
        return output


def why_unserved(impl: FlashAttentionImpl, head_dims: Sequence[int]) -> str | None:
    """Why a layer does not decode by a plan that has ops for heads of these sizes; None: it does."""
    if impl.attn_type != AttentionType.DECODER:
        return f"it is {impl.attn_type}"
    if impl.head_size not in head_dims or impl.num_heads > GROUP * impl.num_kv_heads:
        return f"it has {impl.num_heads} heads of {impl.head_size} on {impl.num_kv_heads}"
    own = (("alibi_slopes", impl.alibi_slopes is not None), ("a sliding window", impl.sliding_window != (-1, -1)),
           ("logits_soft_cap", bool(impl.logits_soft_cap)), ("sinks", impl.sinks is not None),
           ("another layer's keys", impl.kv_sharing_target_layer_name is not None))
    return next((f"it has {name}" for name, there in own if there), None)


def _fits(plan: str, block_tokens: int) -> bool:
    from kvstrata import InvalidArgument
    shape = BlockShape(layers=1, query_heads=1, kv_heads=1, head_dim=64, dtype="bf16", block_tokens=block_tokens)
    try:
        index_bytes(plan, shape)
    except InvalidArgument as error:
        if error.reason == "BLOCK_TOKENS":
            return False
        raise
    return True
