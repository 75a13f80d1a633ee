# SPDX-License-Identifier: Apache-2.0
"""What vLLM 0.26 asks for and 0.32 does not.

0.26 has a backend describe its cache (`get_kv_cache_shape`), and does not ask it for the spec of a layer
(`customize_spec`), by which vLLM counts and allocates: that is brought about here, so that its blocks are next to empty
there too and no memory is paid twice.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .backend import KvstrataBackend


class Backend026(KvstrataBackend):
    """--attention-backend CUSTOM of vLLM 0.26."""

    @staticmethod
    def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int,
                           cache_dtype_str: str = "auto") -> tuple[int, ...]:
        return num_blocks, block_size, 2 * num_kv_heads * head_size  # of the emptied spec

    @staticmethod
    def emptied(spec: Any) -> Any:
        """Two elements a token are the least that its specs can say."""
        return replace(spec, num_kv_heads=1, head_size=1, head_size_v=1)


def ask_backends() -> None:
    """Layers' specs go through their backend's `customize_spec`; of other backends as they are."""
    from vllm.model_executor.layers.attention import Attention
    spec_of = Attention.get_kv_cache_spec

    def asked(layer: Any, vllm_config: Any) -> Any:
        spec, backend = spec_of(layer, vllm_config), layer.get_attn_backend()
        return backend.customize_spec(spec) if issubclass(backend, KvstrataBackend) else spec

    Attention.get_kv_cache_spec = asked
