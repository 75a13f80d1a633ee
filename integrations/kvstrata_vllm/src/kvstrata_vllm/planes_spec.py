# SPDX-License-Identifier: Apache-2.0
"""Blocks of planes, as vLLM's allocator and its scheduler have them.

A block of a layer is bytes to vLLM: so many for each KV head and token. Groups are sealed behind what attends, so a
block can be read from the step on that follows the one that fills it. vLLM would offer it to requests of the same step.
Threads: the scheduler's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, replace_as
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry


@dataclass(frozen=True, kw_only=True)
class PlanesSpec(FullAttentionSpec):
    """Its state_content_bytes are kvs_planes_form's token_bytes; its dtype stands for no element of a block."""


class PlanesManager(FullAttentionManager):
    """Offers blocks as prefixes from the step behind the one that fills them, and whole ones alone: a sealed group has
    no rows that another could go on from."""

    supports_fine_grained_hash_lookup: ClassVar[bool] = False

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._requests: dict[str, Any] = {}  # whose last step's blocks may not be offered yet

    def cache_blocks(self, request: Any, num_tokens: int, *others: Any, **named: Any) -> None:
        """vLLM counts a step's tokens as computed once the step is scheduled."""
        self._requests[request.request_id] = request
        super().cache_blocks(request, min(num_tokens, request.num_computed_tokens), *others, **named)

    def pop_blocks_for_free(self, request_id: str) -> Any:
        """They are free behind a request's last step, and can be offered."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            super().cache_blocks(request, min(request.num_tokens, request.num_computed_tokens), replay_boundaries=())
        return super().pop_blocks_for_free(request_id)


# A registry that is empty fills itself before it is asked, and one with an entry does not.
KVCacheSpecRegistry._ensure_registered()
KVCacheSpecRegistry.register(PlanesSpec, PlanesManager, FullAttentionSpec)


def planes_spec(spec: FullAttentionSpec, token_bytes: int) -> PlanesSpec:
    return replace_as(spec, PlanesSpec, state_content_bytes=token_bytes)
