# SPDX-License-Identifier: Apache-2.0
"""The forward pass of a Llama-family model in numpy, fp32. Attention is the cache's business.

Weights lie as [out, in] rows. Norm weights are folded into the matrices that follow them, q, k, v and
gate, up are stacked: a layer is four matrix products. GGUF stores llama's q and k rows so that rotary
pairs are neighbours (2i, 2i + 1); they are put back to halves (i, i + d/2) at load, where numpy rotates
contiguous slices.

Threads: forward() from one thread at a time; BLAS uses its own threads inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .cache import Cache
from .gguf_file import Array, GgufError, GgufFile

Progress = Callable[[int, int], None]  # done, of


@dataclass(frozen=True)
class Config:
    """Geometry of the model; lengths in tokens."""

    name: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    width: int
    vocabulary: int
    context: int
    rope_theta: float
    epsilon: float
    pre_rope: bool = False    # keys and queries go to the cache before rotary embedding


@dataclass
class Layer:
    qkv: Array       # [(Hq + 2 Hkv) d, width]
    output: Array    # [width, Hq d]
    gate_up: Array   # [2 ffn, width]
    down: Array      # [width, ffn]


def config_of(file: GgufFile) -> Config:
    architecture = file.require("general.architecture")
    if architecture != "llama":
        raise GgufError(f"{file.path}: general.architecture is {architecture!r}; supported: 'llama'")
    scaling = file.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise GgufError(f"{file.path}: llama.rope.scaling.type is {scaling!r}; supported: 'none'")
    heads, width = file.require("llama.attention.head_count"), file.require("llama.embedding_length")
    head_dim = file.get("llama.attention.key_length", width // heads)
    rotated = file.get("llama.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise GgufError(f"{file.path}: llama.rope.dimension_count is {rotated}; "
                        f"supported: the head's {head_dim}")
    return Config(
        name=file.get("general.name", architecture),
        layers=file.require("llama.block_count"), query_heads=heads,
        kv_heads=file.get("llama.attention.head_count_kv", heads), head_dim=head_dim, width=width,
        vocabulary=len(file.require("tokenizer.ggml.tokens")),
        context=file.require("llama.context_length"),
        rope_theta=file.get("llama.rope.freq_base", 10000.0),
        epsilon=file.require("llama.attention.layer_norm_rms_epsilon"))


def halves(weight: Array, heads: int) -> Array:
    """Rows of q or k, from neighbouring rotary pairs to halves."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)


def rms_norm(x: Array, epsilon: float) -> Array:
    scale = np.einsum("nd,nd->n", x, x) / np.float32(x.shape[1])
    return x * (1.0 / np.sqrt(scale + np.float32(epsilon)))[:, None]


def _read_layer(file: GgufFile, config: Config, i: int) -> Layer:
    get = lambda name: file.tensor(f"blk.{i}.{name}.weight")
    qkv = np.concatenate([halves(get("attn_q"), config.query_heads),
                          halves(get("attn_k"), config.kv_heads), get("attn_v")])
    gate_up = np.concatenate([get("ffn_gate"), get("ffn_up")])
    expected = (config.query_heads + 2 * config.kv_heads) * config.head_dim
    if qkv.shape != (expected, config.width):
        raise GgufError(f"{file.path}: layer {i}: q, k, v have shape {qkv.shape}; "
                        f"the metadata asks for {(expected, config.width)}")
    return Layer(qkv * get("attn_norm"), get("attn_output"), gate_up * get("ffn_norm"), get("ffn_down"))


class Llama:
    """A loaded model. `forward` appends tokens to a cache and returns their last hidden states.

    With pre_rope the cache rotates: any number of tokens, if it moves them to positions the model knows.
    """

    def __init__(self, file: GgufFile, progress: Progress | None = None, pre_rope: bool = False) -> None:
        self.config = config = replace(config_of(file), pre_rope=pre_rope)
        if pre_rope and "rope_freqs.weight" in file.names():
            raise GgufError(f"{file.path}: rope_freqs.weight scales the rotary frequencies, which a cache that "
                            "rotates does not know; load the model without pre_rope")
        self.layers: list[Layer] = []
        for i in range(config.layers):
            self.layers.append(_read_layer(file, config, i))
            if progress:
                progress(i + 1, config.layers)
        self.embedding = file.tensor("token_embd.weight")
        head = file.tensor("output.weight") if "output.weight" in file.names() else self.embedding
        self.norm = file.tensor("output_norm.weight")
        self.head = head
        factors = file.tensor("rope_freqs.weight") if "rope_freqs.weight" in file.names() else 1.0
        frequency = config.rope_theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim) / factors
        angle = np.arange(config.context)[:, None] * frequency
        self._cos = np.cos(angle).astype(np.float32)[:, None]  # [context, 1, d/2]
        self._sin = np.sin(angle).astype(np.float32)[:, None]

    def forward(self, ids: Sequence[int], cache: Cache) -> Array:
        """Hidden states [n, width] of the new tokens, normed. Keys and values go to the cache."""
        first, n = cache.tokens, len(ids)
        if first + n > self.config.context and not self.config.pre_rope:
            raise ValueError(f"{first} + {n} tokens exceed the model's context of {self.config.context}; "
                             "shorten the document")
        position = slice(first, first + n)
        x = self.embedding[np.asarray(ids)]
        cache.begin(ids)
        try:
            for i, layer in enumerate(self.layers):
                x = self._layer(i, layer, x, position, cache)
        except BaseException:
            cache.abort()
            raise
        cache.end()
        return rms_norm(x, self.config.epsilon) * self.norm

    def logits(self, hidden: Array) -> Array:
        """[n, vocabulary]"""
        return hidden @ self.head.T

    def _layer(self, i: int, layer: Layer, x: Array, position: slice, cache: Cache) -> Array:
        c, n = self.config, len(x)
        qkv = (rms_norm(x, c.epsilon) @ layer.qkv.T).reshape(n, -1, c.head_dim)
        rotated = c.query_heads + c.kv_heads
        qk = qkv[:, :rotated] if c.pre_rope else self.rotate(qkv[:, :rotated], position)
        out = cache.attend(i, qk[:, :c.query_heads], qk[:, c.query_heads:], qkv[:, rotated:])
        x = x + out.reshape(n, -1) @ layer.output.T
        gate, up = np.split(rms_norm(x, c.epsilon) @ layer.gate_up.T, 2, axis=1)
        return x + (silu(gate) * up) @ layer.down.T

    def rotate(self, qk: Array, position: slice) -> Array:
        """Rotary embedding of rows [n, heads, d] at positions of the model's context."""
        cos, sin, half = self._cos[position], self._sin[position], qk.shape[2] // 2
        left, right = qk[:, :, :half], qk[:, :, half:]
        out = np.empty(qk.shape, np.float32)
        np.subtract(left * cos, right * sin, out=out[:, :, :half])
        np.add(right * cos, left * sin, out=out[:, :, half:])
        return out


def silu(x: Array) -> Array:
    with np.errstate(over="ignore"):  # exp overflows to infinity, and x / inf is the right 0
        return x / (1.0 + np.exp(-x))


def log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def entropy_of(logits: Array) -> Array:
    """Nats, of the raw next-token distribution of each row."""
    log_p = log_softmax(logits)
    return -(np.exp(log_p) * log_p).sum(axis=-1)
