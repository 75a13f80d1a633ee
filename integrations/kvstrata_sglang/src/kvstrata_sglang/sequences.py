# SPDX-License-Identifier: Apache-2.0
"""The requests' sequences: what is held of a prompt, a sequence a request, a step a forward pass.

SGLang's scheduler and its model run in one process, so one object serves both: the prefix cache opens what is held, the
attention backend runs steps. The daemon may die between any two calls. What a step computes after that is still right,
since pages stay mapped; its commit fails, and its requests end with an error behind that step's token. A request that
has no sequence in a step, or none that it could go on with, ends with an error, and without what that step computed.
A look-up or an open that finds the daemon gone is asked of the daemon that is there then. Threads: the scheduler's,
but for opens.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

import numpy as np
import torch
from kvstrata.attachment import Attachment, ended_by

import kvstrata

from .geometry import Geometry, Options, Unsupported

_log = logging.getLogger("sglang.kvstrata")

PATIENCE = 0.005  # seconds that the scheduler waits for an open; those in memory take a tenth


@dataclass
class Row:
    """Of a batch: a request's new tokens, ids of positions [first, first + len(ids)), which are `span` of the batch."""

    request: str
    first: int
    span: slice
    ids: list[int]


@dataclass
class Live:
    """A request that SGLang has shown. promised: tokens that it was told to be held; prompt: how many the sequence was
    opened for; done: the daemon knows that it is complete."""

    request: Any
    promised: int = 0
    opening: Future[kvstrata.Sequence | None] | None = None
    sequence: kvstrata.Sequence | None = None
    prompt: int = 0
    done: bool = False


@dataclass
class Pass:
    """A forward pass. served: positions in the batch of the step's tokens, None: all of them, as they are; next: the
    layer that is due."""

    step: kvstrata.Step | None
    members: list[Row]
    served: torch.Tensor | None
    next: int = 0


