"""ShadowCache: a plan beside `full` in one decode, on the same queries, keys and values.

Each step has two members with the same tokens: the plan's sequence, whose output the model goes on with,
and a sequence under `full`. Per layer and query head that gives
    mass recall    exp(lse of the plan - lse of full): softmax mass of full attention that was read
    output error   relative L2 distance of the plan's attention output from full's
and, per layer, which storage pages the plan read. For decode steps of one token. Threads: one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import kvstrata

from .cache import DaemonCache
from .gguf_file import Array


class ShadowCache:
    """Owns neither cache. REQUIRES: both hold the same tokens; the second is under plan `full`."""

    def __init__(self, session: kvstrata.Session, plan: DaemonCache, full: DaemonCache) -> None:
        if plan.tokens != full.tokens:
            raise ValueError(f"the plan's sequence has {plan.tokens} tokens, the full one {full.tokens}")
        self.recalls: list[Array] = []     # a step: [layers, query heads]
        self.errors: list[Array] = []      # a step: [layers, query heads]
        self.pages: list[Array] = []       # a step: [pages], share of (layer, group) lists that read it
        self.tokens_read: list[float] = []  # a step: mean over layers and groups
        self._session, self._plan, self._full = session, plan, full
        self._step: kvstrata.Step | None = None
        self._page_tokens = plan.sequence.model.page_tokens

    @property
    def tokens(self) -> int:
        return self._plan.tokens

    def begin(self, ids: Sequence[int]) -> None:
        if len(ids) != 1:
            raise ValueError(f"{len(ids)} tokens: a shadowed step has one")
        self._step = self._session.step([(self._plan.sequence, ids), (self._full.sequence, ids)])
        self._recall: list[Array] = []
        self._error: list[Array] = []
        self._read = np.zeros(self.tokens // self._page_tokens + 1, np.float32)
        self._lists = self._rows = 0

    def attend(self, layer: int, q: Array, k: Array, v: Array) -> Array:
        assert self._step is not None
        self._step.append(layer, np.concatenate((k, k)), np.concatenate((v, v)))
        lse = np.empty((2, q.shape[1]), np.float32)
        out = self._step.attend(layer, np.concatenate((q, q)), lse=lse)
        self._recall.append(np.exp(lse[0] - lse[1]))
        norm = np.maximum(np.linalg.norm(out[1], axis=-1), np.float32(1e-30))
        self._error.append(np.linalg.norm(out[0] - out[1], axis=-1) / norm)
        for positions in self._step.selected_tokens(0):
            self._read[np.unique(positions // self._page_tokens)] += 1
            self._lists += 1
            self._rows += len(positions)
        return out[:1]

    def end(self) -> None:
        step, self._step = self._step, None
        assert step is not None
        step.end()
        self._plan.tokens += 1
        self._full.tokens += 1
        self.recalls.append(np.stack(self._recall))
        self.errors.append(np.stack(self._error))
        self.pages.append(self._read / self._lists)
        self.tokens_read.append(self._rows / self._lists)

    def abort(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.abort()

    def prefill_done(self) -> None:
        raise RuntimeError("prefill the two sequences before shadowing them")

    def report(self, first: int, entropy: Array) -> None:
        self._plan.report(first, entropy)
