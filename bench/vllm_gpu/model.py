#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes a model of Llama-3.1-8B's shape with random weights of sharp attention: config.json and one safetensors file.

    model.py FOLDER [--shape llama|small|tiny] [--deviation 3]

Logits of attention have this deviation and all else keeps its size, so that a token depends on a few of those before
it, as in a trained model; weights drawn evenly would attend to all alike. With 3, one token in seven weighs more than
2 / N for any of four heads, with 4 one in seventeen, which is a trained model's share (docs/accuracy.md). The seed is
fixed: each engine and each run loads the same bytes. On a GPU it takes 20 s, most of them for writing 16 GB.
"""

from __future__ import annotations

import argparse
import json
import pathlib

import torch
from safetensors.torch import save_file

SEED = 20261128
LLAMA = {"layers": 32, "hidden": 4096, "inner": 14336, "heads": 32, "kv_heads": 8, "head_dim": 128, "words": 128256}
# Little to compute, and 32 KiB of keys and values a token, as a model of 2B has.
SMALL = {"layers": 8, "hidden": 512, "inner": 1024, "heads": 8, "kv_heads": 8, "head_dim": 128, "words": 8000}
TINY = {"layers": 2, "hidden": 256, "inner": 512, "heads": 4, "kv_heads": 2, "head_dim": 64, "words": 1000}
SHAPES = {"llama": LLAMA, "small": SMALL, "tiny": TINY}


def config_of(shape: dict[str, int]) -> dict[str, object]:
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": shape["words"],
            "hidden_size": shape["hidden"], "intermediate_size": shape["inner"], "num_hidden_layers": shape["layers"],
            "num_attention_heads": shape["heads"], "num_key_value_heads": shape["kv_heads"],
            "head_dim": shape["head_dim"], "hidden_act": "silu", "max_position_embeddings": 140000,
            "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "attention_bias": False, "mlp_bias": False,
            "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "dtype": "bfloat16"}


def weights_of(shape: dict[str, int], deviation: float, device: str) -> dict[str, torch.Tensor]:
    draw = torch.Generator(device).manual_seed(SEED)
    hidden, inner, dim = shape["hidden"], shape["inner"], shape["head_dim"]

    def matrix(rows: int, columns: int, spread: float | None = None) -> torch.Tensor:
        drawn = torch.empty(rows, columns, device=device, dtype=torch.bfloat16)
        return drawn.normal_(0, columns ** -0.5 if spread is None else spread, generator=draw).cpu()

    def ones() -> torch.Tensor:
        return torch.ones(hidden, dtype=torch.bfloat16)

    sharp = (deviation / hidden) ** 0.5
    named = {"model.embed_tokens.weight": matrix(shape["words"], hidden, 1.0), "model.norm.weight": ones(),
             "lm_head.weight": matrix(shape["words"], hidden)}
    for layer in range(shape["layers"]):
        at = f"model.layers.{layer}."
        for name, heads in (("q_proj", shape["heads"]), ("k_proj", shape["kv_heads"]), ("v_proj", shape["kv_heads"])):
            named[f"{at}self_attn.{name}.weight"] = matrix(heads * dim, hidden, sharp)
        named[f"{at}self_attn.o_proj.weight"] = matrix(hidden, shape["heads"] * dim)
        for name in ("gate_proj", "up_proj"):
            named[f"{at}mlp.{name}.weight"] = matrix(inner, hidden)
        named[f"{at}mlp.down_proj.weight"] = matrix(hidden, inner)
        for name in ("input_layernorm", "post_attention_layernorm"):
            named[f"{at}{name}.weight"] = ones()
    return named


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--shape", choices=SHAPES, default="llama", help="tiny: two small layers, to try the programs with")
    parser.add_argument("--deviation", type=float, default=3, help="of attention's logits")
    arguments = parser.parse_args()
    shape = SHAPES[arguments.shape]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    (arguments.folder / "config.json").write_text(json.dumps(config_of(shape)))
    save_file(weights_of(shape, arguments.deviation, "cuda" if torch.cuda.is_available() else "cpu"),
              arguments.folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
