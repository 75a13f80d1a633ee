"""What the daemon holds of a prompt, asked from vLLM's scheduler.

It attaches by itself, since vLLM may run the scheduler in another process than the worker. A look-up takes a lease, so
that what it answers is still there when the worker opens; it runs beside the scheduler, which asks again while the
daemon reads from disk. Threads: the scheduler's.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Lock
from typing import Any

import kvstrata

from .geometry import Geometry, Options

_log = logging.getLogger("vllm.kvstrata")

LEASE_MS = 10_000  # from a look-up to the worker's open; a request that waits longer is looked up again
PATIENCE = 0.005  # seconds that the scheduler waits for a look-up; those in memory take a tenth
GOOD = 0.2  # seconds that an answer serves a request that vLLM has no room for, and asks about in each step


class Lookups:
    """geometry comes when the worker knows it (`serve`), before the first request."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._geometry: Geometry | None = None
        self._session: kvstrata.Session | None = None
        self._model: kvstrata.Model | None = None
        self._attaching = Lock()
        self._beside = ThreadPoolExecutor(4, "kvstrata-lookup")
        self._asked: dict[str, Future[int]] = {}
        self._answers: dict[str, tuple[float, int]] = {}  # when it was asked, tokens

    def serve(self, geometry: Geometry) -> None:
        self._geometry = geometry

    def held(self, request: Any) -> int | None:
        """Leading tokens of a request that need not be computed, 0 also when there is no daemon; None: ask again."""
        name, now = request.request_id, time.monotonic()
        then, held = self._answers.get(name, (-GOOD, 0))
        if now - then < GOOD:
            return held
        asked = self._asked.pop(name, None) or self._beside.submit(self._look_up, name, list(request.all_token_ids))
        done, _ = wait([asked], PATIENCE)
        if not done:
            self._asked[name] = asked
            return None
        self._answers[name] = now, asked.result()
        return asked.result()

    def forget(self, request: str) -> None:
        """The request is scheduled, or has ended: what was answered is not asked for again."""
        self._asked.pop(request, None)
        self._answers.pop(request, None)

    def detach(self) -> None:
        """The session is closed when the last look-up in it is over and it is collected."""
        with self._attaching:
            self._session = self._model = None

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
