#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Logits that the rule of docs/spec/planes.md sees in trained models, a few items of them in a small file.

    research/record_logits.py --model FOLDER --model-name NAME --own FILE --prompts KEY ... --keep KEEP
    research/record_logits.py --keep KEEP --date DATE --out bench/cuda/recorded_logits.json

An *item* is a step of one layer and KV head with four query heads, as Gemma 3 270M has them. Prompts are keys of a file of
unseen.py. A prompt is computed under full attention, its matrices in bf16; then the reference answer's tokens are decoded
under the rule itself, in fp32. All steps are counted, and of each layer and KV head one is drawn and kept. A line a prompt
is added to KEEP, and prompts that it has are not run again.

--out writes eight of the kept items: one of each eighth of them by its share of fine candidates, of eight prompts, drawn so
that the means are near those of all that was counted, and L_h stays where strips are all of the context. The file:

| field | what |
| --- | --- |
| `all` | `fine`, `strips`: means over prompts, each that of all its layers, KV heads and steps: `items` in all |
| `fine` | share of an item's candidates that the rule makes fine |
| `strips` | share of its strips that are read, of those that have nothing but candidates |
| `recent` | share of exp L_h that the tokens behind the candidates have, by head |
| `half_variance` | V_h / 2 of rule 2 by head, a mean over sealed groups |
| `levels` | logits by exact keys, less L_h, plus ln `tokens`: characters, by strip, token and head |

A level is 1/4 from -6 on, and "0" the lowest. Strips of `levels` are 256 of those that have nothing but candidates, one of
each 256th of the context: of 1000 draws that which has the item's shares best, and its heads' sums of weights.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import random
import statistics
import sys
from collections.abc import Iterator
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import numpy as np  # noqa: E402
import tasks  # noqa: E402
import torch  # noqa: E402
from emulated import RAW, STRIP, Engine, Read, Rows, Rule, Steps  # noqa: E402

HEADS, STRIPS, ITEMS = 4, 256, 8
LOWEST, LEVEL, LEVELS, FIRST = -6.0, 0.25, 64, "0"
STEPS = 16  # tokens of a reference answer at most
TRIES = 1000  # draws of an item's strips, the nearest of which is kept
LEAST = 1e-3  # is added to shares, for ratios of them
DRAWS = 100000  # sets of eight items, the nearest of which is written

Tensor = torch.Tensor
Item = dict[str, Any]


def text_of(relative: np.ndarray) -> str:
    """Levels of numbers [strips, STRIP, HEADS], which are clipped to -6 .. 9.75."""
    levels = np.rint((relative - LOWEST) / LEVEL).clip(0, LEVELS - 1).astype(np.uint8)
    return (levels + ord(FIRST)).tobytes().decode("ascii")


def numbers_of(levels: str) -> np.ndarray:
    """What text_of() was given, to 1/8 where it was not clipped."""
    read = np.frombuffer(levels.encode("ascii"), np.uint8) - float(ord(FIRST))
    return (read * LEVEL + LOWEST).reshape(-1, STRIP, HEADS)


def drawn_strips(draw: random.Random, fine: Tensor, read: Tensor, whole: Tensor, weights: Tensor) -> Tensor:
    """Numbers [STRIPS] of an item's whole strips, one of each part of the context: the draw whose shares and whose heads' mean
    weights are nearest to those of all whole strips, so that strips in place of the context leave L_h where it is.

    Arguments by strips: fine [strips, STRIP]; read, whole [strips]; weights [strips, STRIP, HEADS].
    """
    each = torch.stack([fine.float().mean(-1), read.float(), *weights.mean(1).T])
    wanted = each[:, whole].mean(-1, keepdim=True)
    parts = [part.tolist() for part in np.array_split(whole.nonzero()[:, 0].numpy(), STRIPS)]
    tries = torch.tensor([[draw.choice(part) for part in parts] for _ in range(TRIES)])
    off = ((each[:, tries].mean(-1) + LEAST) / (wanted + LEAST)).log().abs().sum(0)
    return tries[off.argmin()]


