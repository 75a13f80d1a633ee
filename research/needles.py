#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Whether a plan chooses a planted needle among up to a million tokens, without a model that reads as many.

    research/needles.py [--tokens N] [--segment N] [--prompts N] [--device cuda] [--plan NAME=TEXT ...]
                              [--model FOLDER] [--threads N] [--json-out FILE --commit HASH --date DATE]

The haystack is recorded: prompts of RULER's needle tasks, of one segment's length each and all different, are read one by
one by the tuned SmolLM2 (or --model), and their keys, after rotary embedding, are put one behind the other until there are N
tokens. So every key is one that the model makes, at a distance that it knows. The last segment is a prompt that is asked.
Its needle's rows change places with the rows of another segment at the same positions, and the queries are those that the
model has when it says the answer.

Each layer is a model of one layer for a daemon, which is given all keys (as values too, which do not matter here), and
after each query is asked what it chose. Printed, a task and in all: of the needle's tokens that a query head of the layer
gives at least --mass of its attention over all tokens, the share that a KV head of the layer chose; mean over the layers
that have such tokens.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent),
                *(str(ROOT / "integrations" / name / "src") for name in ("kvstrata", "kvstrata_numpy"))]

import generated  # noqa: E402
import tuned  # noqa: E402
from chat import Chat  # noqa: E402
from evaluate import device_of  # noqa: E402
from kvstrata.daemon import Daemon  # noqa: E402
from lora_llama import Attention, Llama, Rope  # noqa: E402

import kvstrata  # noqa: E402

TASKS = ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2")
PLANS = {"bits": "bits{budget = 2048, min_tokens = 0}", "quest": "quest{budget = 2048, min_tokens = 0}"}
BEFORE = 40      # tokens of a needle's sentence before its value, and some more, that are planted with it
APPENDED = 32768  # tokens of a step
SLACK = 64        # tokens by which a segment may be shorter than it is asked to be


class Asked(NamedTuple):
    """A prompt with its answer. needle: where the value lies in the prompt; prompt: its tokens, of `ids`."""
    task: str
    ids: list[int]
    prompt: int
    needle: range


class Recorded(NamedTuple):
    """One segment's keys [layers, kv_heads, tokens, d], bf16; its last queries [layers, heads, tail, d], bf16."""
    keys: Tensor
    queries: Tensor


