# SPDX-License-Identifier: Apache-2.0
"""The scheduler's half: what the daemon holds of a prompt, and which requests the next step has. Threads: the
scheduler's."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.request import RequestStatus

from .geometry import Options
from .lookups import Lookups

_log = logging.getLogger("vllm.kvstrata")


@dataclass
class Scheduled:
    """A request in a step: ids of positions [first, first + len(ids)). known: all ids so far, where the worker has to
    begin its sequence. private: nobody else is to find it. first_block: vLLM's, of its first tokens."""

    request: str
    first: int
    first_block: int
    ids: list[int]
    known: list[int] | None
    private: bool = False


@dataclass
class StepMetadata(KVConnectorMetadata):
    """by_block: the requests of a step by the block that their last token is written to, which is nobody else's.
    ended: finished, or preempted. reset: the last one's name (epochs.py)."""

    by_block: dict[int, Scheduled] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    reset: str = ""


@dataclass
class Running:
    """A request between on_new_request and its end. next: the position that its next step begins at, if all is well."""

    request: Any
    blocks: list[int] = field(default_factory=list)
    next: int = -1


class SchedulerHalf:
    def __init__(self, options: Options, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self.lookups = Lookups(options)
        self._running: dict[str, Running] = {}

    def add(self, request: Any) -> None:
        self._running[request.request_id] = Running(request)

    def held(self, request: Any) -> int | None:
        """Lookups.held. One with a cache salt is nobody else's: it is not looked up."""
        return 0 if request.cache_salt is not None else self.lookups.held(request)

    def reset(self) -> bool:
        """Begins an epoch (epochs.py); whether it has. Requests that run would go on in the last one's."""
        if running := [name for name, of in self._running.items() if of.request.status == RequestStatus.RUNNING]:
            _log.error("nothing is reset: %d requests run (%s ...); wait for them, or pass reset_running_requests",
                       len(running), running[0])
            return False
        self.lookups.reset()
        return True

    def admit(self, request: str) -> None:
        """It is in the next step."""
        self.lookups.forget(request)

    def detach(self) -> None:
        self.lookups.detach()

    def step(self, output: Any) -> StepMetadata:
        """Of vLLM's SchedulerOutput."""
        self.lookups.next_step()
        metadata = StepMetadata(ended=[*output.finished_req_ids, *(output.preempted_req_ids or ())],
                                reset=self.lookups.epoch.reset)
        for request in output.preempted_req_ids or ():
            self._running[request].next = -1  # its sequence is closed: it restarts, also where it left off
        for request in output.finished_req_ids:
            self._running.pop(request, None)
            self.lookups.forget(request)
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
        restarts = first != running.next
        running.next = end
        metadata.by_block[running.blocks[(end - 1) // self._block_tokens]] = Scheduled(
            name, first, running.blocks[0], list(ids[first:end]), list(ids) if restarts else None,
            running.request.cache_salt is not None)
