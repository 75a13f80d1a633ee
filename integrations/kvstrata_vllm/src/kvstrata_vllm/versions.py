# SPDX-License-Identifier: Apache-2.0
"""What is not the same in the versions of vLLM that are served, 0.32 and 0.33, and what is nobody's promise in
either."""

from __future__ import annotations

from typing import Any

SERVED = ("0.32", "0.33")


def context_of(scheduler: Any, request: str) -> Any:
    """The ReqContext of a request that vLLM's offloading scheduler has heard of, with all keys that its tokens have."""
    status = scheduler._req_status[request]
    status.update_offload_keys()
    return status.req_context


def positions_of(context: Any) -> dict[bytes, int]:
    """Blocks of a ReqContext: by key, the token that it ends before."""
    return context._offload_key_positions


def chunk_tokens(scheduler: Any) -> int | None:
    """Tokens per chunk of vLLM's offloading scheduler. None: it looks groups of caches up in several ways."""
    groups = scheduler.config.kv_group_configs
    return groups[0].tokens_per_chunk if len(groups) == 1 else None


def tokens_per_block(config: Any, kv_cache_config: Any) -> int:
    """Tokens per block in the group of caches that has the largest, of those that are offloaded."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids
    from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size
    ranks = config.parallel_config.decode_context_parallel_size
    groups = kv_cache_config.kv_cache_groups
    return max(resolve_dcp_kv_block_size(groups[index].kv_cache_spec, ranks)
               for index in get_offloading_group_ids(kv_cache_config))


def offloading_config(config: Any, kv_cache_config: Any) -> Any:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
    return build_offloading_config(config, kv_cache_config)
