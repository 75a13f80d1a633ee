# SPDX-License-Identifier: Apache-2.0
"""The scheduler's half: what the daemon holds of a prompt, and which requests the next step has. Threads: the
scheduler's."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from .geometry import Geometry, Options
from .lookups import Lookups

_log = logging.getLogger("vllm.kvstrata")


@dataclass
class Scheduled:
    """A request in a step: ids of positions [first, first + len(ids)). known: all ids so far, where the worker has to
    begin its sequence; a request that is never begun ends with an error (worker.py). first_block: vLLM's, of its first
    tokens."""

    request: str
    first: int
    first_block: int
    ids: list[int]
    known: list[int] | None


@dataclass
class StepMetadata(KVConnectorMetadata):
    """by_block: the requests of a step by the block that their last token is written to, which is nobody else's.
    ended: finished, or preempted."""

    by_block: dict[int, Scheduled] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)


@dataclass
class Running:
    """A request between on_new_request and its end. next: the position that its next step begins at, if all is well."""

    request: Any
    blocks: list[int] = field(default_factory=list)
    next: int = -1


class SchedulerHalf:
    def __init__(self, options: Options, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._lookups = Lookups(options)
        self._running: dict[str, Running] = {}

    def serve(self, geometry: Geometry) -> None:
        """Before the first request."""
        self._lookups.serve(geometry)

    def add(self, request: Any) -> None:
        if request.cache_salt is not None:
            _log.error("request %s has a cache_salt, and kvstratad's pages are found by token ids alone: it ends with "
                       "an error; send it without, or to an engine in offload mode", request.request_id)
        self._running[request.request_id] = Running(request)

    def held(self, request: Any) -> int | None:
        """Lookups.held."""
        return 0 if request.cache_salt is not None else self._lookups.held(request)

    def admit(self, request: str) -> None:
        """It is in the next step."""
        self._lookups.forget(request)

    def detach(self) -> None:
        self._lookups.detach()

    def step(self, output: Any) -> StepMetadata:
        """Of vLLM's SchedulerOutput."""
        metadata = StepMetadata(ended=[*output.finished_req_ids, *(output.preempted_req_ids or ())])
        for request in output.preempted_req_ids or ():
            self._running[request].next = -1  # its sequence is closed: it restarts, also where it left off
        for request in output.finished_req_ids:
            self._running.pop(request, None)
            self._lookups.forget(request)
        for new in output.scheduled_new_reqs:
            self._running[new.req_id].blocks = list(new.block_ids[0])
            self._add(metadata, new.req_id, new.num_computed_tokens, output)
        cached = output.scheduled_cached_reqs
        for request, blocks, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens):
            if request in cached.resumed_req_ids:
                self._running[request].blocks = []
            self._running[request].blocks += blocks[0] if blocks else []
            self._add(metadata, request, computed, output)
        return metadata

    def _add(self, metadata: StepMetadata, name: str, first: int, output: Any) -> None:
        running = self._running[name]
        end = first + output.num_scheduled_tokens[name]
        ids = running.request.all_token_ids
        restarts = first != running.next and running.request.cache_salt is None
        running.next = end
        metadata.by_block[running.blocks[(end - 1) // self._block_tokens]] = Scheduled(
            name, first, running.blocks[0], list(ids[first:end]), list(ids) if restarts else None)
