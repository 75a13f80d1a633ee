# SPDX-License-Identifier: Apache-2.0
"""A trace (docs/traces.md) of random keys, for the CLI's tests."""
import json
import random
import struct


def trace_bytes(prompt=600, steps=6, tail=8, layers="3"):
    """A trace of random keys: 4 query heads, 2 KV heads, dim 64, layers 0 and 2 of 3."""
    draw = random.Random(7)
    tokens = prompt + steps

    def bf16(n):
        return b"".join(struct.pack("<f", draw.gauss(0, 1))[2:] for _ in range(n))
    tensors = {"tokens": ("I32", [tokens], struct.pack(f"<{tokens}i", *range(tokens))),
               "entropy": ("F32", [steps], struct.pack(f"<{steps}f", *[1.0] * steps)),
               "surprisal": ("F32", [prompt], struct.pack(f"<{prompt}f", *[0.5] * prompt))}
    for layer in (0, 2):
        tensors[f"k.{layer}"] = ("BF16", [tokens, 2, 64], bf16(tokens * 128))
        tensors[f"v.{layer}"] = ("BF16", [tokens, 2, 64], bf16(tokens * 128))
        tensors[f"q.{layer}"] = ("BF16", [tail + steps, 4, 64], bf16((tail + steps) * 256))
    tensors["boundary"] = ("U8", [tokens], bytes(tokens))
    header = {"__metadata__": {
        "format": "kvstrata-trace", "format_version": "1", "layers": layers, "trace_layers": "0,2",
        "query_heads": "4", "kv_heads": "2", "head_dim": "64", "page_tokens": "16", "keys": "post_rope",
        "N0": str(prompt), "T": str(steps), "tail": str(tail)}}
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data
