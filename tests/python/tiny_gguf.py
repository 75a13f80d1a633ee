# SPDX-License-Identifier: Apache-2.0
"""Writes a tiny Llama-family GGUF: real in every field, random weights, a byte-level vocabulary."""

from __future__ import annotations

import pathlib

import gguf
import numpy as np

WIDTH, LAYERS, HEADS, KV_HEADS, FFN, CONTEXT = 128, 2, 2, 1, 256, 512
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("t h", "th e", "Ġ the", "a n", "an d", "1 2")
TYPES = gguf.GGMLQuantizationType


def vocabulary() -> list[str]:
    from kvstrata_numpy.tokenizer import _byte_table
    return [*SPECIAL, *_byte_table(), *("".join(m.split(" ")) for m in MERGES)]


def write(path: pathlib.Path, kind: TYPES = TYPES.F32, seed: int = 1, **metadata: object) -> pathlib.Path:
    """`metadata` overrides keys by their last part, such as architecture="bert" or pre="llama-bpe"."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, str(metadata.get("architecture", "llama")))
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = vocabulary()
    writer.add_tokenizer_model(str(metadata.get("model", "gpt2")))
    writer.add_tokenizer_pre(str(metadata.get("pre", "smollm")))
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(list(MERGES))
    writer.add_eos_token_id(2)
    writer.add_chat_template("<|im_start|>")
    dim = WIDTH // HEADS
    shapes = {"token_embd": (len(tokens), WIDTH), "output_norm": (WIDTH,)}
    for i in range(LAYERS):
        shapes |= {f"blk.{i}.attn_norm": (WIDTH,), f"blk.{i}.ffn_norm": (WIDTH,),
                   f"blk.{i}.attn_q": (HEADS * dim, WIDTH), f"blk.{i}.attn_k": (KV_HEADS * dim, WIDTH),
                   f"blk.{i}.attn_v": (KV_HEADS * dim, WIDTH), f"blk.{i}.attn_output": (WIDTH, HEADS * dim),
                   f"blk.{i}.ffn_gate": (FFN, WIDTH), f"blk.{i}.ffn_up": (FFN, WIDTH),
                   f"blk.{i}.ffn_down": (WIDTH, FFN)}
    for name, shape in shapes.items():
        if name == metadata.get("without"):
            continue
        values = (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
        values = values + 1 if len(shape) == 1 else values
        if len(shape) == 1 or kind == TYPES.F32:
            writer.add_tensor(f"{name}.weight", values)
        elif kind == TYPES.F16:
            writer.add_tensor(f"{name}.weight", values.astype(np.float16))
        else:
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
