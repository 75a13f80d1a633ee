# SPDX-License-Identifier: Apache-2.0
"""SmolLM2 (a Llama) with frozen weights and a low-rank adapter on attention: forward for training, greedy decoding.

Effective weights W + scale * B A are made once a step, for all layers by a few batched products, rounded to the
model's type and used like plain ones. So what is trained is what a merged model computes, and activations are those
of the plain model: beside the residual stream a token keeps about 16 KB a layer in bf16 for the backward pass
(weights of the MLP are frozen, so its inputs are not kept), 475 KB in 30 layers.

`transformers` is not used: its norms and rotations are a dozen kernels each, over fp32 copies that backward keeps.
research/tests/test_retrieval.py holds logits and greedy answers to it.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

PARTS = ("q_proj", "k_proj", "v_proj", "o_proj")


class Shape(NamedTuple):
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    epsilon: float
    rope_theta: float


def shape_of(folder: pathlib.Path) -> Shape:
    """Errors: ValueError, a config that this forward pass does not compute."""
    c = json.loads((folder / "config.json").read_text())
    if c["model_type"] != "llama" or not c.get("tie_word_embeddings") or c.get("attention_bias"):
        raise ValueError(f"{folder}: wanted is a llama with tied embeddings and no biases")
    theta = (c.get("rope_parameters") or c)["rope_theta"]
    return Shape(c["num_hidden_layers"], c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"],
                 c["head_dim"], c["rms_norm_eps"], theta)


class Attention(NamedTuple):
    """All layers, in the model's type: `qkv` each [(heads + 2 kv_heads) head_dim, width], `out` [width, width]."""
    qkv: Sequence[Tensor]
    out: Sequence[Tensor]


class Rope(NamedTuple):
    """[positions, head_dim / 2] each, in the model's type."""
    cos: Tensor
    sin: Tensor


@dataclass
class Cache:
    """Keys and values of each layer, [rows, kv_heads, capacity, head_dim]."""
    keys: list[Tensor]
    values: list[Tensor]


