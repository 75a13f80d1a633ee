# SPDX-License-Identifier: Apache-2.0
"""The requests' sequences: what is held of a prompt, a sequence a request, a step a forward pass.

SGLang's scheduler and its model run in one process, so one object serves both: the prefix cache opens what is held, the
attention backend runs steps. The daemon may die between any two calls. What a step computes after that is still right,
since pages stay mapped; its commit fails, and its requests end with an error behind that step's token. A request that
has no sequence in a step, or none that it could go on with, ends with an error, and without what that step computed.
A look-up or an open that finds the daemon gone is asked of the daemon that is there then.

The scheduler waits for a daemon that does not answer once, for ENGINE_MS, and never to close (attachment.py). Opens run
beside; they first have what is held kept by a lease, where the daemon may have to read its disk. Prompts are found in
the present epoch (epoch.py): a flush begins one, a model that has changed another.

Threads: the scheduler's, but for opens.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

import numpy as np
import torch
from kvstrata.attachment import ENGINE_MS, Attachment, Patience, ended_by
from kvstrata.epoch import Epoch, new_reset
from kvstrata.torch_identity import LoadedModel

import kvstrata

from .geometry import Geometry, Options, Unsupported

_log = logging.getLogger("sglang.kvstrata")

LEASE_MS = 2000  # from an open's look-up to its open
_MOMENT = 0.05  # seconds for which a look at the model serves steps that open nothing
_JUST_NOW = 0.001  # and look-ups, of which a round of the scheduler has many
_LOST = kvstrata.NotFound("kvstratad has its keys and values no more", "SEQUENCE_LOST")


@dataclass
class Row:
    """A request's new tokens in a batch: ids of positions [first, first + len(ids)), which are `span` of the batch."""

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
        self._model: LoadedModel | None = None
        self._epoch = Epoch()
        self._attachment = Attachment(options.socket, "sglang", self._register, ENGINE_MS)
        self._reader = Attachment(options.socket, "sglang look-ups", self._register)  # may wait for a disk
        self._live: dict[str, Live] = {}
        self._pass: Pass | None = None
        self._patience = Patience()
        self._looked_at = 0.0
        self._gone: kvstrata.KvstrataError = _LOST
        self._beside = ThreadPoolExecutor(4, "kvstrata-open")

    def serve(self, geometry: Geometry, model: LoadedModel) -> None:
        """kvstrata.Unavailable: no daemon."""
        self._geometry, self._model = geometry, model
        self._epoch = Epoch(model.now())
        self._attachment.start()

    # What is held

    def held(self, request: Any, ids: Sequence[int], limit: int) -> int:
        """Leading tokens of SGLang's Req, at most `limit`, that need not be computed; 0 also without a daemon. ids: of
        its prompt and what was generated so far."""
        self._look(_JUST_NOW)
        live = self._live.get(request.rid)
        if live is None or live.request is not request:  # names may come again
            self.close(request.rid)
            live = self._live[request.rid] = Live(request)
        if live.opening is None and not self._is_present(live):
            look_up = limit > 0 and not _refused(request) and not self._private(request)
            live.promised = min(self._look_up(request.rid, ids), limit) if look_up else 0
        return live.promised

    def open(self, request: Any, tokens: int) -> bool | None:
        """Whether its sequence begins with so many tokens, which are held; None: ask again."""
        live, ids = self._live[request.rid], _ids(request)
        if live.opening is None:
            live.opening = self._beside.submit(self._open_held, ids, tokens)
        if not self._patience.wait(live.opening):
            return None
        live.sequence, live.opening, live.prompt = live.opening.result(), None, len(ids)
        return live.sequence is not None

    def drop(self, request: Any) -> None:
        """It is computed from its first token on."""
        self._close(self._live[request.rid])

    def close(self, name: str) -> None:
        """The request has ended, or is retracted: SGLang shows it again then."""
        if live := self._live.pop(name, None):
            self._close(live)

    def forget_prompts(self) -> None:
        """Begins an epoch: of a flush. No request runs."""
        self._follow(reset=new_reset())

    def _look(self, age: float) -> None:
        """Whether the model has changed, unless that was seen `age` seconds ago."""
        if time.monotonic() - self._looked_at >= age:
            self._follow()

    def _follow(self, reset: str | None = None) -> None:
        assert self._model is not None
        self._looked_at = time.monotonic()
        if not self._epoch.follow(reset, self._model.now()):
            return
        self._attachment.let_go()
        self._reader.let_go()
        self._gone = kvstrata.FailedPrecondition("the model has changed since the request began; send it again",
                                                 "MODEL_CHANGED")

    def _private(self, request: Any) -> bool:
        """Whether nobody else is to find what it computes."""
        return self._epoch.private or request.extra_key is not None or request.cache_salt is not None

    def _close(self, live: Live) -> None:
        """Beside; one that is being opened, when it is."""
        if live.opening is not None:
            live.opening.add_done_callback(lambda opening: self._attachment.close(filter(None, [opening.result()])))
        if live.sequence is not None:
            self._attachment.close([live.sequence])
        live.sequence, live.opening, live.promised, live.done = None, None, 0, False

    # A forward pass

    def begin(self, rows: list[Row]) -> None:
        if self._pass is not None and self._pass.step is not None:
            self._pass.step.abort()  # that one was broken off
        self.tokens = rows[-1].span.stop if rows else 0
        self._patience.renew()
        self._look(0 if any(row.first == 0 for row in rows) else _MOMENT)
        self._attachment.settle()  # what ended leaves room for what begins
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
        try:
            if now.served is None:
                now.step.append(layer, k, v)
                now.step.attend(layer, q, out)
            else:
                now.step.append(layer, k[now.served], v[now.served])
                out[now.served] = now.step.attend(layer, q[now.served])
        except kvstrata.KvstrataError as error:  # a layer refused the step's rows
            now.step.abort()
            now.step = None
            for member in now.members:
                self._lose(member.request, error, computed=False)
            return
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
            self._attachment.lost(self._session_of(now.members), error)
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
                live.sequence = self._attachment.ask(_open, self._options.plan, _ids(live.request), 1,
                                                     self._private(live.request))
            if self._present(live).tokens != row.first:
                raise self._gone
            return True
        except kvstrata.KvstrataError as error:
            self._lose(row.request, error, computed=False)
            return False

    def _begin_step(self, members: list[Row]) -> tuple[kvstrata.Step | None, list[Row]]:
        """The step of all members, or of those that can run."""
        gone = [member for member in members if not self._is_present(self._live[member.request])]
        for member in gone:  # another's open, or its error, has shown it
            self._lose(member.request, self._gone, computed=False)
        members = [member for member in members if member not in gone]
        if not members:
            return None, []
        session = self._session_of(members)
        try:
            return self._attachment.insist(lambda: session.step(map(self._member, members))), members
        except kvstrata.KvstrataError as error:
            if self._attachment.lost(session, error):
                for member in members:
                    self._lose(member.request, error, computed=False)
                return None, []
            able = [member for member in members if self._can_run(member)]
            if len(able) == len(members):  # each alone, not all together
                self._lose(able.pop().request, error, computed=False)
        return self._begin_step(able)

    def _can_run(self, member: Row) -> bool:
        try:
            self._attachment.insist(lambda: self._session_of([member]).step([self._member(member)])).abort()
            return True
        except kvstrata.KvstrataError as error:
            self._lose(member.request, error, computed=False)
            return False

    def _session_of(self, members: list[Row]) -> kvstrata.Session:
        """Members of a step are of one."""
        return self._present(self._live[members[0].request]).session

    def _member(self, row: Row) -> tuple[kvstrata.Sequence, np.ndarray]:
        return self._present(self._live[row.request]), np.asarray(row.ids, np.int32)

    def _present(self, live: Live) -> kvstrata.Sequence:
        """NotFound: it has none, or another request's open, or its error, has shown the daemon to be gone."""
        if live.sequence is None or not self._is_present(live):
            raise self._gone
        return live.sequence

    def _is_present(self, live: Live) -> bool:
        return live.sequence is not None and self._attachment.is_now(live.sequence.session)

    def _lose(self, name: str, error: kvstrata.KvstrataError, computed: bool) -> None:
        """The request ends with the error. computed: the token of the step that runs is right."""
        from sglang.srt.managers.schedule_batch import FINISH_ABORT
        live, said = self._live[name], ended_by(error)
        _log.error("request %s: %s", name, said)
        self._close(live)
        live.request.to_finish = FINISH_ABORT(said, HTTPStatus.SERVICE_UNAVAILABLE)
        if not computed:
            live.request.discard_output_reason = live.request.to_finish
            live.request.finished_len = len(live.request.output_ids)

    # The daemon

    def _register(self, session: kvstrata.Session) -> kvstrata.Model:
        assert self._geometry is not None
        return replace(self._geometry, digest=self._epoch.digest()).register(session)

    def _look_up(self, name: str, ids: Sequence[int]) -> int:
        try:
            array = np.asarray(ids, np.int32)
            return self._attachment.ask(lambda session, model: session.lookup(model, array, self._options.plan).held)
        except kvstrata.KvstrataError as error:
            _log.warning("request %s: nothing is held, %s", name, error)
            return 0

    def _open_held(self, ids: np.ndarray, tokens: int) -> kvstrata.Sequence | None:
        """Begins with `tokens`; None: they are held no more. On a thread of its own."""
        try:
            self._reader.ask(lambda session, model: session.lookup(model, ids, self._options.plan, lease_ms=LEASE_MS))
            sequence = self._attachment.ask(_open, self._options.plan, ids, tokens)
            if sequence.held < tokens:
                _log.warning("%d tokens were held, %d are now: they are computed", tokens, sequence.held)
                self._attachment.close([sequence])
                return None
            if sequence.held > tokens:
                self._attachment.insist(lambda: sequence.truncate(tokens))
            return sequence
        except kvstrata.KvstrataError as error:
            _log.warning("%d tokens that were held are computed: %s", tokens, error)
            return None


def _open(session: kvstrata.Session, model: kvstrata.Model, plan: str, ids: np.ndarray, tokens: int,
          private: bool = False) -> kvstrata.Sequence:
    return session.open(model, plan, ids, max_held=tokens if tokens == 1 or tokens % model.page_tokens == 0 else 0,
                        private=private)


def _ids(request: Any) -> np.ndarray:
    """Token ids of the prompt and of what was generated so far."""
    return np.asarray(request.full_untruncated_fill_ids, np.int32)


def _refused(request: Any) -> str | None:
    """What a request has that its token ids do not tell, or that shares slots; None: nothing."""
    for name in ("input_embeds", "positional_embed_overrides", "beam_group"):
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
