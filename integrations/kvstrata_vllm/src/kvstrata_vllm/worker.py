# SPDX-License-Identifier: Apache-2.0
"""The worker's half: a sequence a request, a step a forward pass.

The daemon may die, or stop answering, between any two calls. What a step computes after that is still right, since
pages stay mapped. Its commit fails, or the next call that waits for the daemon does, the requests' sequences are gone,
and vLLM is told so with their next step (`lost_blocks`), which ends them with an error. A request that gets no sequence
at its first step (no daemon, no room) attends to its own keys and values in that step, and is ended with the next one.
One that finds the daemon gone when it opens is served by the daemon that is there then.

A step waits for the daemon twice at most, for ENGINE_MS each (attachment.py): until what ended is closed, and in one
call. None raises out of here. Threads: the worker's.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import numpy as np
import torch
from kvstrata.attachment import ENGINE_MS, Attachment, ended_by
from kvstrata.epoch import Epoch

import kvstrata

from .geometry import Geometry, Options
from .loaded import identity_here
from .scheduler import Scheduled, StepMetadata

_log = logging.getLogger("vllm.kvstrata")


@dataclass
class Rows:
    """Of a batch: row i is tokens [starts[i], starts[i + 1]), and its last one is written to block blocks[i]."""

    starts: list[int]
    blocks: list[int]


@dataclass
class Live:
    """A request's sequence. prompt: how many tokens it is opened for."""

    sequence: kvstrata.Sequence
    prompt: int
    done: bool = False  # the daemon knows that the prompt is complete


@dataclass
class Pass:
    """A forward pass. members: of the step, and where their rows are in the batch; served: positions in the batch of
    the step's tokens, None: all of them, as they are; alone: rows that attend to themselves; next: the layer that is
    due."""

    step: kvstrata.Step | None
    members: list[tuple[Scheduled, slice]]
    served: torch.Tensor | None
    alone: list[slice]
    next: int = 0


