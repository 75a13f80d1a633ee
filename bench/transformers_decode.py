#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a decode step of transformers costs on a CPU: plain, and with keys and values in kvstratad.

    transformers_decode.py [--plans "PLAN;PLAN"] [--tokens N] [--steps N] [--json-out FILE] [--commit HASH] [--date DATE]

SmolLM2-135M, one sequence, a prompt of `tokens` of licence texts; then the text's own continuation is fed token by
token, to all ways in one process in rotation, a few tokens each, so that a busy neighbour hits all alike.

decode/WAY     ms a token: medians; a plan's baseline is `full`, whose own is plain transformers with sdpa
attention/WAY  of this, the calls that attend: kvstrata's append and attend; of plain sdpa's function (its cache, which
               copies keys and values of all positions at each token, is no part of that)
read/WAY       MB of keys, values and what is chosen by in one step behind the last
"""

from __future__ import annotations

import statistics
from typing import Any

from transformers_smollm2 import (PLAIN, Way, arguments, attention_calls, kvstrata_transformers, load, row, text_ids,
                                  tokenizer, ways_of, write_result)

from kvstrata.daemon import Daemon

ROUND, WARM_UP = 4, 8  # tokens
PLANS = "bits{budget = 512};quest{budget = 512};tokenselect{k = 512}"
# Least speed-ups: `full` is to take at most 0.6 of plain's time, a plan 0.97 (decode) and 0.8
# (attention) of `full`'s.
MUST = {("decode", "full"): 1 / 0.6, ("decode", "bits{budget = 512}"): 1 / 0.97,
        ("attention", "bits{budget = 512}"): 1 / 0.8}


def decode(ways: list[Way], prompt: list[int], following: list[int]) -> None:
    for way in ways:
        way.forward(prompt)
    for number, begin in enumerate(range(0, len(following), ROUND)):
        for i in range(len(ways)):
            way = ways[(i + number) % len(ways)]
            for token in following[begin:begin + ROUND]:
                way.decode(token)


def rows_of(ways: list[Way], last: int, tokens: int) -> list[dict[str, Any]]:
    rows = []
    for kind, unit, times in (("decode", "ms", lambda way: way.step_ms[WARM_UP:]),
                              ("attention", "ms", lambda way: way.attention_ms[WARM_UP:]),
                              ("read", "MB", None)):
        values = {way.name: times(way) if times else [way.bytes_read(last) / 1e6] for way in ways}
        for name, value in values.items():
            base = None if name == PLAIN else PLAIN if name == "full" else "full"
            rows.append(row(f"{kind}/{name}/{tokens}", unit, value, base and (base, statistics.median(values[base])),
                            MUST.get((kind, name)) if tokens == 8000 else None))
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--plans", default=PLANS, help="beside plain and full; a semicolon between two")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--steps", type=int, default=128)
    options = parser.parse_args()
    ids = text_ids(options.tokens + WARM_UP + options.steps + 1)
    attention, plain, enabled = attention_calls(), load(), load()
    names = [PLAIN, "full", *filter(None, options.plans.split(";"))]
    with Daemon() as daemon:
        kvstrata_transformers.enable(enabled, tokenizer=tokenizer(), socket=daemon.socket)
        ways = ways_of(names, plain, enabled, attention)
        decode(ways, ids[:options.tokens], ids[options.tokens:-1])
        notes = f"SmolLM2-135M-Instruct, fp32, prompt of {options.tokens} tokens of licence texts, then its continuation"
        write_result(options, "transformers-decode", notes, rows_of(ways, ids[-1], options.tokens))
        for way in ways[1:]:
            print(f"{way.name}: {way.cache.rows[0].sequence.plan}; status {way.cache.rows[0].sequence.status}")
            way.cache.close()
        kvstrata_transformers.disable(enabled)


if __name__ == "__main__":
    main()
