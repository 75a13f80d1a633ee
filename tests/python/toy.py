# SPDX-License-Identifier: Apache-2.0
"""A toy model's tensors, and attention written out in numpy: what the bindings are held to."""

from __future__ import annotations

import numpy as np

import kvstrata

LAYERS, HEADS, KV_HEADS, DIM = 2, 4, 2, 64


def bf16(x: np.ndarray) -> np.ndarray:
    """fp32 values that bf16 holds exactly."""
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)


def bits(x: np.ndarray) -> np.ndarray:
    """uint16 patterns of values that are exact in bf16."""
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)


class Toy:
    """k, v [layers][tokens][kv heads][dim], q [layers][tokens][heads][dim]"""

    def __init__(self, rng: np.random.Generator, tokens: int, layers: int = LAYERS, heads: int = HEADS,
                 kv_heads: int = KV_HEADS) -> None:
        make = lambda heads: bf16(rng.standard_normal((layers, tokens, heads, DIM)))
        self.layers, self.heads, self.kv_heads = layers, heads, kv_heads
        self.k, self.v, self.q = make(kv_heads), make(kv_heads), make(heads)
        self.ids = rng.integers(0, 1 << 30, tokens).astype(np.int32)
        self.digest = f"toy:{rng.integers(1 << 60)}"

    def register(self, session: kvstrata.Session) -> kvstrata.Model:
        return session.register_model("toy", self.digest, layers=self.layers, query_heads=self.heads,
                                      kv_heads=self.kv_heads, head_dim=DIM, page_tokens=16)

    def feed(self, session: kvstrata.Session, sequence: kvstrata.Sequence, first: int, end: int
             ) -> list[np.ndarray]:
        """Appends [first, end); the outputs [tokens][heads][dim] of each layer."""
        with session.step([(sequence, self.ids[first:end])]) as step:
            out = []
            for layer in range(self.layers):
                step.append(layer, self.k[layer, first:end], self.v[layer, first:end])
                out.append(step.attend(layer, self.q[layer, first:end]))
        return out

    def expected(self, layer: int, t: int) -> tuple[np.ndarray, np.ndarray]:
        """Full attention of token t: out [heads][dim], lse [heads], in fp64."""
        group = self.heads // self.kv_heads
        out, lse = [], []
        for head in range(self.heads):
            k, v = (x[layer, :t + 1, head // group].astype(np.float64) for x in (self.k, self.v))
            scores = k @ self.q[layer, t, head] / np.sqrt(DIM)
            top = scores.max()
            weights = np.exp(scores - top)
            lse.append(top + np.log(weights.sum()))
            out.append(weights @ v / weights.sum())
        return np.array(out), np.array(lse)
