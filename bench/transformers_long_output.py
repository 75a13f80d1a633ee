#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Whether plans that choose at each sentence, or page, get slower as more is generated.

    transformers_long_output.py [--plans "PLAN;PLAN"] [--tokens N] [--new N] [--json-out FILE] [--commit HASH] [--date DATE]

SmolLM2-135M, one sequence, a prompt of `tokens` of licence texts, then `new` tokens sampled by each plan's own
logits (its end token never), all in one process in rotation, a few tokens each.

growth/PLAN/N  attention's calls (append and attend) of a step, ms: p50 of the last N steps; the baseline is p50 of the
               first N. `window`, which reads as much at each step, shows what the machine did meanwhile. N is 200,
               and 320: `chess` chooses anew at every tenth page and attends to all pages since, so what it reads is a
               sawtooth of 320 steps, and 200 see a part of a tooth.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from transformers_smollm2 import (Way, arguments, attention_calls, kvstrata_transformers, load, row, text_ids, tokenizer,
                                  ways_of, write_result)

from kvstrata.daemon import Daemon

ROUND, SPANS, SEED, TEMPERATURE = 10, (200, 320), 20261124, 0.8
PLANS = 'chess{trigger = "every"};sentencekv;window{n_recent = 1024}'
JUDGED, MUST = ('chess{trigger = "every"}', "sentencekv"), 1 / 1.15


def generate(ways: list[Way], prompt: list[int], new: int, end: int) -> None:
    print(f"seed {SEED}", flush=True)
    random = [torch.Generator().manual_seed(SEED) for _ in ways]
    logits = [way.forward(prompt) for way in ways]
    for begin in range(0, new, ROUND):
        for i, way in enumerate(ways):
            for _ in range(min(ROUND, new - begin)):
                logits[i][end] = -torch.inf
                token = torch.multinomial(torch.softmax(logits[i] / TEMPERATURE, -1), 1, generator=random[i])
                logits[i] = way.decode(int(token))


def growth(way: Way, span: int) -> dict[str, Any]:
    judged = way.name in JUDGED and span == SPANS[0]
    return row(f"growth/{way.name}/{span}", "ms", way.attention_ms[-span:],
               (f"its first {span} steps", statistics.median(way.attention_ms[:span])), MUST if judged else None)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--plans", default=PLANS, help="a semicolon between two")
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--new", type=int, default=2000)
    parser.add_argument("--steps-out", help="a file for the times of all steps, a line a step: plans' attention, ms")
    options = parser.parse_args()
    attention, enabled, end = attention_calls(), load(), tokenizer().eos_token_id
    with Daemon() as daemon:
        kvstrata_transformers.enable(enabled, tokenizer=tokenizer(), socket=daemon.socket)
        ways = ways_of(options.plans.split(";"), None, enabled, attention)
        generate(ways, text_ids(options.tokens), options.new, end)
        notes = (f"SmolLM2-135M-Instruct, fp32, prompt of {options.tokens} tokens of licence texts, {options.new} tokens "
                 f"sampled at temperature {TEMPERATURE}, seed {SEED}")
        write_result(options, "transformers-long-output", notes, [growth(way, span) for span in SPANS for way in ways])
        for way in ways:
            print(f"{way.name}: {way.cache.rows[0].sequence.plan}; status {way.cache.rows[0].sequence.status}")
            way.cache.close()
        kvstrata_transformers.disable(enabled)
    if options.steps_out:
        with open(options.steps_out, "w") as file:
            for times in zip(*(way.attention_ms for way in ways)):
                print(*(f"{t:.4f}" for t in times), file=file)


if __name__ == "__main__":
    main()
