# SPDX-License-Identifier: Apache-2.0
"""ShadowCache: a plan beside `full` in one decode, on the same queries, keys and values.

Each step has two members with the same tokens: the plan's sequence, whose output the model goes on with,
and a sequence under `full`. Per layer and query head that gives
    mass recall    softmax mass of full attention on the positions that the plan attends one by one
    output error   relative L2 distance of the plan's attention output from full's
and, per layer, which storage pages the plan read and how many bytes. For decode steps of one token. The
softmax of full attention is computed from the keys in full's pages. Threads: one.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import numpy as np

import kvstrata

from .cache import DaemonCache, from_bf16_bits
from .gguf_file import Array


RECALL_EVERY = 4  # steps: full's softmax over all its keys costs as much as the model's step


class ShadowCache:
    """Owns neither cache. REQUIRES: both hold the same tokens; the second is under plan `full`."""

    def __init__(self, session: kvstrata.Session, plan: DaemonCache, full: DaemonCache) -> None:
        if plan.tokens != full.tokens:
            raise ValueError(f"the plan's sequence has {plan.tokens} tokens, the full one {full.tokens}")
        self.recalls: list[Array] = []     # every RECALL_EVERY-th step: [layers, query heads]
        self.errors: list[Array] = []      # a step: [layers, query heads]
        self.pages: list[Array] = []       # a step: [pages], share of (layer, group) lists that read it
        self.tokens_read: list[float] = []  # a step: mean over layers and groups
        self.bytes_read: list[int] = []     # a step: attention and selection, all layers
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
        self._lists = self._rows = self._bytes = 0
        self._pages = []
        if len(self.errors) % RECALL_EVERY == 0:
            pages, _ = self._full.sequence.page_table()
            self._pages = [self._page(entry.address) for entry in pages]

    def _page(self, address: int) -> np.ndarray:
        """A bf16 page of full's, as bits [layer][K|V][kv_head][slot][dim], in place."""
        m = self._full.sequence.model
        shape = (m.layers, 2, m.kv_heads, m.page_tokens, m.head_dim)
        bits = (ctypes.c_uint16 * math.prod(shape)).from_address(address)
        return np.frombuffer(bits, np.uint16).reshape(shape)

    def _recall_of(self, layer: int, q: Array, groups: list[np.ndarray]) -> Array:
        """[query heads]; the token of this step is in the pages already."""
        n, heads = self.tokens + 1, len(q)
        bits = np.concatenate([page[layer, 0] for page in self._pages], axis=1)[:, :n]
        keys = from_bf16_bits(bits)                                         # [kv_heads, n, dim]
        grouped = q.reshape(len(keys), -1, q.shape[-1])
        logits = (grouped @ keys.swapaxes(1, 2)).reshape(heads, n) / math.sqrt(q.shape[-1])
        mass = np.exp(logits - logits.max(axis=1, keepdims=True))
        mass /= mass.sum(axis=1, keepdims=True)
        return np.array([mass[h, groups[h * len(groups) // heads]].sum() for h in range(heads)])

    def attend(self, layer: int, q: Array, k: Array, v: Array) -> Array:
        assert self._step is not None
        self._step.append(layer, np.concatenate((k, k)), np.concatenate((v, v)))
        out = self._step.attend(layer, np.concatenate((q, q)))
        groups = self._step.selected_tokens(0)
        if self._pages:
            self._recall.append(self._recall_of(layer, q[0], groups))
        norm = np.maximum(np.linalg.norm(out[1], axis=-1), np.float32(1e-30))
        self._error.append(np.linalg.norm(out[0] - out[1], axis=-1) / norm)
        cost = self._step.cost(0)
        self._bytes += cost.attend_bytes + cost.select_bytes
        for positions in groups:
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
        if self._recall:
            self.recalls.append(np.stack(self._recall))
        self.errors.append(np.stack(self._error))
        self.pages.append(self._read / self._lists)
        self.tokens_read.append(self._rows / self._lists)
        self.bytes_read.append(self._bytes)

    def abort(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.abort()

    def prefill_done(self) -> None:
        raise RuntimeError("prefill the two sequences before shadowing them")

    def report(self, first: int, entropy: Array | None = None, surprisal: Array | None = None) -> None:
        self._plan.report(first, entropy, surprisal)