class Recording(Rule):
    """Rule `strata`. Of each layer that reads by it, it keeps one step of each KV head, and the shares of all."""

    def __init__(self, seed: str) -> None:
        super().__init__("strata{}")
        self._draw = random.Random(seed)
        self.layers: list[list[Item]] = []             # by layer and KV head
        self.shares: list[tuple[Tensor, Tensor]] = []  # fine, strips: [H, T]

    def read(self, steps: Steps, q: Tensor, keys: Rows, coarse: Tensor, fine: Tensor) -> Read:
        found = super().read(steps, q, keys, coarse, fine)
        among, normaliser = self._seen
        whole = strips_of(among).all(-1)
        strips = strips_of(found.fine | found.coarse).any(-1) & whole
        shares = (found.fine & among).sum(-1) / among.sum(-1), strips.sum(-1) / whole.sum(-1)
        relative = keys.dots(RAW, q) - normaliser[..., None] + steps.lengths.log()[:, None]
        behind = steps.present & (steps.at >= self.sinks) & ~among
        recent = (fine - normaliser[..., None]).exp().masked_fill(~behind[:, None], 0).sum(-1)
        half = self._half_variance(steps, q, keys)
        items = []
        for h in range(len(q)):
            t = self._draw.randrange(len(steps.lengths))
            numbers = strips_of(relative[h, t]).permute(1, 2, 0)
            drawn = drawn_strips(self._draw, strips_of(found.fine[h, t]), strips[h, t], whole[t], numbers.exp())
            items.append({"tokens": int(steps.lengths[t]), "kv_head": h, "step": t, "fine": round(float(shares[0][h, t]), 5),
                          "strips": round(float(shares[1][h, t]), 5), "recent": rounded(recent[h, t]),
                          "half_variance": rounded(half[h, t]), "levels": text_of(numbers[drawn].numpy())})
        self.layers.append(items)
        self.shares.append(shares)
        return found

    def log_normaliser(self, steps: Steps, coarse: Tensor, fine: Tensor, among: Tensor) -> Tensor:
        found = super().log_normaliser(steps, coarse, fine, among)
        self._seen = among, found
        return found

    def _half_variance(self, steps: Steps, q: Tensor, keys: Rows) -> Tensor:
        """[H, T, HEADS], a mean over the groups that are sealed before the first step."""
        groups = int(steps.sealed(self.unit)[0]) // self.unit
        squared = keys.squared_steps(self.unit)[:, :groups].mean(1)
        return (q ** 2 * squared[:, None, None]).sum(-1) * ((64 ** 2 - self.fine_keys.cell ** 2) / 24)


def strips_of(x: Tensor) -> Tensor:
    """[.., N / STRIP, STRIP] of [.., N]."""
    return x.unflatten(-1, (-1, STRIP))


def rounded(x: Tensor) -> list[float]:
    return [round(number, 4) for number in x.tolist()]


class Recorder(Engine):
    """Errors: SystemExit, the model has not four query heads for each KV head."""

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__(folder)
        served = self.model.config
        if served.num_attention_heads != HEADS * served.num_key_value_heads:
            raise SystemExit(f"record_logits: --model {folder} has {served.num_attention_heads} query heads and "
                             f"{served.num_key_value_heads} KV heads; {HEADS} for each are wanted: take research/gemma.py's")

    def record(self, ids: list[int], reference: list[int], seed: str) -> Recording:
        """ids: the prompt, of which the last token is decoded first. Its candidates have 256 strips or more."""
        self._rules = [Recording(seed)]
        with torch.no_grad():
            with torch.autocast(self.model.device.type, torch.bfloat16):
                self._prefill(ids[:-1])
            self._decode(ids, reference)
        return self._rules[0]

    def layers_under_rules(self) -> list[int]:
        config = self.model.config
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        return [i for i, kind in enumerate(kinds) if kind == "full_attention"]


def line_of(engine: Recorder, name: str, prompt: tasks.Prompt, seed: int) -> dict[str, Any]:
    """A prompt's line of KEEP."""
    ids, reference = tasks.ids_of(prompt, engine.tokenizer)
    found = engine.record(ids, reference[:STEPS], f"{seed}/{name}/{prompt.key}")
    fine, strips = (torch.stack(shares).flatten() for shares in zip(*found.shares))
    items = [{"model": name, "task": prompt.key, "layer": layer, **item}
             for layer, of_layer in zip(engine.layers_under_rules(), found.layers) for item in of_layer]
    return {"model": name, "prompt": prompt.key, "tokens": len(ids), "fine": fine.tolist(), "strips": strips.tolist(),
            "items": items}


