# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 as a student of sekv_student.py: its layers that attend to everything are served, those of a sliding window stay
as they are in the model. research/tests/test_gemma_student.py holds logits to transformers."""

from __future__ import annotations

import json
import math
import pathlib

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from lora_llama import Attention, Rope, Shape, rope, rotated
from sekv_student import Attend, Student

NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
         "self_attn.q_norm", "self_attn.k_norm")


class GemmaStudent(Student):
    """A Hugging Face folder's Gemma 3 text model. Errors: ValueError, scores are not divided by sqrt(head_dim)."""

    def __init__(self, folder: pathlib.Path, device: torch.device, dtype: torch.dtype, context: int) -> None:
        c = json.loads((folder / "config.json").read_text())
        if c["query_pre_attn_scalar"] != c["head_dim"]:
            raise ValueError(f"{folder}: query_pre_attn_scalar is {c['query_pre_attn_scalar']}; wanted is head_dim, {c['head_dim']}")
        bases = {kind: one["rope_theta"] for kind, one in c["rope_parameters"].items()}
        self.device, self.dtype, self.window = device, dtype, c["sliding_window"]
        self.shape = Shape(c["num_hidden_layers"], c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"],
                           c["head_dim"], c["rms_norm_eps"], bases["full_attention"])
        self.served = [i for i, kind in enumerate(c["layer_types"]) if kind == "full_attention"]
        self._turns = [rope(bases[kind], c["head_dim"], context, device, dtype) for kind in c["layer_types"]]
        found = load_file(folder / "model.safetensors", device=str(device))

        def of(name: str, kind: torch.dtype = dtype) -> list[Tensor]:
            return [found[f"model.layers.{i}.{name}.weight"].to(kind) for i in range(self.shape.layers)]

        self.embedding = found["model.embed_tokens.weight"].to(dtype)
        self.norm = 1 + found["model.norm.weight"].float()
        self.norms_of = {name: [1 + weight for weight in of(name, torch.float32)] for name in NORMS}
        qkv = zip(*(of(f"self_attn.{part}_proj") for part in "qkv"))
        self.weights = Attention([torch.cat(parts) for parts in qkv], of("self_attn.o_proj"))
        self.mlp_in = [torch.cat(pair) for pair in zip(of("mlp.gate_proj"), of("mlp.up_proj"))]
        self.mlp_out = of("mlp.down_proj")

    def turned(self, layer: int, begin: int, end: int) -> Rope:
        return Rope(self._turns[layer].cos[begin:end, None], self._turns[layer].sin[begin:end, None])

    def embedded(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.embedding) * torch.tensor(math.sqrt(self.shape.width), dtype=self.dtype)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), weight, self.shape.epsilon).to(self.dtype)

    def layer(self, i: int, x: Tensor, turn: Rope, attend: Attend) -> Tensor:
        s, norm = self.shape, {name: of[i] for name, of in self.norms_of.items()}
        split = F.linear(self._normed(x, norm["input_layernorm"]), self.weights.qkv[i]).unflatten(-1, (-1, s.head_dim))
        q, k, v = split.split((s.heads, s.kv_heads, s.kv_heads), dim=2)
        q, k = (rotated(self._normed(part, norm[f"self_attn.{name}_norm"]), *turn) for name, part in (("q", q), ("k", k)))
        out = attend(*(part.transpose(1, 2) for part in (q, k, v)))
        out = F.linear(out.transpose(1, 2).flatten(2), self.weights.out[i])
        x = x + self._normed(out, norm["post_attention_layernorm"])
        gate, up = F.linear(self._normed(x, norm["pre_feedforward_layernorm"]), self.mlp_in[i]).chunk(2, dim=-1)
        out = F.linear(F.gelu(gate, approximate="tanh") * up, self.mlp_out[i])
        return x + self._normed(out, norm["post_feedforward_layernorm"])


def student_of(folder: pathlib.Path, device: torch.device, dtype: torch.dtype, context: int) -> Student:
    """By the folder's config. Errors: ValueError, a model that none of them computes."""
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    return (GemmaStudent if kind == "gemma3_text" else Student)(folder, device, dtype, context)
