# SPDX-License-Identifier: Apache-2.0
"""In place of SGLang's radix cache: what the daemon holds of a prompt, and when a request's sequence ends.

It has no tree. A prompt that is held looks to SGLang like one that lies in host memory: `match_prefix` says how much,
`init_load_back` opens the sequence and takes slots, in which nothing is put. Slots are the request's own, as those of
tokens that it computes. Threads: the scheduler's.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import (BasePrefixCache, CacheRequestHandle, DecLockRefParams,
                                                    DecLockRefResult, EvictParams, EvictResult, IncLockRefResult,
                                                    InitLoadBackParams, MatchPrefixParams, MatchResult)

from .sequences import served

_ROOT = 0  # the only node


class KvstrataCache(BasePrefixCache):
    """--radix-cache-backend kvstrata."""

    disable = False
    root_node = _ROOT

    def __init__(self, params: Any) -> None:
        """Unsupported: --attention-backend is another."""
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator
        self.page_size = params.page_size
        self._sequences = served()
        self._slots: dict[str, torch.Tensor] = {}  # held tokens', between admission and allocation

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        held = 0
        if params.req is not None:
            held = self._sequences.held(params.req, params.key.token_ids, len(params.key))
            held = held // self.page_size * self.page_size
        return MatchResult(0, _ROOT, _ROOT, _ROOT, host_hit_length=held)

    def init_load_back(self, params: InitLoadBackParams) -> tuple[int, Any] | None:
        """All that match_prefix said, or 0: then it is computed. None: ask again, the daemon reads from disk."""
        assert params.req is not None
        opened = self._sequences.open(params.req, params.host_hit_length)
        if opened is None:
            return None
        slots = self.token_to_kv_pool_allocator.alloc(params.host_hit_length) if opened else None
        if slots is None:
            self._sequences.drop(params.req)
            return 0, _ROOT
        self._slots[params.req.rid] = slots
        return params.host_hit_length, _ROOT

    def load_back_is_cache_owned(self) -> bool:
        return False

    def prefix_device_indices(self, req: Any) -> torch.Tensor:
        return self._slots.pop(req.rid)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        """Finished, aborted or retracted."""
        self._sequences.close(req.rid)

    def release_aborted_request(self, handle: CacheRequestHandle) -> None:
        self._sequences.close(handle.rid)

    def reset(self) -> None:
        """Called by flush_cache, which follows an update of weights."""
        self._sequences.forget_prompts()

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """Steps have committed it."""

    def evict(self, params: EvictParams) -> EvictResult:
        return EvictResult()

    def inc_lock_ref(self, node: Any) -> IncLockRefResult:
        return IncLockRefResult()

    def dec_lock_ref(self, node: Any, params: DecLockRefParams | None = None) -> DecLockRefResult:
        return DecLockRefResult()

    def supports_prefix_sharing(self) -> bool:
        return False  # nothing of SGLang's pool is shared, or can be evicted

    def pretty_print(self) -> None:
        """For SGLang's messages when its pool is full."""
