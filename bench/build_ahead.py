#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The first decode step behind a held prefix after Sequence.build, over those that follow.

    bench/build_ahead.py [--tokens N] [--layers N] [--json-out FILE] [--commit HASH] [--date DATE]

A prompt is computed under `full`, opened under a plan with an index, which is not there, and built; then its
end is marked and two tokens are decoded. `value` is the first step's CPU time over the second's, of the thread that
runs them (one thread does all: the time of a machine that does nothing else); `wall` the same by the clock, which a
busy machine stretches at random. `other` and `other_wall` are of a sequence whose index was built beside the `full` one
before it was opened. `with_end` and `unbuilt` count what kvs_prefill_done takes by the clock to the first step: there an
index that nobody built is made (chess also makes the selection there that the next steps use); `unbuilt_cpu` is the
first step after that. Medians of several rounds' ratios; the caches are flushed before each step.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "integrations" / "kvstrata" / "src"), str(ROOT / "integrations" / "kvstrata")]

import numpy as np  # noqa: E402

import kvstrata  # noqa: E402
from kvstrata.daemon import Daemon  # noqa: E402
from kvstrata.machine import device_name  # noqa: E402

KV_HEADS, HEADS, DIM, CHUNK = 2, 8, 128, 2048
PLANS = {"quest": "quest", "bits": "bits", "chess": "chess", "block": '{selector = "block", codec = "raw"}',
         "quest/rest": 'quest{rest = "mean"}'}


class Rows:
    """bf16 noise, the same for a position whoever asks."""

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        noise = rng.standard_normal((CHUNK, HEADS, DIM)).astype(np.float32)
        self.rows = (noise.view(np.uint32) >> 16).astype(np.uint16)
        self.flush = np.zeros(64 << 20, np.uint8)

    def keys(self, first: int, n: int, layer: int) -> np.ndarray:
        return np.ascontiguousarray(np.roll(self.rows[:, :KV_HEADS], first + layer, axis=0)[:n])


class Took(NamedTuple):
    wall: float
    cpu: float

    @classmethod
    def of(cls, call: Callable[[], object]) -> Took:
        wall, cpu = time.perf_counter(), time.thread_time()
        call()
        return cls(time.perf_counter() - wall, time.thread_time() - cpu)


def run(session: kvstrata.Session, sequence: kvstrata.Sequence, rows: Rows, ids: np.ndarray, layers: int,
        attend: bool) -> Took:
    first, n = sequence.tokens, len(ids)
    keys = [rows.keys(first, n, layer) for layer in range(layers)]
    query = np.ascontiguousarray(np.roll(rows.rows, first * 7, axis=0)[:n])
    if attend:
        rows.flush += 1  # neither step finds in the caches what the other read

    def step_over() -> None:
        with session.step([(sequence, ids)]) as step:
            for layer in range(layers):
                step.append(layer, keys[layer], keys[layer])
                if attend:
                    step.attend(layer, query)

    return Took.of(step_over)


class Round(NamedTuple):
    end: Took  # the prompt's
    first: Took
    second: Took


def decode(session: kvstrata.Session, sequence: kvstrata.Sequence, rows: Rows, layers: int) -> Round:
    end = Took.of(sequence.prefill_done)
    return Round(end, *(run(session, sequence, rows, np.array([7]), layers, True) for _ in range(2)))


def measure(session: kvstrata.Session, plan: str, tokens: int, layers: int, how: str, number: int
            ) -> Round:
    model = session.register_model(f"build-{number}", f"build-{number}", layers=layers, query_heads=HEADS,
                                   kv_heads=KV_HEADS, head_dim=DIM, page_tokens=16)
    rows, ids = Rows(), np.arange(tokens + 1) % 50000
    full = session.open(model, "full")
    for first in range(0, tokens, CHUNK):
        run(session, full, rows, ids[first:min(first + CHUNK, tokens)], layers, False)
    if how == "other":
        full.build(plan)
    sequence = session.open(model, plan, ids)
    if sequence.held != tokens:
        raise RuntimeError(f"held {sequence.held} of {tokens} tokens")
    if how != "unbuilt":  # nothing is left of the other one but to map it
        built = sequence.build()
        if built.indexed_tokens != tokens:
            raise RuntimeError(f"{built} of {tokens} tokens")
    times = decode(session, sequence, rows, layers)
    sequence.close()
    full.close()
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json-out")
    parser.add_argument("--commit", default="uncommitted")
    parser.add_argument("--date", default="")
    args = parser.parse_args()
    table, number = [], 0
    with (Daemon("--set", "pool.device_bytes=2GiB") as daemon,
          kvstrata.attach(daemon.socket, threads=1, timeout_ms=600000) as session):
        for name, plan in PLANS.items():
            rounds: dict[str, list[Round]] = {}
            for how in ("unbuilt", "own", "other") * args.rounds:
                number += 1
                rounds.setdefault(how, []).append(measure(session, plan, args.tokens, args.layers, how, number))
            median = lambda how, f: statistics.median(map(f, rounds[how]))  # noqa: E731
            wall = lambda r: r.first.wall / r.second.wall  # noqa: E731
            cpu = lambda r: r.first.cpu / r.second.cpu  # noqa: E731
            with_end = lambda r: (r.end.wall + r.first.wall) / r.second.wall  # noqa: E731
            row = {"id": f"{name}/{args.tokens // 1024}K", "plan": plan, "tokens": args.tokens,
                   "value": median("own", cpu), "unit": "x the second step", "wall": median("own", wall),
                   "other": median("other", cpu), "other_wall": median("other", wall),
                   "with_end": median("own", with_end), "unbuilt": median("unbuilt", with_end), "unbuilt_cpu": median("unbuilt", cpu),
                   "step_ms": median("own", lambda r: r.second.wall) * 1e3, "n": args.rounds,
                   "must": 1.1, "better": "smaller"}
            print("  ".join(f"{k} {v:.2f}" if isinstance(v, float) else str(v) for k, v in row.items()), flush=True)
            table.append(row)
    if args.json_out:
        pathlib.Path(args.json_out).write_text(json.dumps(
            {"suite": "build", "device": device_name(), "commit": args.commit, "date": args.date,
             "command": "bench/build_ahead.py", "ceilings": {},
             "context": {"notes": f"{args.layers} layers, {KV_HEADS} KV heads of {DIM}, linked; value and other: CPU time"},
             "rows": table}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
