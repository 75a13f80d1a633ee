# SPDX-License-Identifier: Apache-2.0
"""An enabled model: what identifies it now, its sequences' session, and what its plan and options are.

What the model is is asked before each generate() and each first forward pass on a cache (identity.py). Another identity
is another model to the daemon: new sequences are opened under it, and those of caches that live stay under the old one.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from kvstrata.errors import error_of
from kvstrata.torch_identity import Identity
from kvstrata.torch_model import registered_scale

import kvstrata

from .hooks import note_outputs
from .identity import identity_of
from .link import Link
from .rows import Row
from .served import Served, served
from .verify import Verifier

if TYPE_CHECKING:
    from .cache import KvstrataCache


@dataclass(frozen=True)
class Attachment:
    """The model as the daemon knows it, by one session. digest: its identity; private: None, or why nothing of it may
    be found by others. device: where tensors are taken."""

    link: Link
    session: kvstrata.Session
    model: kvstrata.Model
    device: torch.device
    digest: str
    private: str | None

    def open(self, plan: str, known: list[int], *, private: bool, **options: Any) -> kvstrata.Sequence:
        """As Session.open; waits for a daemon that is busy."""
        if private:
            options["private"] = True
        return self.link.patient(lambda: self.session.open(self.model, plan, known, **options))


class Engine:
    """plan, settle: enable()'s. link: to the daemon. head: the model's, for series."""

    def __init__(self, model: Any, plan: str, *, socket: str | None, digest: str | None, boundary: list[int],
                 settle: bool) -> None:
        self.served: Served = served(model)
        self.plan, self.settle = plan, settle
        self.link = Link(socket, model.device)
        self.head: Callable[[torch.Tensor], torch.Tensor] = model.get_output_embeddings()
        self._model_type, self._boundary = model.config.model_type, boundary
        self._warned: set[str] = set()
        self._registered: Attachment | None = None
        self.link.reach()  # before the weights are read
        note_outputs(model)
        self._asking = threading.Lock()
        self.identity = identity_of(model, digest)
        self._verifier = Verifier.from_environment(model, self.served, plan)
        self.attachment().open(plan, [], private=False).close()  # what generate() would be refused is refused now

    def attachment(self) -> Attachment:
        """Attaches the model as it is now to a living daemon. Unavailable, DeadlineExceeded: as Link.reach."""
        session = self.link.reach()
        digest, private = self._now()
        last = self._registered
        if last is None or (last.session, last.digest, last.private) != (session, digest, private):
            self._registered = Attachment(self.link, session, self._register(session, digest), self.link.device, digest,
                                          private)
        assert self._registered is not None
        return self._registered

    def _now(self) -> Identity:
        with self._asking:
            return self.identity.now()

    def _register(self, session: kvstrata.Session, digest: str) -> kvstrata.Model:
        s = self.served
        return session.register_model(self._model_type[:63], digest, layers=len(s.pages_of), query_heads=s.query_heads,
                                      kv_heads=s.kv_heads, head_dim=s.head_dim, dtype=s.dtype,
                                      boundary_tokens=self._boundary, scale=registered_scale(s.scale, s.head_dim))

    def require_same(self, cache: KvstrataCache) -> None:
        """That the model still is what filled the cache. CACHE_LOST; nothing of private sequences is anybody else's."""
        if all(row.private for row in cache.rows):
            return
        digest, private = self._now()
        if digest != cache.attachment.digest:
            raise _lost("the model has changed since the cache was filled (weights, adapters or settings)")
        if private is not None:
            raise _lost(f"what is computed now may not be found by others, and what the cache has may: {private}")

    def require_session(self, cache: KvstrataCache) -> None:
        """That its sequences live. CACHE_LOST."""
        if cache.session is not self.link.session:
            raise _lost("the cache was the daemon's that is gone")

    def verify(self, rows: list[Row]) -> None:
        """As KVSTRATA_VERIFY says, of rows that were opened just now. HIT_MISMATCH."""
        if self._verifier is not None:
            self._verifier.check(rows)

    def close(self) -> None:
        self.identity.close()
        self.link.close()

    def settled(self, sequence: kvstrata.Sequence) -> None:
        """With settle, waits until all that was committed is in force: what is decoded next depends on no worker."""
        if self.settle:
            self.link.patient(sequence.settle)

    def warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(f"kvstrata: {text}", stacklevel=2)


def _lost(why: str) -> kvstrata.KvstrataError:
    return error_of(9, "CACHE_LOST", f"{why}; make another with kvstrata_transformers.cache(model), and give it the "
                    "whole conversation")