class WorkerHalf:
    """layers: how many attention layers there are; set by `serve`."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.epoch = Epoch()
        self._geometry: Geometry | None = None
        self._attachment = Attachment(options.socket, "vllm worker", self._register, ENGINE_MS)
        self._live: dict[str, Live] = {}
        self._metadata: StepMetadata | None = None
        self._pass: Pass | None = None
        self._lost: set[int] = set()

    def serve(self, geometry: Geometry) -> None:
        """kvstrata.Unavailable: no daemon."""
        self._geometry, self.epoch = geometry, Epoch(geometry.identity)
        self._attachment.start()

    def detach(self) -> None:
        """Its sequences are gone, here and at the daemon's."""
        self._attachment.let_go()
        self._let_go_of_lost()

    def _register(self, session: kvstrata.Session) -> kvstrata.Model:
        assert self._geometry is not None
        return replace(self._geometry, digest=self.epoch.digest()).register(session)

    # A forward pass

    def begin(self, metadata: StepMetadata) -> None:
        """What a step has; which row is whose comes with the first layer."""
        for request in metadata.ended:
            self._close(request)
        opens = any(member.known is not None for member in metadata.by_block.values())
        if self.epoch.follow(metadata.reset, identity_here(opens)):
            self._attachment.let_go()
            self._lose([], kvstrata.FailedPrecondition("the model has changed since the request began; send it again",
                                                       "MODEL_CHANGED"))
        self._metadata, self._pass = metadata, None

    def attend(self, layer: int, rows: Rows, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
               scale: float) -> None:
        """q, out [tokens][query heads][head_dim], k, v [tokens][KV heads][head_dim]; out is written."""
        if self._metadata is None:  # vLLM tries its kernels: nobody's tokens
            out.zero_()
            return
        if self._pass is None:
            self._pass = self._begin_pass(self._metadata, rows)
        now = self._pass
        if now.step is not None:
            try:
                self._attend_step(now, layer, q, k, v, out)
            except kvstrata.KvstrataError as error:
                self._break_off(now, error, out)
        for row in now.alone:
            out[row] = attend_alone(q[row], k[row], v[row], scale)
        now.next = layer + 1

    def _attend_step(self, now: Pass, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
                     ) -> None:
        assert now.step is not None
        if now.served is None:
            now.step.append(layer, k, v)
            now.step.attend(layer, q, out)
            return
        now.step.append(layer, k[now.served], v[now.served])
        out.zero_()
        out[now.served] = now.step.attend(layer, q[now.served])

    def _break_off(self, now: Pass, error: kvstrata.KvstrataError, out: torch.Tensor) -> None:
        """A layer refused the step's rows. Whoever is at its first token goes on alone from this layer on."""
        assert now.step is not None
        now.step.abort()
        out.zero_()
        now.step = None
        self._lose([member.request for member, _ in now.members], error)
        now.alone += [span for member, span in now.members if member.first == 0]
        self._lost.update(member.first_block for member, _ in now.members if member.first > 0)

    def end(self, layers: int) -> None:
        """Commits, if all layers have been."""
        now, self._pass, self._metadata = self._pass, None, None
        if now is None or now.step is None:
            return
        if now.next != layers:
            now.step.abort()
            return
        members = [member for member, _ in now.members]
        try:
            now.step.end()
            for member in members:
                self._complete(member)
        except kvstrata.KvstrataError as error:
            self._lose([member.request for member in members], error, self._session_of(members))

    def lost_blocks(self) -> set[int]:
        """Blocks of requests that have no sequence any more, once; vLLM ends such requests."""
        lost, self._lost = self._lost, set()
        return lost

    # Sequences

    def _begin_pass(self, metadata: StepMetadata, rows: Rows) -> Pass:
        self._attachment.settle()  # what ended leaves room for what begins
        batch = [(metadata.by_block[block], slice(*rows.starts[i:i + 2])) for i, block in enumerate(rows.blocks)]
        step, able = self._begin_step([member for member, _ in batch if self._ready(member)])
        members = [(member, span) for member, span in batch if member in able]
        alone = [span for member, span in batch if member not in able and member.first == 0]
        self._lost.update(member.first_block for member, _ in batch if member not in able and member.first > 0)
        whole = len(members) == len(batch)
        return Pass(step, members, None if whole or not members else torch.cat([torch.arange(s.start, s.stop)
                                                                                for _, s in members]), alone)

    def _ready(self, scheduled: Scheduled) -> bool:
        """Whether its sequence ends where the step begins; opens, reopens or cuts it to that."""
        try:
            live = self._live.get(scheduled.request)
            if scheduled.known is not None:
                self._close(scheduled.request)
                live = self._open(scheduled)
            return live is not None and self._present(live).tokens == scheduled.first
        except kvstrata.KvstrataError as error:
            self._lose([scheduled.request], error)
            return False

    def _open(self, scheduled: Scheduled) -> Live | None:
        assert scheduled.known is not None
        first = scheduled.first
        private = {"private": True} if scheduled.private or self.epoch.private else {}

        def run(session: kvstrata.Session, model: kvstrata.Model) -> kvstrata.Sequence:
            # Less than a page is nothing; 0 would be no limit.
            limit = first if first and first % model.page_tokens == 0 else 1 if first == 0 else 0
            return session.open(model, self.options.plan, scheduled.known or (), max_held=limit, **private)

        sequence = self._attachment.ask(run)
        live = self._live[scheduled.request] = Live(sequence, len(scheduled.known))
        if sequence.held > first:
            self._attachment.insist(lambda: sequence.truncate(first))
        elif sequence.held < first:
            _log.warning("request %s: %d tokens were held when it was scheduled, %d are now", scheduled.request, first,
                         sequence.held)
            self._close(scheduled.request)
            return None
        return live

    def _begin_step(self, members: list[Scheduled]) -> tuple[kvstrata.Step | None, list[Scheduled]]:
        """Of all members, or of those that can run."""
        members = [member for member in members if member.request in self._live]  # another's error may have shown more
        if not members:
            return None, []
        session = self._session_of(members)
        try:
            return self._attachment.insist(lambda: session.step(map(self._member, members))), members
        except kvstrata.KvstrataError as error:
            if self._attachment.lost(session, error):
                self._lose([], error)
                return None, []
            able = [member for member in members if self._can_run(member)]
        # One that cannot run is left out each time, so this ends.
        return self._begin_step(able) if len(able) < len(members) else self._begin_step(able[:-1])

    def _can_run(self, member: Scheduled) -> bool:
        live = self._live.get(member.request)
        try:
            self._attachment.insist(lambda: self._present(live).session.step([self._member(member)])).abort()
            return True
        except kvstrata.KvstrataError as error:
            self._lose([member.request], error, live.sequence.session if live else None)
            return False

    def _session_of(self, members: list[Scheduled]) -> kvstrata.Session:
        """Members of a step are of one."""
        return self._live[members[0].request].sequence.session

    def _member(self, scheduled: Scheduled) -> tuple[kvstrata.Sequence, np.ndarray]:
        return self._present(self._live.get(scheduled.request)), np.asarray(scheduled.ids, np.int32)

    def _present(self, live: Live | None) -> kvstrata.Sequence:
        """NotFound: another request's open, or its error, has shown the daemon to be gone since it was opened."""
        if live is None or not self._attachment.is_now(live.sequence.session):
            raise kvstrata.NotFound("kvstratad was started again, and has its keys and values no more", "SEQUENCE_LOST")
        return live.sequence

    def _complete(self, member: Scheduled) -> None:
        live = self._live[member.request]
        if not live.done and member.first + len(member.ids) >= live.prompt:
            live.sequence.prefill_done()
            live.done = True

    def _close(self, request: str) -> None:
        if live := self._live.pop(request, None):
            self._attachment.close([live.sequence])

    def _lose(self, requests: list[str], error: kvstrata.KvstrataError, session: kvstrata.Session | None = None
              ) -> None:
        """These requests have no sequence any more, nor those whose session is over. session: where the error comes
        from, if that was not said yet."""
        if session is not None:
            self._attachment.lost(session, error)
        for request in requests:
            _log.error("request %s: %s", request, ended_by(error))
            self._close(request)
        for request in self._let_go_of_lost():
            _log.error("request %s: %s", request, ended_by(error))

    def _let_go_of_lost(self) -> list[str]:
        """Of requests whose session was let go: the next one attaches to the daemon that is there then."""
        lost = {name: live.sequence for name, live in self._live.items()
                if not self._attachment.is_now(live.sequence.session)}
        for name in lost:
            del self._live[name]
        self._attachment.close([*{sequence.session for sequence in lost.values()}, *lost.values()])
        return list(lost)


def attend_alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of a prompt's first tokens to themselves."""
    heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)
