#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The first token of a long prompt that a tier holds, packed by plan `strata` over raw pages; and what packing takes.

    bench/stored_planes.py [--tokens N] [--layers N] [--rounds N] [--json-out FILE] [--commit HASH] [--date DATE]

Llama-3.1-8B's shape (8 KV heads x 128, 32 query heads), random rows: the prompt's last token is attended in full, so they
choose nothing. A daemon takes the prompt, packs it, writes it to its disk or to a redis-server on loopback, and ends. Another
one opens the prompt from there: the disk's files are dropped from the page cache, or its own disk is empty. A time begins
before the sequence is opened, and ends when all layers have attended the prompt's last token, which nobody holds. Plans take
turns. No model computes in between.

first/TIER/32K         ms by planes; the baseline is plan full (must: 1 / .55)
open/TIER/32K          ms of that until the sequence is open
first-upper/TIER/32K   ms by planes that open on the upper ones, of which the others are on their way; the same baseline
open-upper/TIER/32K    ms of that until the sequence is open
all-upper/TIER/32K     ms until those are here, too: from before the open, with the first token in between
pack/64K/LAYERS layers seconds of the daemon's CPU time for a prompt, from its end until nothing is due; of 8 layers
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import subprocess
import tempfile
import time

from memory import ROOT, prefill, register, sample_rows, settle
from remote import redis_server
from reuse import drop_from_page_cache
from engine_bench import THREADS, row, write_result

import numpy as np

import kvstrata
from kvstrata.daemon import Daemon, find_daemon

PLANES = 'strata{keep_raw = "no"}'
UPPER = 'strata{keep_raw = "no", open_on = "upper"}'
MUST = 1 / 0.55
WITHIN = 600  # seconds, until all is written
PAGE, PACKED_LAYERS = 32, 8


@contextlib.contextmanager
def node(folder: str, disk: str, address: str | None):
    """A daemon with a disk in `disk` and, at `address`, a remote tier; and a session of it."""
    options = {"pool.device_bytes": "10GiB", "pool.host_bytes": "1GiB", "disk.path": disk, "disk.budget_bytes": "9GiB",
               "disk.load_timeout": "60s", "shutdown.write_timeout": "1s"}
    if address:
        options |= {"remote.redis": address, "remote.secret_file": f"{folder}/secret", "remote.write": "all",
                    "remote.deadline_most": "60s", "remote.deadline_per_1024_tokens": "10s", "remote.queue_bytes": "9GiB"}
    with Daemon(*(word for key, value in options.items() for word in ("--set", f"{key}={value}"))) as daemon, \
            kvstrata.attach(daemon.socket, threads=THREADS, timeout_ms=600000) as session:
        yield daemon, session


def await_written(daemon: Daemon, remote: bool) -> None:
    """Until nothing waits for the tier and it has not written anything for a second."""
    until, last = time.monotonic() + WITHIN, -1
    while time.monotonic() < until:
        text = subprocess.run([find_daemon().removesuffix("d"), "--socket", daemon.socket, "tier", "ls", "-o", "json"],
                              check=True, stdout=subprocess.PIPE, text=True).stdout
        tier = json.loads(text)["remotes" if remote else "tiers"][0]
        if tier["written"] and not tier["waiting"] and tier["written"] == last:
            return
        last = tier["written"]
        time.sleep(1)
    raise TimeoutError(f"not all is written after {WITHIN} s: {tier}")


def store(session: kvstrata.Session, plan: str, ids: np.ndarray, layers: int) -> None:
    sequence = prefill(session, register(session, layers, PAGE), plan, ids)
    sequence.prefill_done()
    settle(sequence)
    sequence.close()


