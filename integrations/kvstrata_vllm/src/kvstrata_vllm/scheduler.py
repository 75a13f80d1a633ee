"""The scheduler's half: what the daemon holds of a prompt, and which requests the next step has.

It attaches by itself, since vLLM may run it in another process than the worker. A look-up takes a lease, so that what
it answers is still there when the worker opens; it runs beside the scheduler, which asks again while the daemon reads
from disk. Threads: the scheduler's.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

import kvstrata

from .geometry import Geometry, Options

_log = logging.getLogger("vllm.kvstrata")

LEASE_MS = 10_000  # from a look-up to the worker's open; a request that waits longer is looked up again
PATIENCE = 0.005  # seconds that the scheduler waits for a look-up; those in memory take a tenth


@dataclass
class Scheduled:
    """A request in a step: ids of positions [first, first + len(ids)). known: all ids so far, where the worker has to
    begin its sequence. first_block: vLLM's, of its first tokens."""

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
    """geometry comes when the worker knows it (`serve`), before the first request."""

    def __init__(self, options: Options, block_tokens: int) -> None:
        self._options, self._block_tokens = options, block_tokens
        self._geometry: Geometry | None = None
        self._session: kvstrata.Session | None = None
        self._model: kvstrata.Model | None = None
        self._running: dict[str, Running] = {}
        self._attaching = Lock()
        self._beside = ThreadPoolExecutor(4, "kvstrata-lookup")
        self._asked: dict[str, Future[int]] = {}

    def serve(self, geometry: Geometry) -> None:
        self._geometry = geometry

    def add(self, request: Any) -> None:
        self._running[request.request_id] = Running(request)

    def held(self, request: Any) -> int | None:
        """Leading tokens of a request that need not be computed, 0 also when there is no daemon; None: ask again."""
        asked = self._asked.get(request.request_id)
        if asked is None:
            asked = self._beside.submit(self._look_up, request.request_id, list(request.all_token_ids))
        done, _ = wait([asked], PATIENCE)
        if not done:
            self._asked[request.request_id] = asked
            return None
        self._asked.pop(request.request_id, None)
        return asked.result()

    def _look_up(self, request: str, ids: list[int]) -> int:
        try:
            session, model = self._attached()
            return session.lookup(model, ids, self._options.plan, lease_ms=LEASE_MS).held
        except kvstrata.KvstrataError as error:
            _log.warning("request %s: nothing is held, %s", request, error)
            if isinstance(error, kvstrata.Unavailable):
                self.detach()
            return 0

    def _attached(self) -> tuple[kvstrata.Session, kvstrata.Model]:
        assert self._geometry is not None, "vLLM passed no handshake metadata on"
        with self._attaching:
            if self._session is None or self._model is None:
                session = kvstrata.attach(self._options.socket, client_name="vllm scheduler")
                self._session, self._model = session, self._geometry.register(session)
            return self._session, self._model

    def detach(self) -> None:
        """The session is closed when the last look-up in it is over and it is collected."""
        with self._attaching:
            self._session = self._model = None

    def step(self, output: Any) -> StepMetadata:
        """Of vLLM's SchedulerOutput."""
        metadata = StepMetadata(ended=[*output.finished_req_ids, *(output.preempted_req_ids or ())])
        for request in output.finished_req_ids:
            self._running.pop(request, None)
            self._asked.pop(request, None)
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
        restarts = first != running.next or name in metadata.ended
        running.next = end
        metadata.by_block[running.blocks[(end - 1) // self._block_tokens]] = Scheduled(
            name, first, running.blocks[0], list(ids[first:end]), list(ids) if restarts else None)