class Sequences:
    """tokens: of the batch of the last `begin`, without padding."""

    def __init__(self, options: Options) -> None:
        self.tokens = 0
        self._options = options
        self._geometry: Geometry | None = None
        self._attachment = Attachment(options.socket, "sglang", self._register)
        self._live: dict[str, Live] = {}
        self._pass: Pass | None = None
        self._beside = ThreadPoolExecutor(4, "kvstrata-open")

    def serve(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._attachment.now()

    # What is held

    def held(self, request: Any, ids: Sequence[int], limit: int) -> int:
        """Leading tokens of SGLang's Req, at most `limit`, that need not be computed; 0 also without a daemon. ids: of
        its prompt and what was generated so far."""
        live = self._live.get(request.rid)
        if live is None or live.request is not request:  # names may come again
            self.close(request.rid)
            live = self._live[request.rid] = Live(request)
        if live.opening is None and not self._is_present(live):
            look_up = limit > 0 and not _refused(request)
            live.promised = min(self._look_up(request.rid, ids), limit) if look_up else 0
        return live.promised

    def open(self, request: Any, tokens: int) -> bool | None:
        """Whether its sequence begins with so many tokens, which are held; None: ask again."""
        live, ids = self._live[request.rid], _ids(request)
        if live.opening is None:
            live.opening = self._beside.submit(self._open_held, ids, tokens)
        done, _ = wait([live.opening], PATIENCE)
        if not done:
            return None
        live.sequence, live.opening, live.prompt = live.opening.result(), None, len(ids)
        return live.sequence is not None

    def drop(self, request: Any) -> None:
        """It is computed from its first token on."""
        _close(self._live[request.rid])

    def close(self, name: str) -> None:
        """The request has ended, or is retracted: SGLang shows it again then."""
        if live := self._live.pop(name, None):
            _close(live)  # one that is being opened is closed when it is collected

    def forget_prompts(self) -> None:
        """What is held from before is not this model's any more: weights may have changed. No request runs."""
        assert self._geometry is not None
        self._geometry = replace(self._geometry, digest=f"flushed-{uuid.uuid4()}")
        self._attachment.let_go()  # the next request registers it

    # A forward pass

    def begin(self, rows: list[Row]) -> None:
        if self._pass is not None and self._pass.step is not None:
            self._pass.step.abort()  # that one was broken off
        self.tokens = rows[-1].span.stop if rows else 0
        step, members = self._begin_step([row for row in rows if self._ready(row)])
        self._pass = Pass(step, members, None if len(members) == len(rows) else
                          torch.cat([torch.arange(0), *(torch.arange(m.span.start, m.span.stop) for m in members)]))

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        """q, out [tokens][query heads][head_dim], k, v [tokens][KV heads][head_dim]; rows of out that are served are
        written. The last layer's commits."""
        now = self._pass
        assert now is not None and self._geometry is not None
        if now.step is None:
            return
        if now.served is None:
            now.step.append(layer, k, v)
            now.step.attend(layer, q, out)
        else:
            now.step.append(layer, k[now.served], v[now.served])
            out[now.served] = now.step.attend(layer, q[now.served])
        now.next = layer + 1
        if now.next == self._geometry.layers:
            self._end(now)

    def _end(self, now: Pass) -> None:
        assert now.step is not None
        self._pass = None
        try:
            now.step.end()
            for member in now.members:
                self._complete(member)
        except kvstrata.KvstrataError as error:
            for member in now.members:
                self._lose(member.request, error, computed=True)

    def _complete(self, member: Row) -> None:
        live = self._live[member.request]
        if not live.done and live.sequence is not None and member.first + len(member.ids) >= live.prompt:
            live.sequence.prefill_done()
            live.done = True

    def _ready(self, row: Row) -> bool:
        """Whether its sequence ends where the step begins; opens one for a request of which nothing was held."""
        live = self._live.get(row.request)
        if live is None:  # SGLang tries its kernels: nobody's tokens
            return False
        try:
            if refused := _refused(live.request):
                raise kvstrata.InvalidArgument(refused, "REQUEST")
            if row.first == 0 and not self._is_present(live):
                live.prompt = len(_ids(live.request))
                # Less than a page is nothing.
                live.sequence = self._attachment.ask(_open, self._options.plan, _ids(live.request), 1)
            if self._present(live).tokens != row.first:
                raise _lost()
            return True
        except kvstrata.KvstrataError as error:
            self._lose(row.request, error, computed=False)
            return False

    def _begin_step(self, members: list[Row]) -> tuple[kvstrata.Step | None, list[Row]]:
        """Of all members, or of those that can run."""
        if not members:
            return None, []
        try:
            return self._attachment.now()[0].step(map(self._member, members)), members
        except kvstrata.KvstrataError as error:
            able = [member for member in members if self._can_run(member)]
            if len(able) == len(members):  # each alone, not all together
                self._lose(able.pop().request, error, computed=False)
        return self._begin_step(able)

    def _can_run(self, member: Row) -> bool:
        try:
            self._attachment.now()[0].step([self._member(member)]).abort()
            return True
        except kvstrata.KvstrataError as error:
            self._lose(member.request, error, computed=False)
            return False

    def _member(self, row: Row) -> tuple[kvstrata.Sequence, np.ndarray]:
        return self._present(self._live[row.request]), np.asarray(row.ids, np.int32)

    def _present(self, live: Live) -> kvstrata.Sequence:
        """NotFound: it has none, or another request's open, or its error, has shown the daemon to be gone."""
        if live.sequence is None or not self._is_present(live):
            raise _lost()
        return live.sequence

    def _is_present(self, live: Live) -> bool:
        return live.sequence is not None and self._attachment.is_now(live.sequence.session)

    def _lose(self, name: str, error: kvstrata.KvstrataError, computed: bool) -> None:
        """The request ends with the error. computed: the token of the step that runs is right."""
        from sglang.srt.managers.schedule_batch import FINISH_ABORT
        live, said = self._live[name], ended_by(error)
        _log.error("request %s: %s", name, said)
        _close(live)
        live.request.to_finish = FINISH_ABORT(said, HTTPStatus.SERVICE_UNAVAILABLE)
        if not computed:
            live.request.discard_output_reason = live.request.to_finish
            live.request.finished_len = len(live.request.output_ids)
        if isinstance(error, kvstrata.Unavailable):
            self._attachment.let_go()  # so sequences that others have in it are gone, too

    # The daemon

    def _register(self, session: kvstrata.Session) -> kvstrata.Model:
        assert self._geometry is not None
        return self._geometry.register(session)

    def _look_up(self, name: str, ids: Sequence[int]) -> int:
        try:
            array = np.asarray(ids, np.int32)
            return self._attachment.ask(lambda session, model: session.lookup(model, array, self._options.plan).held)
        except kvstrata.KvstrataError as error:
            _log.warning("request %s: nothing is held, %s", name, error)
            if isinstance(error, kvstrata.Unavailable):
                self._attachment.let_go()
            return 0

    def _open_held(self, ids: np.ndarray, tokens: int) -> kvstrata.Sequence | None:
        """Begins with `tokens`; None: they are held no more. On a thread of its own."""
        try:
            sequence = self._attachment.ask(_open, self._options.plan, ids, tokens)
            if sequence.held < tokens:
                _log.warning("%d tokens were held, %d are now: they are computed", tokens, sequence.held)
                return None  # whoever drops a sequence closes it
            if sequence.held > tokens:
                sequence.truncate(tokens)
            return sequence
        except kvstrata.KvstrataError as error:
            _log.warning("%d tokens that were held are computed: %s", tokens, error)
            return None


def _open(session: kvstrata.Session, model: kvstrata.Model, plan: str, ids: np.ndarray, tokens: int
          ) -> kvstrata.Sequence:
    return session.open(model, plan, ids, max_held=tokens if tokens == 1 or tokens % model.page_tokens == 0 else 0)


def _lost() -> kvstrata.NotFound:
    return kvstrata.NotFound("kvstratad has its keys and values no more", "SEQUENCE_LOST")


def _close(live: Live) -> None:
    sequence, live.sequence = live.sequence, None
    if sequence is not None:
        try:
            sequence.close()
        except kvstrata.KvstrataError as error:
            _log.warning("request %s: its sequence is not closed before the session is: %s", live.request.rid, error)


def _ids(request: Any) -> np.ndarray:
    """Of the prompt and what was generated so far."""
    return np.asarray(request.full_untruncated_fill_ids, np.int32)


def _refused(request: Any) -> str | None:
    """What a request has that its token ids do not tell, or that shares slots; None: nothing."""
    for name in ("extra_key", "cache_salt", "input_embeds", "positional_embed_overrides", "beam_group"):
        if getattr(request, name) is not None:
            return f"the request has {name}, and kvstrata goes by token ids; send it without, or to another engine"
    return None


_served: Sequences | None = None


def serve(sequences: Sequences) -> None:
    """This process's, for the prefix cache, which SGLang makes behind the attention backend."""
    global _served
    _served = sequences


def served() -> Sequences:
    """Unsupported: there are none."""
    if _served is None:
        raise Unsupported("--radix-cache-backend is kvstrata, and --attention-backend is not; give both or none")
    return _served
