#!/usr/bin/env python3
"""What lists of pages by key affinity keep of the answers, by whose list it is, and by what it is chosen. No daemon.

    bench/accuracy/page_lists.py --model FOLDER [--length 4096] [--tasks TASK ...] [--prompts N] [--seed N]
                                 [--rules NAME ...] [--caches FOLDER] [--out FILE.jsonl]

Generated prompts (generated.py), each computed once in full. From its last token on every rule decodes twice: given the
reference answer, and going on with its own most likely token. A prompt's line goes to --out as soon as it is known.
--caches: where prompts' keys and values are kept (200 MB each at 4K), so that other rules are tried without computing
them again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import statistics
import sys
from collections.abc import Sequence
from typing import NamedTuple

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import generated  # noqa: E402
from chat import Chat  # noqa: E402
from lora_llama import Attention, Cache, Llama, Rope  # noqa: E402
from tasks import score  # noqa: E402

TASKS = ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multivalue", "niah_multiquery", "vt",
         "fwe")
SHARE = 0.25   # of the prompt's tokens that a step reads, where rho leaves it open
ROOT = 0.63    # a share of each of three levels
MOST = 48      # tokens of a greedy answer


class Rule(NamedTuple):
    """lists: of the whole `model`, a `layer`, a KV `head`; full: everything is attended.
    anchor: `keys`, the mean of the window's pages, `centred`, the same minus the mean of all; `query`, the step's own,
    means over the query heads that share a list; `votes`, each query head's shares of a softmax over pages, added.
    when: it selects at the end of the `prompt`, when a `page` completes, at each `step`. rho: shares of grids, chunks and
    pages; a third of 0 fills up to SHARE."""
    lists: str
    anchor: str = "keys"
    when: str = "step"
    rho: tuple[float, float, float] = (1, 1, 0)
    page: int = 16
    window: int = 1
    chunk: int = 8  # pages; and chunks of a grid


CASCADE = (ROOT, ROOT, ROOT)
RULES = {
    "full": Rule("full"),
    "chess": Rule("model", when="prompt", rho=CASCADE, window=4),
    "model keys step": Rule("model"),
    "model centred step": Rule("model", "centred"),
    "layer keys step": Rule("layer"),
    "layer centred step": Rule("layer", "centred"),
    "layer keys prompt": Rule("layer", when="prompt", window=4),
    "head keys step": Rule("head"),
    "head centred step": Rule("head", "centred"),
    "layer query step": Rule("layer", "query"),
    "layer query step cascade": Rule("layer", "query", rho=CASCADE),
    "layer query prompt": Rule("layer", "query", when="prompt"),
    "layer query page": Rule("layer", "query", when="page"),
    "layer votes step": Rule("layer", "votes"),
    "layer votes step cascade": Rule("layer", "votes", rho=CASCADE),
    "head query step": Rule("head", "query"),
    "head query step cascade": Rule("head", "query", rho=CASCADE),
    "head query prompt": Rule("head", "query", when="prompt"),
    "head query page": Rule("head", "query", when="page"),
    "head votes step": Rule("head", "votes"),
}


def means(x: Tensor, size: int) -> Tensor:
    """x [.., n, d] to [.., ceil(n / size), d], the last over what is there; rounded to bf16, as rows are stored."""
    n = x.shape[-2]
    units = -(-n // size)
    counts = torch.full((units, 1), float(size))
    counts[-1] = n - (units - 1) * size
    summed = F.pad(x, (0, 0, 0, units * size - n)).unflatten(-2, (units, size)).sum(-2)
    return (summed / counts).bfloat16().float()


class Pages:
    """Of one prompt, of one size of page: rows of all levels [layers, kv_heads, units, d] (pages: complete ones)."""

    def __init__(self, keys: Tensor, rule: Rule) -> None:
        self.tokens = keys.shape[2]
        whole = self.tokens // rule.page * rule.page
        pages = means(keys[:, :, :whole], rule.page)
        chunks = means(pages, rule.chunk)
        self.levels = [means(chunks, rule.chunk), chunks, pages]  # grids, chunks, pages
        self.mean = pages.mean(2, keepdim=True)

    def rows(self, layer: int, level: int, centred: bool) -> Tensor:
        rows = self.levels[level][layer]
        return rows - self.mean[layer] if centred else rows


def best(scores: Tensor, alive: Tensor, share: float, count: int = 0) -> Tensor:
    """Of the units [.., n] that are alive the best share, or count; as a mask. All of the last dimension's rows of
    `alive` have equally many, but for what cut ends make."""
    order = scores.masked_fill(~alive, -math.inf).argsort(dim=-1, descending=True, stable=True)
    kept = torch.ceil(alive.sum(-1, keepdim=True) * share - 1e-9) if not count else torch.full_like(alive[..., :1], count,
                                                                                                   dtype=torch.float)
    rank = torch.empty_like(order).scatter_(-1, order, torch.arange(order.shape[-1]).expand_as(order))
    return (rank < kept) & alive


def cascade(rule: Rule, scores: Sequence[Tensor], tokens: int, window_start: int) -> Tensor:
    """scores: of grids, chunks and pages, [.., units] each. Pages between the first and the window that survive."""
    candidates = torch.zeros(scores[2].shape[-1], dtype=torch.bool)
    candidates[1:window_start] = True
    pages = torch.arange(len(candidates))
    chunks = torch.zeros(scores[1].shape[-1], dtype=torch.bool)
    chunks[pages[candidates] // rule.chunk] = True
    grids = torch.zeros(scores[0].shape[-1], dtype=torch.bool)
    grids[torch.arange(len(chunks))[chunks] // rule.chunk] = True
    shape = scores[2].shape[:-1]
    kept = best(scores[0], grids.expand(*shape, -1), rule.rho[0])
    kept = kept[..., torch.arange(len(chunks)) // rule.chunk] & chunks
    kept = best(scores[1], kept, rule.rho[1])
    kept = kept[..., pages // rule.chunk] & candidates
    count = 0 if rule.rho[2] else max(1, round(SHARE * tokens / rule.page) - 1 - rule.window)
    return best(scores[2], kept, rule.rho[2], count)


class Decoding:
    """All rules side by side: row 2 i is given the reference, row 2 i + 1 goes on alone. Keys and values of the prompt
    are shared, [layers, kv_heads, tokens, d]; those of what follows are a row's own."""

    def __init__(self, llama: Llama, weights: Attention, turn: Rope, cache: Cache, rules: Sequence[Rule]) -> None:
        self.llama, self.weights, self.turn, self.rules = llama, weights, turn, rules
        self.keys = torch.stack([k[0] for k in cache.keys])
        self.values = torch.stack([v[0] for v in cache.values])
        self.tokens, self.said = self.keys.shape[2], 0
        room = (llama.shape.layers, 2 * len(rules), llama.shape.kv_heads, MOST + 1, llama.shape.head_dim)
        self.own_keys, self.own_values = torch.zeros(room), torch.zeros(room)
        self.pages = {(r.page, r.chunk): Pages(self.keys, r) for r in rules}
        shape = (llama.shape.layers, len(rules), 2, llama.shape.kv_heads, self.tokens)
        self.attended = torch.zeros(shape, dtype=torch.bool)  # of the prompt, as the last selections left it
        self.read = torch.zeros(len(rules), dtype=torch.float64)

    def _due(self, rule: Rule) -> bool:
        at = self.tokens + self.said
        return self.said == 0 or rule.when == "step" or (rule.when == "page" and at % rule.page == 0)

    def _window_start(self, rule: Rule) -> int:
        return -(-(self.tokens + self.said) // rule.page) - rule.window

    def _anchor(self, rule: Rule, i: int, layer: int) -> Tensor:
        """[2, kv_heads, 1, d]: the mean of the window's pages, what was said included."""
        begin = self._window_start(rule) * rule.page
        held = self.keys[layer, :, begin:].expand(2, -1, -1, -1)
        keys = torch.cat((held, self.own_keys[layer, 2 * i:2 * i + 2, :, max(0, begin - self.tokens):self.said]), 2)
        n = keys.shape[2]
        parts = [keys[:, :, p:p + rule.page].mean(2) for p in range(0, n, rule.page)]
        anchor = torch.stack(parts).mean(0)[:, :, None]
        return anchor - self.pages[rule.page, rule.chunk].mean[layer] if rule.anchor == "centred" else anchor

    def _scores(self, rule: Rule, i: int, layer: int, q: Tensor | None) -> list[Tensor]:
        """Of grids, chunks and pages, [2, kv_heads, units] each. q [2, kv_heads, group, d]."""
        pages, found = self.pages[rule.page, rule.chunk], []
        for level in range(3):
            rows = pages.rows(layer, level, rule.anchor == "centred").transpose(-1, -2)
            if rule.anchor in ("keys", "centred"):
                found.append((self._anchor(rule, i, layer) @ rows)[:, :, 0])
            elif rule.anchor == "query":
                found.append((q @ rows).mean(2))
            else:
                found.append((q @ rows / math.sqrt(q.shape[-1])).softmax(-1).sum(2))
        return found

    def _select(self, rule: Rule, i: int, layer: int, scores: list[Tensor]) -> None:
        window = self._window_start(rule)
        chosen = cascade(rule, scores, self.tokens, window)
        mask = chosen.repeat_interleave(rule.page, -1)
        mask = F.pad(mask, (0, self.tokens - mask.shape[-1]))[..., :self.tokens]
        mask[..., :rule.page] = True
        mask[..., window * rule.page:] = True
        self.attended[layer, i] = mask  # [2, kv_heads or 1, tokens]

    def _select_before(self) -> None:
        """Lists of the whole model, by keys that are there."""
        for i, rule in enumerate(self.rules):
            if rule.lists == "full":
                self.attended[:, i] = True
            elif rule.lists == "model" and self._due(rule):
                parts = [self._scores(rule, i, layer, None) for layer in range(self.llama.shape.layers)]
                summed = [sum(part[level].sum(1, keepdim=True) for part in parts) for level in range(3)]
                for layer in range(self.llama.shape.layers):
                    self._select(rule, i, layer, summed)

    def _select_in(self, layer: int, q: Tensor) -> None:
        for i, rule in enumerate(self.rules):
            if rule.lists in ("layer", "head") and self._due(rule):
                scores = self._scores(rule, i, layer, q[2 * i:2 * i + 2])
                if rule.lists == "layer":
                    scores = [s.sum(1, keepdim=True) for s in scores]
                self._select(rule, i, layer, scores)

    def _attend(self, layer: int, q: Tensor) -> Tensor:
        """q [rows, kv_heads, group, d] over what is attended of the prompt, and all that was said."""
        scale, rows = q.shape[-1] ** -0.5, q.shape[0]
        over = q.transpose(0, 1).flatten(1, 2) @ self.keys[layer].transpose(-1, -2)  # [kv_heads, rows group, tokens]
        over = over.unflatten(1, (rows, -1)).transpose(0, 1) * scale
        mask = self.attended[layer].flatten(0, 1)[:, :, None]
        own = q @ self.own_keys[layer][:, :, :self.said + 1].transpose(-1, -2) * scale
        shares = torch.cat((over.masked_fill(~mask, -math.inf), own), -1).softmax(-1)
        held = shares[..., :self.tokens].transpose(0, 1).flatten(1, 2) @ self.values[layer]
        return (held.unflatten(1, (rows, -1)).transpose(0, 1) +
                shares[..., self.tokens:] @ self.own_values[layer][:, :, :self.said + 1])

    def step(self, ids: Tensor) -> Tensor:
        """Logits [rows, vocabulary] behind one token a row."""
        llama, at = self.llama, self.tokens + self.said
        here = Rope(self.turn.cos[at], self.turn.sin[at])
        self._select_before()
        x = F.embedding(ids[:, None], llama.embedding)
        for i, (before, after) in enumerate(llama.norms):
            q, k, v = llama._projected(llama._normed(x, before), self.weights.qkv[i], here)
            self.own_keys[i][:, :, self.said], self.own_values[i][:, :, self.said] = k[:, :, 0], v[:, :, 0]
            q = q.reshape(len(ids), llama.shape.kv_heads, -1, llama.shape.head_dim)
            self._select_in(i, q)
            x = x + F.linear(self._attend(i, q).reshape(len(ids), 1, -1), self.weights.out[i])
            x = x + llama._mlp(llama._normed(x, after), i)
        self.said += 1
        self.read += self.attended[:, :, 0].double().mean((0, 2, 3))
        return llama.logits(llama._normed(x[:, 0], llama.norm))


@torch.no_grad()
def computed(llama: Llama, weights: Attention, turn: Rope, ids: list[int], kept: pathlib.Path | None) -> Cache:
    """Keys and values of the prompt but for its last token, from `kept` if they are there; else kept there."""
    if kept is not None and kept.exists():
        found = torch.load(kept)
        return Cache(*(list(found[name].unbind(0)) for name in ("keys", "values")))
    s, n = llama.shape, len(ids) - 1
    cache = Cache(*([torch.zeros(1, s.kv_heads, n, s.head_dim) for _ in range(s.layers)] for _ in range(2)))
    llama.hidden(torch.tensor([ids[:-1]]), weights, turn, cache)
    if kept is not None:
        part = kept.with_suffix(".part")
        torch.save({"keys": torch.stack(cache.keys), "values": torch.stack(cache.values)}, part)
        part.rename(kept)
    return cache


@torch.no_grad()
def judged(decoding: Decoding, first: int, reference: list[int], stop: int) -> list[dict]:
    """Of each rule: nats a token of the reference, whether each of its tokens is the likeliest, the greedy answer's
    tokens, the share of the prompt's rows that a step reads. first: the prompt's last token."""
    rules = decoding.rules
    fed = torch.full((len(rules), 2), first)
    found = [{"nats": [], "right": True, "said": []} for _ in rules]
    most = min(MOST, 2 * len(reference))
    for i in range(most):
        logits = decoding.step(fed.flatten()).unflatten(0, (len(rules), 2))
        fed = logits.argmax(-1)
        for rule, one in enumerate(found):
            if stop not in one["said"]:
                one["said"].append(int(fed[rule, 1]))
            if i < len(reference):
                one["nats"].append(-float(logits[rule, 0].double().log_softmax(-1)[reference[i]]))
                one["right"] &= int(fed[rule, 0]) == reference[i]
        if i < len(reference):
            fed[:, 0] = reference[i]
        elif all(stop in one["said"] for one in found):
            break
    for one, read in zip(found, (decoding.read / decoding.said).tolist()):
        one["read"] = read
    return found


def report(lines: Sequence[dict]) -> str:
    """Means over prompts, of each rule."""
    rules = {name: [line["rules"][name] for line in lines] for name in lines[0]["rules"]}
    whole = statistics.fmean(one["score"] for one in rules["full"]) if "full" in rules else 1
    rows = ["| rule | tokens read | nats lost | exact | score kept |", "| --- | --- | --- | --- | --- |"]
    for name, ones in rules.items():
        lost = [statistics.fmean(one["nats"]) - statistics.fmean(full["nats"]) for one, full in zip(ones, rules["full"])]
        rows.append(f"| {name} | {100 * statistics.fmean(o['read'] for o in ones):.1f}% | {statistics.fmean(lost):+.3f} | "
                    f"{sum(o['right'] for o in ones)} of {len(ones)} | "
                    f"{statistics.fmean(o['score'] for o in ones) / whole:.3f} |")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--tasks", nargs="+", default=TASKS)
    parser.add_argument("--prompts", type=int, default=1, help="of each task")
    parser.add_argument("--seed", type=int, default=22)
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--caches", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, help="JSON lines, appended")
    args = parser.parse_args()
    torch.set_num_threads(1)
    chat, llama = Chat(args.model), Llama(args.model, torch.device("cpu"), torch.float32)
    weights, turn = llama.attention(None), llama.rope(llama.shape.rope_theta, args.length + 1024)
    names = ["full", *(name for name in args.rules if name != "full")]
    lines = []
    for number in range(args.prompts):
        for task in args.tasks:
            seed = f"{args.seed}/{number}"
            sample = generated.sample(task, seed, args.length, lambda text: len(chat.encode(text)))
            reference = chat.encode(" " + ", ".join(sample["outputs"]))[:MOST]
            ids = chat.of_ruler(sample)
            kept = args.caches and args.caches / f"{task}-{args.length}-{seed.replace('/', '-')}.pt"
            cache = computed(llama, weights, turn, ids, kept)
            decoding = Decoding(llama, weights, turn, cache, [RULES[name] for name in names])
            found = judged(decoding, ids[-1], reference, chat.end)
            for one in found:
                one["score"] = score(task, chat.decode(one["said"]), sample["outputs"])
            lines.append({"task": task, "seed": seed, "rules": dict(zip(names, found))})
            print(f"{task} seed {seed}: " + ", ".join(f"{n} {o['score']:.2f}" for n, o in zip(names, found)), flush=True)
            if args.out:
                with args.out.open("a") as file:
                    file.write(json.dumps(lines[-1]) + "\n")
    print(report(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
