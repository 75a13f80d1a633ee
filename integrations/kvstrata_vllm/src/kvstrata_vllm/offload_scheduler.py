# SPDX-License-Identifier: Apache-2.0
"""The scheduler's half of offload: which requests load what, and which blocks are to be saved. Threads: the
scheduler's."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from .geometry import Options
from .lookups import Lookups

_log = logging.getLogger("vllm.kvstrata")


@dataclass
class Load:
    """Blocks for positions [first, end). ids: of the tokens from 0 on, one more than are loaded: a prompt is never held
    in whole."""

    request: str
    ids: list[int]
    first: int
    end: int
    blocks: list[int]


@dataclass
class Save:
    """Blocks of positions from `first` on that are full when the step is over, and the ids of their tokens. prompt: all
    ids so far, with a request's first blocks."""

    request: str
    first: int
    blocks: list[int]
    ids: list[int]
    prompt: list[int] | None


@dataclass
class Transfers(KVConnectorMetadata):
    """Of a step. preempted: their blocks are others' from now on. reset: the last one's name (epochs.py)."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    reset: str = ""


@dataclass
class Tracked:
    """A request between on_new_request and its end. local: tokens that vLLM's own cache had; saved: blocks that were
    ordered to be saved, since it was preempted `preemptions` times."""

    request: Any
    blocks: list[int] = field(default_factory=list)
    local: int = 0
    saved: int = 0
    preemptions: int = 0
    load_failed: bool = False


class OffloadScheduler:
    def __init__(self, options: Options, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self.lookups = Lookups(options)
        self._loads: list[Load] = []
        self._tracked: dict[str, Tracked] = {}

    def add(self, request: Any) -> None:
        """One with a cache salt is nobody else's: it is not looked up, nor saved."""
        if request.cache_salt is None:
            self._tracked[request.request_id] = Tracked(request)

    def loadable(self, request: Any, local: int) -> int | None:
        """Tokens of whole blocks behind the `local` ones, at most all but the last one; None: ask again."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.load_failed:
            return 0
        tracked.local = local
        if self._whole(request.num_tokens - 1) <= local:
            return 0
        held = self.lookups.held(request)
        return None if held is None else max(0, self._whole(min(held, request.num_tokens - 1)) - local)

    def _whole(self, tokens: int) -> int:
        return tokens // self._block_tokens * self._block_tokens

    def admit(self, request: str, blocks: list[int], tokens: int) -> None:
        """vLLM has blocks for a request, of which `tokens` are to be loaded. blocks: all of the request."""
        self.lookups.forget(request)
        if tokens == 0:
            return
        tracked = self._tracked[request]
        end = tracked.local + tokens
        part = slice(tracked.local // self._block_tokens, end // self._block_tokens)
        self._loads.append(Load(request, list(tracked.request.all_token_ids[:end + 1]), tracked.local, end,
                                blocks[part]))

    def failed(self, requests: Iterable[str]) -> None:
        """They are computed; asked again the daemon might promise the same."""
        for request in requests:
            if tracked := self._tracked.get(request):  # else it has ended meanwhile
                tracked.load_failed = True

    def finish(self, request: str) -> bool:
        """Whether its blocks are to be kept until they are saved. Those of a preempted one are others' already."""
        self.lookups.forget(request)
        tracked = self._tracked.pop(request, None)
        return tracked is not None and tracked.saved > 0 and tracked.preemptions == tracked.request.num_preemptions

    def reset(self, used_blocks: int) -> bool:
        """Begins an epoch (epochs.py); whether it has. used_blocks: of vLLM's cache, by requests that run, load or are
        being saved: what they have would come into the new epoch, and vLLM has not reset its own cache either."""
        if used_blocks > 0:
            _log.error("nothing is reset: %d blocks are in use by requests that run, load or are being saved; reset "
                       "again when they have ended, and a step has run", used_blocks)
            return False
        self.lookups.reset()
        return True

    def step(self, output: Any) -> Transfers:
        """Of vLLM's SchedulerOutput."""
        self.lookups.next_step()
        transfers = Transfers(loads=self._loads, preempted=list(output.preempted_req_ids or ()),
                              reset=self.lookups.epoch.reset)
        self._loads = []
        for new in output.scheduled_new_reqs:
            self._begin(new.req_id)
            self._save(transfers, new.req_id, list(new.block_ids[0]), new.num_computed_tokens, output)
        cached = output.scheduled_cached_reqs
        for request, blocks, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens):
            if request in cached.resumed_req_ids:
                self._begin(request)
            self._save(transfers, request, list(blocks[0]) if blocks else [], computed, output)
        return transfers

    def _begin(self, name: str) -> None:
        if tracked := self._tracked.get(name):
            tracked.blocks, tracked.saved, tracked.preemptions = [], 0, tracked.request.num_preemptions

    def _save(self, transfers: Transfers, name: str, blocks: list[int], computed: int, output: Any) -> None:
        """Not before the prompt is whole: what saving costs is not to be paid before the first token."""
        tracked = self._tracked.get(name)
        if tracked is None:
            return
        tracked.blocks += blocks
        end = computed + output.num_scheduled_tokens[name]
        ids = tracked.request.all_token_ids
        first, full = tracked.saved, end // self._block_tokens
        if end < tracked.request.num_prompt_tokens or full == first:
            return
        transfers.saves.append(Save(name, first * self._block_tokens, tracked.blocks[first:full],
                                    list(ids[first * self._block_tokens:full * self._block_tokens]),
                                    list(ids[:end]) if first == 0 else None))
        tracked.saved = full
