# SPDX-License-Identifier: Apache-2.0
"""Engine: a model, its tokenizer and, optionally, a session with kvstratad. Prefill, then greedy decode.

Series (nats): surprisal of a prompt token is -ln p(token | what precedes it), 0 for the first; entropy of a
token is that of the next-token distribution its own step gives, reported after the step.

    engine = Engine.load(path)
    with kvstrata.attach() as session:
        engine.attach(session)
        cache = engine.open("quest{budget = 1024}", ids)      # prefix hits are skipped by prefill
        logits = engine.prefill(cache, ids)
        for token in engine.decode(cache, logits, limit=48): ...

Threads: one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

import kvstrata

from . import gguf_file
from .cache import Cache, DaemonCache, OwnCache
from .gguf_file import Array
from .llama import Llama, Progress, entropy_of, log_softmax
from .tokenizer import Tokenizer

CHUNK = 512        # prefill chunks end at multiples of it
PAGE_TOKENS = 32   # tokens of the daemon's storage page
LOGIT_ROWS = 128   # at a time where every position's logits are needed: 25 MB of them


@dataclass
class Engine:
    llama: Llama
    tokenizer: Tokenizer
    digest: str
    path: str
    session: kvstrata.Session | None = None
    model: kvstrata.Model | None = None

    @staticmethod
    def load(path: str | os.PathLike[str], progress: Progress | None = None, pre_rope: bool = False) -> Engine:
        """pre_rope: keys and queries go to the daemon before rotary embedding, and it rotates them. Plans
        with `compact` then go beyond the model's context; own_cache() does not exist.

        Errors: gguf_file.GgufError.
        """
        file = gguf_file.read(path)
        return Engine(Llama(file, progress, pre_rope), Tokenizer(file), file.digest(), os.fspath(path))

    def attach(self, session: kvstrata.Session, page_tokens: int = PAGE_TOKENS) -> None:
        """Registers the model with the daemon."""
        c = self.llama.config
        self.session = session
        self.model = session.register_model(
            c.name[:63], self.digest, layers=c.layers, query_heads=c.query_heads, kv_heads=c.kv_heads,
            head_dim=c.head_dim, page_tokens=page_tokens, dtype=kvstrata.DType.BF16,
            boundary_tokens=self.tokenizer.boundary_tokens(), keys_pre_rope=c.pre_rope,
            rope_theta=c.rope_theta if c.pre_rope else 0, rope_dim=c.head_dim if c.pre_rope else 0)

    def open(self, plan: str, ids: list[int], only_reported: bool = True) -> DaemonCache:
        """A sequence of the daemon under a plan; cache.tokens of the prompt are there already.

        only_reported: no more of them than have the series that the plan needs, so that prefill with
        `surprisal` completes it. False where `known` surprisals will be reported, or none.
        """
        if self.session is None or self.model is None:
            raise RuntimeError("the engine is not attached: call attach(session) first")
        return DaemonCache(self.session,
                           self.session.open(self.model, plan, ids, only_reported=only_reported))

    def own_cache(self, capacity: int = 1024) -> OwnCache:
        """Keys and values in this process. RuntimeError for an engine that was loaded with pre_rope."""
        if self.llama.config.pre_rope:
            raise RuntimeError("an own cache does not rotate keys: load the engine without pre_rope")
        return OwnCache(self.llama.config, capacity)

    def prefill(self, cache: Cache, ids: list[int], progress: Progress | None = None,
                surprisal: Array | None = None, known: Array | None = None) -> Array:
        """Appends what the cache lacks of the prompt; logits [vocabulary] of its last token.

        surprisal [len(ids)], if given, is filled for the positions computed here, at the price of all
        their logits, and reported; after a prefix hit not the first of them, because the logits before
        it are not. `known` are surprisals of the whole prompt from an earlier prefill.
        """
        first = cache.tokens
        if first >= len(ids):
            raise ValueError(f"the cache holds {first} tokens, the prompt has {len(ids)}: "
                             "nothing is left to compute")
        hidden = None
        while cache.tokens < len(ids):
            begin = cache.tokens
            end = min(len(ids), (begin // CHUNK + 1) * CHUNK)
            hidden = self.llama.forward(ids[begin:end], cache)
            if surprisal is not None:
                self._surprise(hidden, ids[begin + 1:end + 1], surprisal[begin + 1:end + 1])
            if progress:
                progress(end - first, len(ids) - first)
        series = known if known is not None else surprisal
        if series is not None:
            begin = 0 if known is not None or first == 0 else first + 1
            cache.report(begin, surprisal=np.maximum(series[begin:], 0))
        cache.prefill_done()
        assert hidden is not None
        return self.llama.logits(hidden[-1:])[0]

    def step(self, cache: Cache, token: int) -> Array:
        """Feeds one token; reports its entropy. Logits [vocabulary]."""
        position = cache.tokens
        logits = self.llama.logits(self.llama.forward([token], cache))[0]
        cache.report(position, np.maximum(entropy_of(logits[None]), 0))
        return logits

    def decode(self, cache: Cache, logits: Array, limit: int, stop: bool = True) -> Iterator[int]:
        """Greedy: yields at most `limit` tokens after the prompt, each once it is known.

        All but the last yielded token are in the cache when the iterator ends. Stops at a stop token,
        which is not yielded; with stop = False goes on beyond it.
        """
        stops = self.tokenizer.stops() if stop else frozenset()
        for i in range(limit):
            token = int(logits.argmax())
            if token in stops:
                return
            yield token
            if i + 1 < limit:
                logits = self.step(cache, token)

    def _surprise(self, hidden: Array, following: list[int], out: Array) -> None:
        for at in range(0, len(following), LOGIT_ROWS):
            targets = np.asarray(following[at:at + LOGIT_ROWS])
            log_p = log_softmax(self.llama.logits(hidden[at:at + len(targets)]))
            out[at:at + len(targets)] = -log_p[np.arange(len(targets)), targets]
