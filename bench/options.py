#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What each option of docs/spec/beyond.md gains, at equal bytes read per step, on two real traces.

    bench/options.py [--steps N] [--json-out FILE] [--commit HASH] [--date DATE]

A base plan is replayed beside variants of it that differ by one option, each with several budgets; a
variant's error at the base's bytes is read off the line between the two budgets that enclose them (logarithms
of both). Options that cost no bytes are compared as they are. A ratio above 1 says that the option loses less.
`closing`, which is about what is generated over thousands of tokens, has traces of its own: a short prompt, and
the rest of the document as 5888 decode steps.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import sys
from dataclasses import dataclass

import fidelity
from fidelity import DOCUMENTS, Daemon, device_name, read_bytes, replay, trace_of


@dataclass
class Comparison:
    """`variant` has one `{}`, which `values` fill; none: it costs no bytes."""

    option: str
    base: str
    variant: str
    values: tuple[object, ...] = ()
    reading: bool = False

    def plans(self) -> list[str]:
        return [self.base, *([self.variant.format(v) for v in self.values] or [self.variant])]


def rho(*parts: float) -> str:
    return "[" + ", ".join(f"{p:g}" for p in parts) + "]"


BUDGETS = (16, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
RHO = tuple(rho(a, b, c) for a, b, c in [(.2, .2, .1), (.3, .3, .2), (.4, .4, .3), (.5, .5, .3), (.6, .5, .4),
                                         (.7, .6, .5), (.8, .7, .7)])
CHESS = 'trigger = "every", window = 4'
COMPARISONS = [
    *[Comparison("rest = mean", f"quest{{{group}budget = {budget}}}",
                 f'quest{{{{{group}rest = "mean", budget = {{}}}}}}', BUDGETS)
      for group in ("", 'group = "softmax", ') for budget in (768, 2048)],
    Comparison("rest = mean", f"chess{{{CHESS}, rho = {rho(.5, .5, .3)}}}",
               f'chess{{{{{CHESS}, rest = "mean", rho = {{}}}}}}', RHO),
    Comparison("tree, rest = mean", f"chess{{{CHESS}, rho = {rho(.5, .5, .3)}}}",
               f'chess{{{{{CHESS}, tree = true, rest = "mean", rho = {{}}}}}}', RHO),
    *[Comparison("group = softmax", f"quest{{budget = {b}}}", f'quest{{group = "softmax", budget = {b}}}')
      for b in (256, 768, 2048)],
    Comparison("group = softmax", "mosaickv{max_loss = 1}", 'mosaickv{max_loss = 1, group = "softmax"}'),
    Comparison("cosine = head", "tokenselect{k = 512, n_init = 64, n_local = 128}",
               'tokenselect{{cosine = "head", k = {}, n_init = 64, n_local = 128}}', (64, 128, 256, 384, 512, 768)),
    Comparison("cosine = head, theta 0.8", "tokenselect{k = 512, n_init = 64, n_local = 128}",
               'tokenselect{{cosine = "head", theta = 0.8, k = {}, n_init = 64, n_local = 128}}',
               (64, 128, 256, 384, 512, 768, 1024)),
    Comparison("centred", f"chess{{{CHESS}, rho = {rho(.5, .5, .3)}}}",
               f"chess{{{CHESS}, centred = true, rho = {rho(.5, .5, .3)}}}"),
    Comparison("centred", "chess{trigger = \"every\"}", 'chess{trigger = "every", centred = true}'),
    Comparison("closing = drift", "mosaickv{max_loss = 1}", 'mosaickv{max_loss = 1, closing = "drift"}', reading=True),
]


def error_of(report: dict) -> float:
    return report["output_error"]["mean"]


def error_at(size: float, variants: list[dict]) -> float | None:
    """The variants' error where they read `size` bytes; None: none of them reads so few, or so many."""
    points = sorted((read_bytes(v), error_of(v)) for v in variants)
    for (x0, y0), (x1, y1) in zip(points, points[1:]):
        if x0 <= size <= x1 and x0 < x1:
            share = math.log(size / x0) / math.log(x1 / x0)
            return math.exp(math.log(y0) + share * math.log(y1 / y0))
    return None


def compare(document: str, socket: str, steps: int) -> list[dict]:
    rows = []
    for c in COMPARISONS:
        trace = trace_of(document, reading=c.reading)
        base, *variants = replay(socket, trace, None if c.reading else steps, c.plans())
        error = error_at(read_bytes(base), variants) if c.values else error_of(variants[0])
        row = {"id": f"{document}/{c.option}/{c.base}", "plan": c.variant.format("..") if c.values else c.variant,
               "unit": "relative L2", "value": error,
               "baseline": {"name": c.base, "value": error_of(base)},
               "KB_a_step_and_layer": read_bytes(base) / fidelity.LAYERS / 1e3,
               "points": [[read_bytes(v) / fidelity.LAYERS / 1e3, error_of(v)] for v in variants]}
        if error is not None:
            row["ratio"] = error_of(base) / error
        rows.append(row)
        gain = f"{row['ratio']:.2f}x smaller" if "ratio" in row else "never reads as little"
        print(f"{row['id']:90} {error_of(base):.4f} -> {error if error is None else round(error, 4)}  {gain}", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--json-out")
    parser.add_argument("--commit", default="uncommitted")
    parser.add_argument("--date", default="")
    args = parser.parse_args()
    with Daemon() as daemon:
        rows = [row for document in DOCUMENTS for row in compare(document, daemon.socket, args.steps)]
    if args.json_out:
        pathlib.Path(args.json_out).write_text(json.dumps(
            {"suite": "options", "device": device_name(), "commit": args.commit, "date": args.date,
             "command": "bench/options.py", "ceilings": {},
             "context": {"notes": f"SmolLM2-135M-Instruct, {args.steps} steps (closing: 5888), layers {DOCUMENTS}"},
             "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
