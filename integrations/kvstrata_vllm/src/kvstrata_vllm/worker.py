# SPDX-License-Identifier: Apache-2.0
"""The worker's half: a sequence a request, a step a forward pass.

The daemon may die between any two calls. What a step computes after that is still right, since pages stay mapped; its
commit fails, the requests' sequences are gone, and vLLM is told so with their next step (`lost_blocks`), which ends
them with an error. A request that gets no sequence at its first step (no daemon, no room) attends to its own keys and
values in that step, and is ended with the next one. One that finds the daemon gone when it opens is served by the
daemon that is there then. Threads: the worker's.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch
from kvstrata.attachment import Attachment, ended_by

import kvstrata

from .geometry import Geometry, Options
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
    """A forward pass. served: positions in the batch of the step's tokens, None: all of them, as they are; alone: rows
    that attend to themselves; next: the layer that is due."""

    step: kvstrata.Step | None
    members: list[Scheduled]
    served: torch.Tensor | None
    alone: list[slice]
    next: int = 0


class WorkerHalf:
    """layers: how many attention layers there are; set by `serve`."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._geometry: Geometry | None = None
        self._attachment = Attachment(options.socket, "vllm worker", self._register)
        self._live: dict[str, Live] = {}
        self._metadata: StepMetadata | None = None
        self._pass: Pass | None = None
        self._lost: set[int] = set()

    def serve(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._attachment.now()

    def detach(self) -> None:
        """Its sequences are gone, here and at the daemon's."""
        if session := self._attachment.let_go():
            session.close()
        self._live = {}

    def _register(self, session: kvstrata.Session) -> kvstrata.Model:
        assert self._geometry is not None
        return self._geometry.register(session)

    # A forward pass

    def begin(self, metadata: StepMetadata) -> None:
        """What a step has; which row is whose comes with the first layer."""
        for request in metadata.ended:
            self._close(request)
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
            self._attend_step(now, layer, q, k, v, out)
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

    def end(self, layers: int) -> None:
        """Commits, if all layers have been."""
        now, self._pass, self._metadata = self._pass, None, None
        if now is None or now.step is None:
            return
        if now.next != layers:
            now.step.abort()
            return
        try:
            now.step.end()
            for member in now.members:
                self._complete(member)
        except kvstrata.KvstrataError as error:
            self._lose([member.request for member in now.members], error)

    def lost_blocks(self) -> set[int]:
        """Blocks of requests that have no sequence any more, once; vLLM ends such requests."""
        lost, self._lost = self._lost, set()
        return lost

    # Sequences

    def _begin_pass(self, metadata: StepMetadata, rows: Rows) -> Pass:
        batch = [(metadata.by_block[block], slice(*rows.starts[i:i + 2])) for i, block in enumerate(rows.blocks)]
        step, members = self._begin_step([member for member, _ in batch if self._ready(member)])
        spans = [span for member, span in batch if member in members]
        alone = [span for member, span in batch if member not in members and member.first == 0]
        self._lost.update(member.first_block for member, _ in batch if member not in members and member.first > 0)
        whole = len(members) == len(batch)
        return Pass(step, members, None if whole or not spans else torch.cat([torch.arange(s.start, s.stop)
                                                                              for s in spans]), alone)

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

        def run(session: kvstrata.Session, model: kvstrata.Model) -> kvstrata.Sequence:
            # Less than a page is nothing; 0 would be no limit.
            limit = first if first and first % model.page_tokens == 0 else 1 if first == 0 else 0
            return session.open(model, self.options.plan, scheduled.known or (), max_held=limit)

        sequence = self._attachment.ask(run)
        if sequence.held > first:
            sequence.truncate(first)
        elif sequence.held < first:
            _log.warning("request %s: %d tokens were held when it was scheduled, %d are now", scheduled.request, first,
                         sequence.held)
            sequence.close()
            return None
        self._live[scheduled.request] = Live(sequence, len(scheduled.known))
        return self._live[scheduled.request]

    def _begin_step(self, members: list[Scheduled]) -> tuple[kvstrata.Step | None, list[Scheduled]]:
        """Of all members, or of those that can run."""
        if not members:
            return None, []
        try:
            return self._attachment.now()[0].step(map(self._member, members)), members
        except kvstrata.KvstrataError:
            able = [member for member in members if self._can_run(member)]
        # One that cannot run is left out each time, so this ends.
        return self._begin_step(able) if len(able) < len(members) else self._begin_step(able[:-1])

    def _can_run(self, member: Scheduled) -> bool:
        try:
            self._attachment.now()[0].step([self._member(member)]).abort()
            return True
        except kvstrata.KvstrataError as error:
            self._lose([member.request], error)
            return False

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
            live.sequence.close()

    def _lose(self, requests: list[str], error: kvstrata.KvstrataError) -> None:
        for request in requests:
            _log.error("request %s: %s", request, ended_by(error))
            self._close(request)
        if isinstance(error, kvstrata.Unavailable):
            self.detach()  # the next request attaches to the daemon that is there then


def attend_alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of a prompt's first tokens to themselves."""
    heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)