def cpu_seconds(pid: int) -> float:
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def packing(layers: int, tokens: int) -> float:
    """CPU seconds of a daemon until nothing of a prompt is due."""
    ids = np.arange(tokens, dtype=np.int32)
    with Daemon("--set", "pool.device_bytes=5GiB") as daemon, \
            kvstrata.attach(daemon.socket, threads=THREADS, timeout_ms=600000) as session:
        sequence = prefill(session, register(session, layers, PAGE), PLANES, ids)
        before = cpu_seconds(daemon.process.pid)
        sequence.prefill_done()
        settle(sequence)
        return cpu_seconds(daemon.process.pid) - before


def first_token(session: kvstrata.Session, plan: str, ids: np.ndarray, layers: int) -> tuple[float, float, float]:
    """Milliseconds until the sequence is open, until its last token has been attended, and until all of it is here."""
    model, rng = register(session, layers, PAGE), np.random.default_rng(2)
    query = rng.standard_normal((PAGE, model.query_heads, model.head_dim)).astype(np.float32)
    rows = sample_rows(rng, PAGE)
    begin = time.perf_counter()
    sequence = session.open(model, plan, ids)
    opened = time.perf_counter()
    missing = len(ids) - sequence.held
    assert 0 < missing <= PAGE, f"{plan}: held {sequence.held} of {len(ids)} tokens"
    with session.step([(sequence, ids[-missing:])]) as step:
        for layer in range(layers):
            step.append(layer, rows[-missing:], rows[-missing:])
            step.attend(layer, query[-missing:])
    end = time.perf_counter()
    sequence.settle()
    settled = time.perf_counter()
    sequence.close()
    return (opened - begin) * 1e3, (end - begin) * 1e3, (settled - begin) * 1e3


def one_time(tier: str, plan: str, ids: np.ndarray, layers: int) -> tuple[float, float, float]:
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=ROOT / "build"))
        secret = pathlib.Path(folder, "secret")
        secret.touch(mode=0o600)
        secret.write_text(os.urandom(32).hex() + "\n")
        address = stack.enter_context(redis_server(folder)) if tier == "remote" else None
        with node(folder, f"{folder}/one", address) as (daemon, session):
            store(session, plan, ids, layers)
            await_written(daemon, bool(address))
        drop_from_page_cache(folder)
        with node(folder, f"{folder}/{'two' if address else 'one'}", address) as (_, session):
            return first_token(session, plan, ids, layers)


def measure(tier: str, rounds: int, ids: np.ndarray, layers: int) -> list[dict]:
    took = {plan: [] for plan in ("full", PLANES, UPPER)}
    for _ in range(rounds):
        for plan, times in took.items():
            times.append(one_time(tier, plan, ids, layers))
            print(f"{tier}, {plan}: open after {times[-1][0]:.0f} ms, first token after {times[-1][1]:.0f} ms", flush=True)
    kinds = [("open", PLANES, 0), ("first", PLANES, 1), ("open-upper", UPPER, 0), ("first-upper", UPPER, 1), ("all-upper", UPPER, 2)]
    return [row(f"{what}/{tier}/{len(ids) >> 10}K", "ms", [t[i] for t in took[plan]], "full", [t[min(i, 1)] for t in took["full"]],
                MUST) for what, plan, i in kinds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=32769)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json-out")
    parser.add_argument("--commit", default="uncommitted")
    parser.add_argument("--date", default="")
    args = parser.parse_args()
    ids = np.random.default_rng(3).integers(0, 50000, args.tokens).astype(np.int32)
    rows = [r for tier in ("disk", "remote") for r in measure(tier, args.rounds, ids, args.layers)]
    one, all_layers = (packing(n, 65536) for n in (1, PACKED_LAYERS))
    rows.append({"id": f"pack/64K/{PACKED_LAYERS} layers", "value": all_layers, "unit": "s", "n": 1, "ratio": one / all_layers,
                 "baseline": {"name": "one layer", "value": one}})
    write_result(args, "stored-planes", f"{args.tokens} tokens, {args.layers} layers, {args.rounds} rounds", rows)


if __name__ == "__main__":
    main()
