# SPDX-License-Identifier: Apache-2.0
"""What the daemon holds of a prompt, asked from vLLM's scheduler.

It attaches by itself, since vLLM may run the scheduler in another process than the worker. A request's first look-up
takes a lease, so that what it answers is still there when the worker opens; it runs beside the scheduler, which asks
again while the daemon reads from disk. A request for which vLLM has no room is asked about in each step: those answers
are a moment old and without a lease, since what it holds is missing to those that run. However many requests wait, a
step waits for their look-ups for a few milliseconds in all. Prompts are looked up in the present epoch (epochs.py).
Threads: the scheduler's.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from kvstrata.attachment import Attachment, Patience
from kvstrata.epoch import Epoch, new_reset
from kvstrata.torch_identity import Identity

import kvstrata

from .epochs import WorkerIdentity
from .geometry import Geometry, Options
from .loaded import identity_here

_log = logging.getLogger("vllm.kvstrata")

LEASE_MS = 2000  # from a look-up's begin to the worker's open
GOOD = 0.1  # seconds that an answer serves


class Lookups:
    """geometry comes when the worker knows it (`serve`), before the first request; with it the first epoch."""

    def __init__(self, options: Options) -> None:
        self.epoch = Epoch()
        self._options = options
        self._geometry: Geometry | None = None
        self._attachment = Attachment(options.socket, "vllm scheduler", self._register)
        self._beside = ThreadPoolExecutor(4, "kvstrata-lookup")
        self._asked: dict[str, Future[int]] = {}
        self._answers: dict[str, tuple[float, int]] = {}  # of requests that wait: until when it serves, and tokens
        self._patience = Patience()
        self._checked = False  # whether the model has changed, in this step

    def serve(self, geometry: Geometry) -> None:
        self._geometry, self.epoch = geometry, Epoch(geometry.identity)

    def reset(self) -> None:
        """Begins an epoch."""
        self.follow(reset=new_reset())

    def follow(self, reset: str | None = None, identity: Identity | None = None) -> None:
        """Epoch.follow. What was asked in the last epoch is forgotten."""
        if self.epoch.follow(reset, identity):
            self._asked, self._answers = {}, {}
            self._attachment.let_go()

    def next_step(self) -> None:
        self._patience.renew()
        self._checked = False

    def held(self, request: Any) -> int | None:
        """Leading tokens of a request that need not be computed, 0 also when there is no daemon; None: ask again."""
        if not self._checked:
            self._checked = True
            self.follow(identity=identity_here())
        if self.epoch.private:
            return 0
        name = request.request_id
        until, held = self._answers.get(name, (0.0, 0))
        if time.monotonic() < until:
            return held
        lease = 0 if name in self._answers else LEASE_MS
        asked = self._asked.pop(name, None)
        if asked is None:
            asked = self._beside.submit(self._look_up, name, list(request.all_token_ids), lease)
        if not self._patience.wait(asked):
            self._asked[name] = asked
            return None
        self._answers[name] = time.monotonic() + GOOD, asked.result()
        return asked.result()

    def forget(self, request: str) -> None:
        """The request is scheduled, or has ended: what was answered is not asked for again."""
        self._asked.pop(request, None)
        self._answers.pop(request, None)

    def detach(self) -> None:
        """The session is closed when the last look-up in it is over and it is collected."""
        self._attachment.let_go()

    def _look_up(self, request: str, ids: list[int], lease_ms: int) -> int:
        try:
            return self._attachment.ask(
                lambda session, model: session.lookup(model, ids, self._options.plan, lease_ms=lease_ms).held)
        except kvstrata.KvstrataError as error:
            _log.warning("request %s: nothing is held, %s", request, error)
            return 0

    def _register(self, session: kvstrata.Session) -> kvstrata.Model:
        assert self._geometry is not None, "vLLM passed no handshake metadata on"
        return replace(self._geometry, digest=self.epoch.digest()).register(session)


def follow(lookups: Lookups, output: Any) -> None:
    """The scheduler hears, with a step's output, of a model that the worker has seen changed."""
    if isinstance(output.kv_connector_worker_meta, WorkerIdentity):
        lookups.follow(identity=output.kv_connector_worker_meta.identity)