def run(args: argparse.Namespace) -> None:
    known = {(line["model"], line["prompt"]) for line in kept(args.keep)}
    by_key = {prompt.key: prompt for prompt in tasks.own_prompts(args.own, sys.maxsize)}
    left = [by_key[key] for key in args.prompts if (args.model_name, key) not in known]
    engine = Recorder(args.model)
    for prompt in left:
        line = line_of(engine, args.model_name, prompt, args.seed)
        with args.keep.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{prompt.key}: {line['tokens']} tokens, fine {statistics.fmean(line['fine']):.4f}, "
              f"strips {statistics.fmean(line['strips']):.4f}", flush=True)


def kept(path: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def draws(items: list[Item], seed: int) -> Iterator[list[Item]]:
    """One of each eighth of the items by `fine`, no two of a prompt."""
    draw, ranked = random.Random(f"{seed}/items"), sorted(items, key=lambda item: item["fine"])
    cuts = [len(ranked) * i // ITEMS for i in range(ITEMS + 1)]
    for _ in range(DRAWS):
        chosen = [draw.choice(ranked[begin:end]) for begin, end in zip(cuts, cuts[1:])]
        if len({(item["model"], item["task"]) for item in chosen}) == ITEMS:
            yield chosen


def mean_of(items: list[Item], field: str) -> float:
    return statistics.fmean(item[field] for item in items)


def shift_of(item: Item) -> float:
    """By how much L_h is off where the item's strips are all of the context: the mean of the heads' distances in size. It is
    not 0 where what has most of the weight lies in few groups, which the rule's sample misses."""
    sums = np.exp(numbers_of(item["levels"])).mean((0, 1)) + item["recent"]
    return float(np.abs(np.log(sums)).mean())


def chosen_of(lines: list[dict[str, Any]], seed: int) -> tuple[dict[str, Any], list[Item]]:
    """The means of all that was counted, and eight items. Errors: SystemExit, fewer than eight prompts were kept."""
    means = {field: statistics.fmean(statistics.fmean(line[field]) for line in lines) for field in ("fine", "strips")}
    items = [item for line in lines for item in line["items"]]
    if len(lines) < ITEMS:
        raise SystemExit(f"record_logits: --keep has {len(lines)} prompts; {ITEMS} are wanted: record more")
    shifts = {id(item): shift_of(item) for item in items}

    def off(some: list[Item]) -> float:
        return (sum(abs(math.log(mean_of(some, field) / mean)) for field, mean in means.items())
                + statistics.fmean(shifts[id(item)] for item in some))
    nearest = min(draws(items, seed), key=off)
    count = sum(len(line["fine"]) for line in lines)
    return {**{field: round(mean, 5) for field, mean in means.items()}, "items": count}, nearest


def write(path: pathlib.Path, source: dict[str, Any], every: dict[str, Any], items: list[Item]) -> None:
    rule = Rule("strata{}")
    path.write_text(json.dumps({"suite": "recorded-logits", "source": source,
                                "rule": {"fine_above": rule.fine_above, "skip_below": rule.skip_below},
                                "all": every, "items": items}, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=pathlib.Path)
    parser.add_argument("--model-name")
    parser.add_argument("--own", type=pathlib.Path, help="a file of unseen.py")
    parser.add_argument("--prompts", nargs="+", default=[], metavar="KEY")
    parser.add_argument("--keep", type=pathlib.Path, required=True)
    parser.add_argument("--seed", type=int, default=20261129)
    parser.add_argument("--date")
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    if args.prompts:
        run(args)
    if args.out:
        lines = kept(args.keep)
        every, items = chosen_of(lines, args.seed)
        source = {"what": "docs/spec/planes.md, rules 2 to 5, in trained models; research/record_logits.py says more",
                  "prompts": {name: [line["prompt"] for line in lines if line["model"] == name]
                              for name in sorted({line["model"] for line in lines})},
                  "seed": args.seed, "command": "research/record_logits.py, with prompts of research/unseen.py", "date": args.date}
        write(args.out, source, every, items)
        for field in ("fine", "strips"):
            print(f"{field}: {every[field]:.4f} of all {every['items']}, {mean_of(items, field):.4f} of the written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
