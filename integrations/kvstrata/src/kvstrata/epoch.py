# SPDX-License-Identifier: Apache-2.0
"""What an engine's keys and values belong to: the model's identity, and the last reset.

    epoch = Epoch(Identity(digest, None))
    epoch.follow(reset=new_reset())     # the engine was told to forget what it has cached
    epoch.follow(identity=model.now())  # the model may have changed
    session.register_model(name, epoch.digest(), ...)

A reset begins an epoch, whose keys and values are found within it alone: by nobody of before, and by no other engine.
So does a model that has changed since it was loaded: it has another identity. Threads: one at a time.
"""

from __future__ import annotations

import hashlib
import logging
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .torch_identity import Identity

_log = logging.getLogger("kvstrata")


def new_reset() -> str:
    """A name that no other engine's reset has."""
    return uuid.uuid4().hex


@dataclass
class Epoch:
    """identity None: none is known yet; reset: the last one's name, "" where there was none."""

    identity: Identity | None = None
    reset: str = ""

    def __post_init__(self) -> None:
        self._warn()

    def digest(self) -> str:
        """That keys and values of the epoch are registered under."""
        assert self.identity is not None
        if not self.reset:
            return self.identity.digest
        return hashlib.sha256(f"{self.identity.digest}\n{self.reset}".encode()).hexdigest()

    @property
    def private(self) -> bool:
        """Whether nobody may find what is computed, since nobody can know what it is of."""
        return self.identity is not None and self.identity.private is not None

    def follow(self, reset: str | None = None, identity: Identity | None = None) -> bool:
        """Takes what is given; whether that began an epoch."""
        began = (reset is not None and reset != self.reset) or (identity is not None and identity != self.identity)
        self.reset = self.reset if reset is None else reset
        if identity is not None and identity != self.identity:
            self.identity = identity
            self._warn()
        return began

    def _warn(self) -> None:
        if self.identity is not None and self.identity.private is not None:
            _log.warning("nothing is found, and nothing is kept for others: %s", self.identity.private)
