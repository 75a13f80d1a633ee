#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A trace (docs/traces.md) of a Hugging Face folder's Llama that reads a text: for `kvstrata calibrate` and `replay`.

    research/record.py --model FOLDER --text FILE --out FILE.safetensors [--tokens 3072] [--steps 3072]
                             [--layers 2,10,18,28] [--device cpu]

One forward pass: the steps feed the text's next tokens, and each has the entropy of what the model expected behind it.
`python -m kvstrata_numpy.trace` records what a model writes instead; a small one soon repeats itself, and has no entropy.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import pathlib
import sys

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent),
                *(str(ROOT / "integrations" / name / "src") for name in ("kvstrata", "kvstrata_numpy"))]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from chat import Chat  # noqa: E402
from evaluate import device_of  # noqa: E402
from kvstrata_numpy import trace  # noqa: E402
from lora_llama import Attention, Cache, Llama, Rope  # noqa: E402

TAIL = 64  # prompt tokens whose queries are kept
AT_ONCE = 512  # positions whose logits are made at once, 98 MB
PAGE_TOKENS = 32


class Reader(Llama):
    """Keeps queries and keys and values of `layers` as bf16 bits, [tokens, heads, head_dim] each, from the next forward
    pass on."""

    layers: tuple[int, ...] = ()

    def _projected(self, x: Tensor, qkv: Tensor, turn: Rope) -> tuple[Tensor, Tensor, Tensor]:
        found = super()._projected(x, qkv, turn)
        if self.passed in self.layers:
            for letter, one in zip("qkv", found):
                self.kept[f"{letter}.{self.passed}"] = bits_of(one[0].transpose(0, 1))
        self.passed += 1
        return found

    def read(self, ids: list[int], weights: Attention, turn: Rope) -> Tensor:
        """What the head reads, [tokens, width]."""
        self.passed, self.kept = 0, {}
        with torch.no_grad():
            return self.hidden(torch.tensor([ids], device=self.device), weights, turn)[0]


def bits_of(x: Tensor) -> np.ndarray:
    return x.to("cpu", torch.bfloat16).contiguous().view(torch.uint16).numpy()


@torch.no_grad()
def series(llama: Llama, hidden: Tensor, ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Surprisal of each token, the first's being 0, and entropy of what was expected behind it; nats [tokens]."""
    surprisal, entropy = np.zeros(len(ids) + 1, np.float32), np.zeros(len(ids), np.float32)
    behind = torch.tensor([*ids[1:], ids[0]], device=llama.device)  # the last one's is not known, and dropped
    for begin in range(0, len(ids), AT_ONCE):
        part = slice(begin, begin + AT_ONCE)
        logs = llama.logits(hidden[part]).log_softmax(-1)
        entropy[part] = -(logs.exp() * logs).sum(-1).clamp(max=0).cpu().numpy()
        found = -logs.gather(1, behind[part, None])[:, 0].cpu().numpy()
        surprisal[begin + 1:begin + 1 + len(found)] = found
    return surprisal[:-1], entropy


def metadata(llama: Llama, args: argparse.Namespace, layers: tuple[int, ...]) -> dict[str, str]:
    weights = hashlib.sha256((args.model / "model.safetensors").read_bytes()).hexdigest()
    s = llama.shape
    numbers = {"layers": s.layers, "query_heads": s.heads, "kv_heads": s.kv_heads, "head_dim": s.head_dim,
               "page_tokens": PAGE_TOKENS, "N0": args.tokens, "T": args.steps, "tail": TAIL, "rope_theta": s.rope_theta,
               "rope_dim": s.head_dim, "rope_interleaved": 0}
    return {"format": trace.FORMAT, "format_version": trace.VERSION, "keys": "post_rope", "model": args.model.name,
            "digest": weights, "rope_scaling": "none", "source": args.text.name,
            "trace_layers": ",".join(map(str, layers)), **{key: str(value) for key, value in numbers.items()}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--text", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--tokens", type=int, default=3072, help="of the prompt")
    parser.add_argument("--steps", type=int, default=3072)
    parser.add_argument("--layers", default="2,10,18,28")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    layers, total = tuple(map(int, args.layers.split(","))), args.tokens + args.steps
    ids = Chat(args.model).encode(args.text.read_text())[:total]
    if len(ids) < total or args.tokens < TAIL:
        raise SystemExit(f"record: --text {args.text} has {len(ids)} tokens, --tokens {args.tokens} and --steps {args.steps} "
                         f"ask for {total}; and a prompt has {TAIL} at least")
    llama = Reader(args.model, *device_of(args.device))
    llama.layers = layers
    hidden = llama.read(ids, llama.attention(None), llama.rope(llama.shape.rope_theta, total))
    surprisal, entropy = series(llama, hidden, ids)
    arrays = {name: x[args.tokens - TAIL:] if name[0] == "q" else x for name, x in llama.kept.items()}
    arrays |= {"tokens": np.array(ids, np.int32), "surprisal": np.maximum(surprisal, 0), "entropy": entropy[args.tokens:]}
    trace.write(args.out, arrays, metadata(llama, args, layers))
    print(f"{args.out}: {args.tokens} + {args.steps} tokens of {args.text.name}, {surprisal.mean():.3f} nats a token")
    return 0


if __name__ == "__main__":
    sys.exit(main())