class Recorder(Llama):
    """Notes the keys and the last queries of a pass."""

    def __init__(self, folder: pathlib.Path, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(folder, device, dtype)
        self._tail, self._noted = 1, []

    def _projected(self, x: Tensor, qkv: Tensor, turn: Rope) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super()._projected(x, qkv, turn)
        self._noted.append((k[0].bfloat16().cpu(), q[0, :, -self._tail:].bfloat16().cpu()))
        return q, k, v

    @torch.no_grad()
    def record(self, ids: Sequence[int], tail: int, weights: Attention, turn: Rope) -> Recorded:
        self._tail, self._noted = tail, []
        self.hidden(torch.tensor([ids], device=self.device), weights, turn)
        keys, queries = zip(*self._noted)
        return Recorded(torch.stack(keys), torch.stack(queries))


def asked(chat: Chat, task: str, seed: str, length: int) -> Asked:
    """Errors: ValueError, the prompt's text does not have the value once."""
    sample = generated.sample(task, seed, length, lambda text: len(chat.encode(text)), slack=SLACK)
    ids, value = chat.of_ruler(sample), sample["outputs"][0]
    ends = np.cumsum([len(chat.decode([token])) for token in ids])
    text = "".join(chat.decode([token]) for token in ids)
    at = text.find(value)
    if at < 0 or text.find(value, at + 1) >= 0:
        raise ValueError(f"{task}/{seed}: the prompt has {value} not once")
    needle = range(int(np.searchsorted(ends, at, "right")), int(np.searchsorted(ends, at + len(value))) + 1)
    return Asked(task, ids + chat.encode(" " + value), len(ids), needle)


@dataclass
class Planted:
    """A haystack and prompts that are asked of it. keys: [layers, kv_heads, tokens, d] of all segments but the last.
    For each prompt its own segment, and where its needle's tokens lie in the whole."""
    ids: list[int]
    keys: Tensor
    prompts: list[Asked]
    segments: list[Recorded]
    needles: list[range]


def plant(recorder: Recorder, weights: Attention, turn: Rope, chat: Chat, args: argparse.Namespace) -> Planted:
    """The prompts' needles lie in segments of their own, spread over the haystack."""
    prompts = [asked(chat, TASKS[i % len(TASKS)], f"asked/{args.seed}/{i}", args.segment) for i in range(args.prompts)]
    segments = [recorder.record(p.ids, len(p.ids) - p.prompt + 1, weights, turn) for p in prompts]
    count = args.tokens // args.segment - 1
    if count < args.prompts:
        raise SystemExit(f"needles: --tokens {args.tokens}: {count + 1} segments of {args.segment} tokens are too few for "
                         f"--prompts {args.prompts}; each needs one of its own, and one more")
    ids, keys, begins = [], [], []
    for i in range(count):
        other = asked(chat, TASKS[i % len(TASKS)], f"haystack/{args.seed}/{i}", args.segment)
        begins.append(len(ids))
        ids += other.ids[:other.prompt]
        keys.append(recorder.record(other.ids[:other.prompt], 1, weights, turn).keys)
        print(f"\rrecorded {i + 1} of {count} segments", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    needles = []
    for i, (prompt, segment) in enumerate(zip(prompts, segments)):
        host = (2 * i + 1) * count // (2 * len(prompts))
        rows = slice(max(0, prompt.needle.start - BEFORE), prompt.needle.stop + 2)
        if rows.stop > keys[host].shape[2]:
            raise SystemExit(f"needles: --segment {args.segment}: a needle at its very end has no place in another segment")
        moved = segment.keys[:, :, rows].clone()
        segment.keys[:, :, rows] = keys[host][:, :, rows]
        keys[host][:, :, rows] = moved
        needles.append(range(begins[host] + prompt.needle.start, begins[host] + prompt.needle.stop))
    return Planted(ids, torch.cat(keys, dim=2), prompts, segments, needles)


def chosen(session: kvstrata.Session, planted: Planted, layer: int, plan: str) -> list[list[set[int]]]:
    """Tokens that some KV head chose, for each prompt and query."""
    _, kv_heads, _, d = planted.keys.shape
    heads = planted.segments[0].queries.shape[1]
    model = session.register_model(f"needles-{layer}", f"needles-{layer}", layers=1, query_heads=heads, kv_heads=kv_heads,
                                   head_dim=d)
    found = []
    with session.open(model, plan, planted.ids) as haystack:
        append(session, haystack, planted.ids[haystack.held:], planted.keys[layer][:, haystack.held:])
        for prompt, segment in zip(planted.prompts, planted.segments):
            with haystack.fork() as sequence:
                keys, queries = segment.keys[layer], segment.queries[layer]
                append(session, sequence, prompt.ids[:prompt.prompt - 1], keys[:, :prompt.prompt - 1])
                sequence.prefill_done()
                sequence.settle()
                found.append([decoded(session, sequence, prompt.ids[at], keys[:, at:at + 1], queries[:, i:i + 1])
                              for i, at in enumerate(range(prompt.prompt - 1, len(prompt.ids)))])
    return found


def append(session: kvstrata.Session, sequence: kvstrata.Sequence, ids: Sequence[int], keys: Tensor) -> None:
    """keys [kv_heads, tokens, d]."""
    for at in range(0, len(ids), APPENDED):
        rows = keys[:, at:at + APPENDED].transpose(0, 1).contiguous()
        with session.step([(sequence, ids[at:at + APPENDED])]) as step:
            step.append(0, rows, rows)


def decoded(session: kvstrata.Session, sequence: kvstrata.Sequence, token: int, key: Tensor, query: Tensor) -> set[int]:
    """What a step chose. key [kv_heads, 1, d], query [heads, 1, d]."""
    with session.step([(sequence, [token])]) as step:
        row = key.transpose(0, 1).contiguous()
        step.append(0, row, row)
        step.attend(0, query.transpose(0, 1).contiguous())
        return set(np.concatenate(step.selected_tokens()).tolist())


def masses(planted: Planted, layer: int, device: torch.device) -> Iterator[list[dict[int, float]]]:
    """For each prompt and query: the needle's tokens, and the most that a query head gives each of all its attention."""
    haystack = planted.keys[layer].to(device).float()
    for prompt, segment, needle in zip(planted.prompts, planted.segments, planted.needles):
        keys = torch.cat([haystack, segment.keys[layer].to(device).float()], dim=1)
        queries = segment.queries[layer].to(device).float()
        found = []
        for i in range(queries.shape[1]):
            seen = haystack.shape[1] + prompt.prompt + i
            q = queries[:, i].view(keys.shape[0], -1, keys.shape[2])
            scores = torch.einsum("hgd,htd->hgt", q, keys[:, :seen]) / keys.shape[2] ** 0.5
            mass = scores.softmax(-1)[:, :, needle.start:needle.stop].amax((0, 1))
            found.append(dict(zip(needle, mass.tolist())))
        yield found


class Share(NamedTuple):
    """Tokens of the needle in a layer, plan and prompt, counted at each query: how many some head attends, and how many
    of these were chosen."""
    task: str
    layer: int
    attended: int
    taken: int


def shares(planted: Planted, layer: int, plan: str, socket: str, device: torch.device, mass: float) -> list[Share]:
    with kvstrata.attach(socket, threads=1) as session:
        lists = chosen(session, planted, layer, plan)
    found = []
    for prompt, of_prompt, attended in zip(planted.prompts, lists, masses(planted, layer, device)):
        pairs = [token in tokens for tokens, by_token in zip(of_prompt, attended)
                 for token, most in by_token.items() if most >= mass]
        found.append(Share(prompt.task, layer, len(pairs), sum(pairs)))
    return found


def mean_over_layers(some: Sequence[Share]) -> tuple[float, int, int]:
    """The mean, how many layers have a needle's token that is attended, and how many tokens these are."""
    by_layer: dict[int, list[Share]] = {}
    for share in some:
        if share.attended:
            by_layer.setdefault(share.layer, []).append(share)
    each = [sum(s.taken for s in of) / sum(s.attended for s in of) for of in by_layer.values()]
    return (statistics.fmean(each) if each else float("nan"), len(each), sum(s.attended for s in some))


def rows_of(plans: dict[str, str], found: dict[str, list[Share]], planted: Planted, args: argparse.Namespace
            ) -> list[dict[str, Any]]:
    rows = []
    for name, text in plans.items():
        for task in ("", *TASKS):
            some = [share for share in found[name] if task in ("", share.task)]
            value, layers, tokens = mean_over_layers(some)
            if not layers:
                continue
            rows.append({"id": f"needles/{args.mass:.0%}/{name}/{task or 'all'}", "plan": text, "value": round(value, 4), "unit": "share",
                         "better": "larger", "n": tokens, "needles": {"layers": layers, "mass": args.mass,
                                                                      "tokens": len(planted.ids) + args.segment}})
            print(f"{name:10} {task or 'all':18} {value:.4f} of {tokens} tokens in {layers} layers", flush=True)
    return rows


def measure(planted: Planted, plans: dict[str, str], args: argparse.Namespace) -> dict[str, list[Share]]:
    device = torch.device(args.device)
    layers = range(planted.keys.shape[0])
    with Daemon("--set", f"pool.host_bytes={args.pool}") as daemon, ThreadPoolExecutor(args.threads) as pool:
        found = {}
        for name, text in plans.items():
            each = pool.map(lambda layer: shares(planted, layer, text, daemon.socket, device, args.mass), layers)
            found[name] = [share for of_layer in each for share in of_layer]
    return found


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=131072, help="of the haystack with the asked prompt")
    parser.add_argument("--segment", type=int, default=4096, help="tokens of a recorded prompt; the model's context holds it")
    parser.add_argument("--prompts", type=int, default=4, help=f"that are asked, of {', '.join(TASKS)} in turn")
    parser.add_argument("--mass", type=float, default=0.01, help="of a head's attention from which on a token counts")
    parser.add_argument("--plan", action="append", default=[], metavar="NAME=TEXT")
    parser.add_argument("--model", type=pathlib.Path, help="a folder of a llama; default: the tuned SmolLM2")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="that records; what is measured is the CPU's")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pool", default="4GiB", help="of the daemon; a layer of 1M tokens takes 0.9 GiB, a thread one layer")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--json-out", type=pathlib.Path)
    parser.add_argument("--commit", default="uncommitted")
    parser.add_argument("--date", default="")
    return parser.parse_args()


def main() -> int:
    args = options()
    plans = dict(text.split("=", 1) for text in args.plan) or PLANS
    folder, begin = args.model or tuned.cached(), time.perf_counter()
    recorder, chat = Recorder(folder, *device_of(args.device)), Chat(folder)
    turn = recorder.rope(recorder.shape.rope_theta, args.segment + 2 * SLACK)
    planted = plant(recorder, recorder.attention(None), turn, chat, args)
    print(f"seed {args.seed}: {len(planted.ids)} tokens and {len(planted.prompts)} prompts recorded in "
          f"{time.perf_counter() - begin:.0f} s", flush=True)
    rows = rows_of(plans, measure(planted, plans, args), planted, args)
    if args.json_out:
        from kvstrata.machine import device_name
        args.json_out.write_text(json.dumps(
            {"suite": "needles", "device": device_name(), "commit": args.commit, "date": args.date, "ceilings": {},
             "command": "research/needles.py " + " ".join(sys.argv[1:]),
             "context": {"notes": "needle's tokens that a query head gives `mass` or more of its attention, and a KV head of "
                                  "the layer chose; mean over layers"}, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
