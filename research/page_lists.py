#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What lists of pages by key affinity keep of the answers, by whose list it is, and by what it is chosen. No daemon.

    research/page_lists.py --model FOLDER [--length 4096] [--contexts NAME ...] [--seed N] [--rules NAME ...]
                                 [--caches FOLDER] [--out FILE.jsonl]

Generated contexts (generated.py) with several questions each: a context is computed once in full, then every question,
but for its last token. From there on all rules are rows of one batch, which are given the reference answer token by
token. A question's line goes to --out as soon as it is known. --caches: where keys and values of contexts are kept
(200 MB each at 4K), so that other rules are tried without computing them again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import random
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
from generated import Drawn, Needles  # noqa: E402
from lora_llama import Attention, Cache, Llama, Rope  # noqa: E402

CONTEXTS = {
    "words": Needles("needles", asked=4),
    "values": Needles("essay", keys=6, values=2, queries=3, asked=3),
    "variables": 3,  # chains
    "uuids": Needles("needles", key="uuid", value="uuid", asked=3),
}
SHARE = 0.25   # part of the prompt's tokens that a step reads, where rho leaves it open
ROOT = 0.63    # a share of each of three levels
MOST = 48      # tokens of a reference answer that are given


class Rule(NamedTuple):
    """lists: of the whole `model`, a `layer`, a KV `head`; full: everything is attended.
    anchor: `keys`, the mean of the window's pages, `centred`, the same minus the mean of all; `query`, the step's own,
    its mean over a KV head's group; `max`, the largest product of the group's; `votes`, each query head's shares of a
    softmax over units, added. Of a list that several KV heads share, these are sums.
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
    "layer max step": Rule("layer", "max"),
    "head max step": Rule("head", "max"),
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
    """One prompt in one size of page: rows of all levels [layers, kv_heads, units, d] (pages: complete ones)."""

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
    """The best share, or count, of the units [.., n] that are alive; as a mask. All of the last dimension's rows of
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
    """All rules side by side, one a row. Keys and values of the prompt are shared, [layers, kv_heads, tokens, d]; those
    of what follows are a row's own."""

    def __init__(self, llama: Llama, weights: Attention, turn: Rope, cache: Cache, rules: Sequence[Rule]) -> None:
        self.llama, self.weights, self.turn, self.rules = llama, weights, turn, rules
        self.keys = torch.stack([k[0] for k in cache.keys])
        self.values = torch.stack([v[0] for v in cache.values])
        self.tokens, self.said = self.keys.shape[2], 0
        room = (llama.shape.layers, len(rules), llama.shape.kv_heads, MOST + 1, llama.shape.head_dim)
        self.own_keys, self.own_values = torch.zeros(room), torch.zeros(room)
        self.pages = {(r.page, r.chunk): Pages(self.keys, r) for r in rules}
        shape = (llama.shape.layers, len(rules), llama.shape.kv_heads, self.tokens)
        self.attended = torch.zeros(shape, dtype=torch.bool)  # rows of the prompt, as the last selections left it
        self.read = torch.zeros(len(rules), dtype=torch.float64)

    def _due(self, rule: Rule) -> bool:
        at = self.tokens + self.said
        return self.said == 0 or rule.when == "step" or (rule.when == "page" and at % rule.page == 0)

    def _window_start(self, rule: Rule) -> int:
        return -(-(self.tokens + self.said) // rule.page) - rule.window

    def _anchor(self, rule: Rule, i: int, layer: int) -> Tensor:
        """[kv_heads, 1, d]: the mean of the window's pages, what was said included."""
        begin = self._window_start(rule) * rule.page
        own = self.own_keys[layer, i, :, max(0, begin - self.tokens):self.said]
        keys = torch.cat((self.keys[layer, :, begin:], own), 1)
        parts = [keys[:, p:p + rule.page].mean(1) for p in range(0, keys.shape[1], rule.page)]
        anchor = torch.stack(parts).mean(0)[:, None]
        return anchor - self.pages[rule.page, rule.chunk].mean[layer] if rule.anchor == "centred" else anchor

    def _scores(self, rule: Rule, i: int, layer: int, q: Tensor | None) -> list[Tensor]:
        """Scores of grids, chunks and pages, [kv_heads, units] each. q [kv_heads, group, d]."""
        pages, found = self.pages[rule.page, rule.chunk], []
        for level in range(3):
            rows = pages.rows(layer, level, rule.anchor == "centred").transpose(-1, -2)
            if rule.anchor in ("keys", "centred"):
                found.append((self._anchor(rule, i, layer) @ rows)[:, 0])
            elif rule.anchor == "query":
                found.append((q @ rows).mean(1))
            elif rule.anchor == "max":
                found.append((q @ rows).amax(1))
            else:
                found.append((q @ rows / math.sqrt(q.shape[-1])).softmax(-1).sum(1))
        return found

    def _select(self, rule: Rule, i: int, layer: int, scores: list[Tensor]) -> None:
        window = self._window_start(rule)
        chosen = cascade(rule, scores, self.tokens, window)
        mask = chosen.repeat_interleave(rule.page, -1)
        mask = F.pad(mask, (0, self.tokens - mask.shape[-1]))[..., :self.tokens]
        mask[..., :rule.page] = True
        mask[..., window * rule.page:] = True
        self.attended[layer, i] = mask  # [kv_heads or 1, tokens]

    def _select_before(self) -> None:
        """Lists of the whole model, by keys that are there."""
        for i, rule in enumerate(self.rules):
            if rule.lists == "full":
                self.attended[:, i] = True
            elif rule.lists == "model" and self._due(rule):
                parts = [self._scores(rule, i, layer, None) for layer in range(self.llama.shape.layers)]
                summed = [sum(part[level].sum(0, keepdim=True) for part in parts) for level in range(3)]
                for layer in range(self.llama.shape.layers):
                    self._select(rule, i, layer, summed)

    def _select_in(self, layer: int, q: Tensor) -> None:
        for i, rule in enumerate(self.rules):
            if rule.lists in ("layer", "head") and self._due(rule):
                scores = self._scores(rule, i, layer, q[i])
                if rule.lists == "layer":
                    scores = [s.sum(0, keepdim=True) for s in scores]
                self._select(rule, i, layer, scores)

    def _attend(self, layer: int, q: Tensor) -> Tensor:
        """q [rows, kv_heads, group, d] over what is attended of the prompt, and all that was said."""
        scale, rows = q.shape[-1] ** -0.5, q.shape[0]
        over = q.transpose(0, 1).flatten(1, 2) @ self.keys[layer].transpose(-1, -2)  # [kv_heads, rows group, tokens]
        over = over.unflatten(1, (rows, -1)).transpose(0, 1) * scale
        mask = self.attended[layer][:, :, None]
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
        self.read += self.attended.double().mean((0, 2, 3))
        return llama.logits(llama._normed(x[:, 0], llama.norm))


def drawn(name: str, seed: int, length: int, chat: Chat) -> Drawn:
    """A context of CONTEXTS, of at most `length` tokens with its first question."""
    essay, recipe = generated.made_essay(seed), CONTEXTS[name]

    def of(units: int) -> Drawn:
        draw = random.Random(f"page_lists/{name}/{seed}")
        return generated.niah(recipe, units, draw, essay) if isinstance(recipe, Needles) else generated.vt(units, draw, recipe)
    return generated.fitted(of, lambda one: len(asked(chat, one, 0)), length, slack=32)


def asked(chat: Chat, one: Drawn, question: int) -> list[int]:
    return chat.prompt(one.system, one.context + one.questions[question].text, one.questions[question].begun)


def outputs_ends(chat: Chat, outputs: Sequence[str]) -> list[range]:
    """Where each output lies in the reference answer's tokens; those that do not end within MOST are left out."""
    ends = [0] + [len(chat.encode(" " + ", ".join(outputs[:i + 1]))) for i in range(len(outputs))]
    return [range(begin, end) for begin, end in zip(ends, ends[1:]) if end <= MOST]


class Computed:
    """Keys and values of a context, behind which questions are asked."""

    def __init__(self, llama: Llama, weights: Attention, turn: Rope, ids: list[int], kept: pathlib.Path | None) -> None:
        self.llama, self.weights, self.turn, self.ids = llama, weights, turn, ids
        if kept is not None and kept.exists():
            self.keys, self.values = torch.load(kept)
            return
        s = llama.shape
        cache = Cache(*([torch.zeros(1, s.kv_heads, len(ids), s.head_dim) for _ in range(s.layers)] for _ in range(2)))
        with torch.no_grad():
            llama.hidden(torch.tensor([ids]), weights, turn, cache)
        self.keys, self.values = torch.cat(cache.keys), torch.cat(cache.values)
        if kept is not None:
            torch.save((self.keys, self.values), kept.with_suffix(".part"))
            kept.with_suffix(".part").rename(kept)

    @torch.no_grad()
    def with_behind(self, ids: list[int]) -> Cache:
        """The cache of the context and `ids` behind it, which attend to all before them."""
        llama, begin, n = self.llama, len(self.ids), len(ids)
        here = Rope(*(part[begin:begin + n, None] for part in self.turn))
        seen = torch.ones(n, begin + n, dtype=torch.bool).tril(begin)
        group = llama.shape.heads // llama.shape.kv_heads
        x, cache = F.embedding(torch.tensor([ids]), llama.embedding), Cache([], [])
        for i, (before, after) in enumerate(llama.norms):
            q, k, v = llama._projected(llama._normed(x, before), self.weights.qkv[i], here)
            cache.keys.append(torch.cat((self.keys[i][None], k), 2))
            cache.values.append(torch.cat((self.values[i][None], v), 2))
            k, v = (part[-1].repeat_interleave(group, dim=1) for part in (cache.keys, cache.values))
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
            x = x + F.linear(attended.transpose(1, 2).flatten(2), self.weights.out[i])
            x = x + llama._mlp(llama._normed(x, after), i)
        return cache


@torch.no_grad()
def judged(decoding: Decoding, first: int, reference: list[int], outputs: Sequence[range]) -> list[dict]:
    """For each rule: nats of the reference's tokens; the share of outputs each of whose tokens is the likeliest;
    whether all are; the share of the prompt's rows that a step reads. first: the prompt's last token."""
    nats, said, fed = [], [], first
    for token in reference:
        logits = decoding.step(torch.full((len(decoding.rules),), fed))
        nats.append(-logits.double().log_softmax(-1)[:, token])
        said.append(logits.argmax(-1) == token)
        fed = token
    right, lost = torch.stack(said, 1), torch.stack(nats, 1)
    return [{"nats": lost[i].tolist(), "right": bool(right[i].all()), "read": float(decoding.read[i]) / decoding.said,
             "found": statistics.fmean(float(right[i, list(where)].all()) for where in outputs)}
            for i in range(len(decoding.rules))]


def report(lines: Sequence[dict]) -> str:
    """Means over prompts, of each rule."""
    rules = {name: [line["rules"][name] for line in lines] for name in lines[0]["rules"]}
    whole = statistics.fmean(one["found"] for one in rules["full"])
    rows = ["| rule | tokens read | nats lost | exact | outputs kept |", "| --- | --- | --- | --- | --- |"]
    for name, ones in rules.items():
        lost = [statistics.fmean(one["nats"]) - statistics.fmean(full["nats"]) for one, full in zip(ones, rules["full"])]
        rows.append(f"| {name} | {100 * statistics.fmean(o['read'] for o in ones):.1f}% | {statistics.fmean(lost):+.3f} | "
                    f"{sum(o['right'] for o in ones)} of {len(ones)} | "
                    f"{statistics.fmean(o['found'] for o in ones) / whole:.3f} |")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--contexts", nargs="+", choices=CONTEXTS, default=list(CONTEXTS))
    parser.add_argument("--seed", type=int, default=22)
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--caches", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, help="JSON lines, appended")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"seed {args.seed}", flush=True)
    chat, llama = Chat(args.model), Llama(args.model, torch.device("cpu"), torch.float32)
    weights, turn = llama.attention(None), llama.rope(llama.shape.rope_theta, args.length + 1024)
    names = ["full", *(name for name in args.rules if name != "full")]
    lines = []
    for name in args.contexts:
        one = drawn(name, args.seed, args.length, chat)
        prompts = [asked(chat, one, i) for i in range(len(one.questions))]
        shared = len(os.path.commonprefix(prompts))
        kept = args.caches and args.caches / f"{name}-{args.length}-{args.seed}.pt"
        context = Computed(llama, weights, turn, prompts[0][:shared], kept)
        for i, (ids, question) in enumerate(zip(prompts, one.questions)):
            reference = chat.encode(" " + ", ".join(question.outputs))[:MOST]
            cache = context.with_behind(ids[shared:-1])
            decoding = Decoding(llama, weights, turn, cache, [RULES[rule] for rule in names])
            found = judged(decoding, ids[-1], reference, outputs_ends(chat, question.outputs))
            lines.append({"context": name, "seed": args.seed, "question": i, "tokens": len(ids), "rules": dict(zip(names, found))})
            print(f"{name} {i}: " + ", ".join(f"{n} {o['found']:.2f}" for n, o in zip(names, found)), flush=True)
            if args.out:
                with args.out.open("a") as file:
                    file.write(json.dumps(lines[-1]) + "\n")
    print(report(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
