#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""RULER's score of SmolLM2 with full attention, base or tuned: greedy answers to the prompts of RULER files.

    research/evaluate.py --model FOLDER [--adapter FILE] [--rope-theta N] [--device cuda] [--samples N] [--out
    FILE] DIR ...

DIR has one <task>.jsonl or <task>.jsonl.xz a task, of RULER's form.
Prints a line a task: the mean share of references that are in the answer (qa_*: whether any is), percent. --adapter:
of train_retrieval.py, with its RoPE base; without it the base model.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import tuned  # noqa: E402
from batches import Prompt  # noqa: E402
from chat import Chat, samples  # noqa: E402
from lora_llama import PARTS, Attention, Llama, Rope  # noqa: E402
from tasks import score  # noqa: E402

TOKENS_AT_ONCE = 131072  # tokens of a batch of prompts, padding included
MOST = 96  # tokens of an answer: four uuids are cut, every other answer fits


def answers(llama: Llama, weights: Attention, turn: Rope, chat: Chat, prompts: Sequence[Prompt]) -> list[str]:
    """In the order of prompts; those of a batch are of nearly one length."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].ids))
    found, begin = [""] * len(prompts), 0
    while begin < len(order):
        end = begin + 1
        while end < len(order) and (end + 1 - begin) * len(prompts[order[end]].ids) <= TOKENS_AT_ONCE:
            end += 1
        some = order[begin:end]
        for i, ids in zip(some, llama.answers([prompts[i].ids for i in some], weights, turn, MOST, chat.end)):
            found[i] = chat.decode(ids)
        begin = end
    return found


def scored(task: str, prompts: Sequence[Prompt], said: Sequence[str]) -> float:
    """Percent."""
    return 100 * statistics.fmean(score(task, text, prompt.outputs) for prompt, text in zip(prompts, said))


def adapt(llama: Llama, adapter: tuned.Adapter) -> None:
    """Adds its changes to the model's weights, in place."""
    for part in PARTS:
        changes = [torch.from_numpy(adapter.changes[f"model.layers.{i}.self_attn.{part}.weight"])
                   for i in range(llama.shape.layers)]
        llama.attention_weights[part] += torch.stack(changes).to(llama.device)


def device_of(name: str) -> tuple[torch.device, torch.dtype]:
    """bf16 on a GPU, fp32 on a CPU."""
    return torch.device(name), torch.float32 if name == "cpu" else torch.bfloat16


def prompts_of(chat: Chat, folders: Sequence[pathlib.Path], count: int) -> list[tuple[str, str, list[Prompt]]]:
    """(folder's name, task, prompts). Errors: SystemExit, a folder without tasks."""
    found = []
    for folder in folders:
        paths = sorted(folder.glob("*.jsonl*"))
        if not paths:
            raise SystemExit(f"evaluate: no <task>.jsonl or <task>.jsonl.xz in {folder}")
        found += [(folder.name, path.name.split(".")[0],
                   [Prompt(chat.of_ruler(sample), sample["outputs"]) for sample in samples(path, count)])
                  for path in paths]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs="+", type=pathlib.Path, metavar="DIR")
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--adapter", type=pathlib.Path)
    parser.add_argument("--rope-theta", type=float)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--samples", type=int, default=25)
    parser.add_argument("--only", nargs="+", default=[""], help="tasks whose names begin so")
    parser.add_argument("--out", type=pathlib.Path, help="JSON lines, with every answer")
    args = parser.parse_args()
    device, dtype = device_of(args.device)
    chat, llama = Chat(args.model), Llama(args.model, device, dtype)
    theta = llama.shape.rope_theta
    if args.adapter:
        adapter = tuned.read(args.adapter)
        adapt(llama, adapter)
        theta = adapter.rope_theta
    theta, weights = args.rope_theta or theta, llama.attention(None)
    lines = []
    for folder, task, prompts in prompts_of(chat, args.folders, args.samples):
        if not task.startswith(tuple(args.only)):
            continue
        begin = time.perf_counter()
        turn = llama.rope(theta, max(len(prompt.ids) for prompt in prompts) + MOST)
        said = answers(llama, weights, turn, chat, prompts)
        line = {"length": folder, "task": task, "score": round(scored(task, prompts, said), 1), "n": len(prompts),
                "rope_theta": theta, "adapter": args.adapter.name if args.adapter else None,
                "seconds": round(time.perf_counter() - begin, 1)}
        print(json.dumps(line), flush=True)
        lines.append({**line, "answers": said, "outputs": [prompt.outputs for prompt in prompts]})
    if args.out:
        args.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
