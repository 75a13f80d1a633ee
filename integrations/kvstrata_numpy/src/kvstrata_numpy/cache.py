# SPDX-License-Identifier: Apache-2.0
"""Where keys and values live while the model runs.

    OwnCache      in this process, attention in numpy: what an engine without kvstrata does
    DaemonCache   in kvstratad's pages, selection and attention through libkvstrata

A cache is a sequence: begin(ids), attend() once for each layer in order, end() or abort(). q, k, v come
after rotary embedding (before it from an engine with pre_rope, which DaemonCache alone serves), fp32 [new tokens][heads][head_dim]; nothing is kept of them after the call.
prefill_done() follows the prompt; report() gives entropies or surprisals (nats) from position `first` on.
Threads: one thread a cache.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from .gguf_file import Array

if TYPE_CHECKING:
    from kvstrata import Sequence as DaemonSequence
    from kvstrata import Session, Step

    from .llama import Config


class Cache(Protocol):
    tokens: int  # committed

    def begin(self, ids: Sequence[int]) -> None: ...

    def attend(self, layer: int, q: Array, k: Array, v: Array) -> Array: ...

    def end(self) -> None: ...

    def abort(self) -> None: ...

    def prefill_done(self) -> None: ...

    def report(self, first: int, entropy: Array | None = None, surprisal: Array | None = None) -> None: ...


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """uint16 bit patterns of fp32 values, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16).astype(np.uint16)


def from_bf16_bits(bits: np.ndarray) -> Array:
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


class OwnCache:
    """Keys and values as bf16 values in fp32 arrays of this process; dense attention by BLAS."""

    def __init__(self, config: Config, capacity: int = 1024) -> None:
        self.tokens = 0
        self._config = config
        self._new = 0
        self._rows = np.empty((config.layers, 2, config.kv_heads, capacity, config.head_dim), np.float32)

    def begin(self, ids: Sequence[int]) -> None:
        self._new = len(ids)
        capacity = self._rows.shape[3]
        if self.tokens + self._new > capacity:
            grown = max(2 * capacity, self.tokens + self._new)
            rows = np.empty((*self._rows.shape[:3], grown, self._rows.shape[4]), np.float32)
            rows[:, :, :, :self.tokens] = self._rows[:, :, :, :self.tokens]
            self._rows = rows

    def attend(self, layer: int, q: Array, k: Array, v: Array) -> Array:
        first, end = self.tokens, self.tokens + self._new
        keys, values = self._rows[layer]
        keys[:, first:end] = from_bf16_bits(bf16_bits(k)).swapaxes(0, 1)
        values[:, first:end] = from_bf16_bits(bf16_bits(v)).swapaxes(0, 1)
        out = np.empty(q.shape, np.float32)
        group = q.shape[1] // k.shape[1]
        for head in range(k.shape[1]):
            heads = slice(head * group, (head + 1) * group)
            out[:, heads] = self._attend_head(q[:, heads], keys[head, :end], values[head, :end], first)
        return out

    @staticmethod
    def _attend_head(q: Array, keys: Array, values: Array, first: int) -> Array:
        """q [n, G, d] over keys, values [N, d]; row i sees the first `first` + i + 1 rows."""
        n, group, d = q.shape
        scores = (q.reshape(n * group, d) @ keys.T).reshape(n, group, -1)
        scores *= np.float32(1 / math.sqrt(d))
        if n > 1:
            future = np.arange(n)[None, :] > np.arange(n)[:, None]
            scores[:, :, first:] += np.where(future, np.float32(-np.inf), np.float32(0))[:, None]
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        total = scores.sum(axis=-1, keepdims=True)
        out = (scores.reshape(n * group, -1) @ values).reshape(n, group, d)
        return out / total

    def end(self) -> None:
        self.tokens += self._new

    def abort(self) -> None:
        self._new = 0

    def prefill_done(self) -> None:
        """Nothing selects here."""

    def report(self, first: int, entropy: Array | None = None, surprisal: Array | None = None) -> None:
        """Nothing needs series here."""


class DaemonCache:
    """A sequence of kvstratad. The step of one forward pass is open between begin and end.

    `step` is that step, for who wants to ask what was selected; `seconds` is the time spent in append,
    select and attend so far.
    """

    def __init__(self, session: Session, sequence: DaemonSequence) -> None:
        self.tokens = sequence.tokens
        self.sequence = sequence
        self.step: Step | None = None
        self.seconds = 0.0
        self._session = session
        self._new = 0

    def begin(self, ids: Sequence[int]) -> None:
        self._new = len(ids)
        self.step = self._session.step([(self.sequence, ids)])

    def attend(self, layer: int, q: Array, k: Array, v: Array) -> Array:
        assert self.step is not None
        begin = time.perf_counter()
        self.step.append(layer, k, v)
        out = self.step.attend(layer, q)
        self.seconds += time.perf_counter() - begin
        return out

    def end(self) -> None:
        step, self.step = self.step, None
        assert step is not None
        step.end()
        self.tokens += self._new

    def abort(self) -> None:
        step, self.step = self.step, None
        if step is not None:
            step.abort()

    def prefill_done(self) -> None:
        self.sequence.prefill_done()

    def report(self, first: int, entropy: Array | None = None, surprisal: Array | None = None) -> None:
        self.sequence.report(first, entropy=entropy, surprisal=surprisal)

    def close(self) -> None:
        self.sequence.close()
