#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Bytes of a sequence by plan, by the daemon's own books: 64K or 128K tokens of one Llama-3.1-8B layer (8 KV heads x 128).

    bench/memory.py [--json-out FILE] [--commit HASH] [--date DATE]

Raw pages are released (keep_raw = "no"); what is left is what the plan reads: packed rows with their block
keys and rotations, or coarse rows, raw rows and bases, or planes, and the pages of the last tokens.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "integrations" / "kvstrata" / "src"), str(ROOT / "integrations" / "kvstrata")]

import generate_stubs  # noqa: E402

generate_stubs.generate_if_stale()

import numpy as np  # noqa: E402
import numpy.typing as npt  # noqa: E402

import kvstrata  # noqa: E402
import kvstrata.grpc  # noqa: E402
from kvstrata.daemon import Daemon  # noqa: E402
from kvstrata.machine import device_name  # noqa: E402

KV_HEADS, HEADS, DIM, CHUNK = 8, 32, 128, 2048
PLANS = {"mosaickv/64K": ('mosaickv{max_loss = 1, keep_raw = "no"}', 2.9),
         "sekv/64K": ('sekv{max_loss = 1, keep_raw = "no"}', None),
         "planes/128K": ('strata{keep_raw = "no"}', 1.85),
         "planes, keep 4/128K": ('strata{keep = 4, keep_raw = "no"}', 3.5)}


def register(session: kvstrata.Session, layers: int, page_tokens: int) -> kvstrata.Model:
    return session.register_model("8B", "8B", layers=layers, query_heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM,
                                  page_tokens=page_tokens)


def sample_rows(rng: np.random.Generator, tokens: int) -> npt.NDArray[np.uint16]:
    """bf16 [tokens][KV_HEADS][DIM]"""
    return (rng.standard_normal((tokens, KV_HEADS, DIM)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def prefill(session: kvstrata.Session, model: kvstrata.Model, plan: str, ids: npt.NDArray[np.int32]) -> kvstrata.Sequence:
    """All of the prompt is committed, its end is not said yet."""
    noise = sample_rows(np.random.default_rng(1), CHUNK)
    sequence = session.open(model, plan, ids)
    for first in range(0, len(ids), CHUNK):
        chunk = ids[first:first + CHUNK]
        with session.step([(sequence, chunk)]) as step:
            for layer in range(model.layers):
                step.append(layer, np.roll(noise, layer, axis=1)[:len(chunk)], np.roll(noise, first, axis=0)[:len(chunk)])
    return sequence


def settle(sequence: kvstrata.Sequence) -> None:
    """However long workers take."""
    while True:
        try:
            return sequence.settle()
        except kvstrata.DeadlineExceeded:
            continue


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json-out")
    parser.add_argument("--commit", default="uncommitted")
    parser.add_argument("--date", default="")
    args = parser.parse_args()
    rng, rows = np.random.default_rng(1), []
    with (Daemon() as daemon, kvstrata.attach(daemon.socket, timeout_ms=600000) as session,
          kvstrata.grpc.Client(daemon.socket) as client):
        model = register(session, layers=1, page_tokens=16)
        for name, (plan, must) in PLANS.items():
            tokens = int(name.split("/")[1][:-1]) * 1024
            raw = tokens * KV_HEADS * DIM * 2 * 2
            sequence = prefill(session, model, plan, rng.integers(0, 50000, tokens))
            sequence.report(0, surprisal=rng.exponential(1.2, tokens).astype(np.float32))
            sequence.prefill_done()
            settle(sequence)
            mine = next(s for s in client.sequences() if s.sequence == sequence.handle)
            total = mine.device_bytes + mine.host_bytes
            print(f"{name:19} device {mine.device_bytes / 1e6:7.1f} MB  host {mine.host_bytes / 1e6:7.1f} MB  "
                  f"raw {raw / 1e6:.1f} MB: {raw / total:.2f}x smaller  [{sequence.status}]")
            row = {"id": name, "plan": plan, "value": total / 1e6, "unit": "MB",
                   "device_MB": mine.device_bytes / 1e6, "host_MB": mine.host_bytes / 1e6,
                   "baseline": {"name": "raw", "value": raw / 1e6}, "ratio": raw / total}
            rows.append(row if must is None else {**row, "must": must})
            sequence.close()
    if args.json_out:
        pathlib.Path(args.json_out).write_text(json.dumps(
            {"suite": "memory", "device": device_name(), "commit": args.commit, "date": args.date,
             "command": "bench/memory.py", "ceilings": {}, "context": {"notes": "random keys, by the daemon's books"},
             "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