def rope(theta: float, head_dim: int, positions: int, device: torch.device, dtype: torch.dtype) -> Rope:
    frequency = theta ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim)
    angles = torch.arange(positions, device=device, dtype=torch.float64)[:, None] * frequency
    return Rope(angles.cos().to(dtype), angles.sin().to(dtype))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., head_dim], halves of it being the pairs; cos and sin broadcast to [..., head_dim / 2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Adapter(torch.nn.Module):
    """fp32 factors of all layers: A [layers, rank, in], B [layers, out, rank]; B begins at 0, so W is as it was.
    `scale` multiplies B A."""

    def __init__(self, shape: Shape, rank: int, scale: float, seed: int) -> None:
        super().__init__()
        self.rank, self.scale = rank, scale
        kv = shape.kv_heads * shape.head_dim
        outs = {"q_proj": shape.heads * shape.head_dim, "k_proj": kv, "v_proj": kv, "o_proj": shape.width}
        random = torch.Generator().manual_seed(seed)
        for part in PARTS:
            inner = shape.heads * shape.head_dim if part == "o_proj" else shape.width
            first = torch.randn(shape.layers, rank, inner, generator=random) / math.sqrt(inner)
            self.register_parameter(f"{part}_A", torch.nn.Parameter(first))
            self.register_parameter(f"{part}_B", torch.nn.Parameter(torch.zeros(shape.layers, outs[part], rank)))

    def change(self, part: str) -> Tensor:
        """[layers, out, in] that is added to W."""
        return self.scale * torch.bmm(getattr(self, f"{part}_B"), getattr(self, f"{part}_A"))

    def tensors(self) -> dict[str, Tensor]:
        """Each layer's by its name in the model, bf16."""
        return {f"model.layers.{i}.self_attn.{part}.lora_{side}": of_layer.contiguous()
                for part in PARTS for side in "AB"
                for i, of_layer in enumerate(getattr(self, f"{part}_{side}").detach().to("cpu", torch.bfloat16))}


class Llama:
    """Frozen. Weights of the MLP, norms and embeddings are in `dtype`, those of attention in fp32 until they are
    used."""

    def __init__(self, folder: pathlib.Path, device: torch.device, dtype: torch.dtype) -> None:
        self.shape, self.device, self.dtype = shape_of(folder), device, dtype
        found = load_file(folder / "model.safetensors", device=str(device))

        def of(name: str, kind: torch.dtype = dtype) -> list[Tensor]:
            return [found[f"model.layers.{i}.{name}.weight"].to(kind) for i in range(self.shape.layers)]

        self.embedding = found["model.embed_tokens.weight"].to(dtype)
        self.norm = found["model.norm.weight"].to(dtype)
        self.norms = list(zip(of("input_layernorm"), of("post_attention_layernorm")))
        self.mlp_in = [torch.cat(pair) for pair in zip(of("mlp.gate_proj"), of("mlp.up_proj"))]
        self.mlp_out = of("mlp.down_proj")
        self.attention_weights = {part: torch.stack(of(f"self_attn.{part}", torch.float32)) for part in PARTS}
        self.repeats_kv = device.type == "cpu"  # a kernel that shares keys among heads is not everywhere

    def attention(self, adapter: Adapter | None) -> Attention:
        """With the adapter's change, through which gradients flow."""
        w = {part: weight if adapter is None else weight + adapter.change(part)
             for part, weight in self.attention_weights.items()}
        qkv = torch.cat([w[part] for part in PARTS[:3]], dim=1).to(self.dtype)
        return Attention(qkv.unbind(0), w["o_proj"].to(self.dtype).unbind(0))

    def rope(self, theta: float, positions: int) -> Rope:
        return rope(theta, self.shape.head_dim, positions, self.device, self.dtype)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (self.shape.width,), weight, self.shape.epsilon)

    def _projected(self, x: Tensor, qkv: Tensor, turn: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """x [rows, n, width] to q [rows, heads, n, d], k and v [rows, kv_heads, n, d]; turn broadcasts to
        [rows, n, 1, d / 2]."""
        s = self.shape
        split = F.linear(x, qkv).unflatten(-1, (s.heads + 2 * s.kv_heads, s.head_dim))
        qk, v = split[:, :, :s.heads + s.kv_heads], split[:, :, s.heads + s.kv_heads:]
        qk = rotated(qk, *turn).transpose(1, 2)
        return qk[:, :s.heads], qk[:, s.heads:], v.transpose(1, 2)

    def _mlp(self, x: Tensor, layer: int) -> Tensor:
        gate, up = F.linear(x, self.mlp_in[layer]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.mlp_out[layer])

    def hidden(self, ids: Tensor, weights: Attention, turn: Rope, cache: Cache | None = None) -> Tensor:
        """ids [rows, n] to what the head reads, [rows, n, width]. Positions begin at 0; attention is causal. With a
        cache, keys and values are put at its beginning."""
        n, group = ids.shape[1], self.shape.heads // self.shape.kv_heads
        turn = Rope(turn.cos[:n, None], turn.sin[:n, None])
        x = F.embedding(ids, self.embedding)
        for i, (before, after) in enumerate(self.norms):
            q, k, v = self._projected(self._normed(x, before), weights.qkv[i], turn)
            if cache is not None:
                cache.keys[i][:, :, :n], cache.values[i][:, :, :n] = k, v
            if self.repeats_kv:
                k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not self.repeats_kv)
            x = x + F.linear(attended.transpose(1, 2).flatten(2), weights.out[i])
            x = x + self._mlp(self._normed(x, after), i)
        return self._normed(x, self.norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32. hidden [..., width]; only of positions that are asked for: a row is 192 KB."""
        return F.linear(hidden, self.embedding).float()

    def decoded(self, ids: Tensor, at: Tensor, weights: Attention, turn: Rope, cache: Cache) -> Tensor:
        """One token a row: ids [rows], their positions [rows]. Logits [rows, vocabulary]; the cache grows by one."""
        s, rows = self.shape, torch.arange(len(ids), device=self.device)
        here = Rope(turn.cos[at][:, None, None], turn.sin[at][:, None, None])
        seen = (torch.arange(cache.keys[0].shape[2], device=self.device) <= at[:, None])[:, None, None]
        x = F.embedding(ids[:, None], self.embedding)
        for i, (before, after) in enumerate(self.norms):
            q, k, v = self._projected(self._normed(x, before), weights.qkv[i], here)
            cache.keys[i][rows, :, at], cache.values[i][rows, :, at] = k[:, :, 0], v[:, :, 0]
            q = q.reshape(len(ids), s.kv_heads, -1, s.head_dim)  # the heads of one KV head, as if they were positions
            attended = F.scaled_dot_product_attention(q, cache.keys[i], cache.values[i], attn_mask=seen)
            x = x + F.linear(attended.reshape(len(ids), 1, -1), weights.out[i])
            x = x + self._mlp(self._normed(x, after), i)
        return self.logits(self._normed(x[:, 0], self.norm))

    @torch.no_grad()
    def answers(self, prompts: Sequence[Sequence[int]], weights: Attention, turn: Rope, most: int, stop: int
                ) -> list[list[int]]:
        """Greedy, all rows at once; `most` tokens at most, the stop token left out. turn: long enough for both."""
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        longest, s = int(lengths.max()), self.shape
        ids = torch.full((len(prompts), longest), stop, device=self.device)
        for i, prompt in enumerate(prompts):
            ids[i, :len(prompt)] = torch.tensor(prompt)
        room = (len(prompts), s.kv_heads, longest + most, s.head_dim)
        cache = Cache(*([torch.zeros(room, device=self.device, dtype=self.dtype) for _ in range(s.layers)]
                        for _ in ("keys", "values")))
        hidden = self.hidden(ids, weights, turn, cache)
        token = self.logits(hidden[torch.arange(len(prompts), device=self.device), lengths - 1]).argmax(-1)
        said, going = [token], token != stop
        while len(said) < most and bool(going.any()):
            token = self.decoded(token, lengths + len(said) - 1, weights, turn, cache).argmax(-1)
            going &= token != stop
            said.append(token)
        columns = torch.stack(said, dim=1).tolist()
        return [row[:row.index(stop)] if stop in row else row for row in columns]
