#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A decode step beside a scrape of /metrics a second, over one without.

    bench/scrape.py [--tokens N] [--pairs N] [--json-out FILE] [--commit HASH] [--date DATE]

Two windows of a second make a pair, in random order: steps of a sequence of N tokens under plan `quest`, one after the
other, with one scrape by another process in the middle of one window. A pair's ratio is the median time of a step in
the window with the scrape over that in the other, by the clock. `mean` is the same of the means, which a busy machine
stretches at random; `cpu` of the CPU time of the thread that steps. Medians of all pairs, and their quartiles (must: at
most 1.01).
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "integrations" / "kvstrata" / "src")]

import numpy as np  # noqa: E402

import kvstrata  # noqa: E402
from kvstrata.daemon import Daemon  # noqa: E402
from kvstrata.machine import device_name  # noqa: E402

LAYERS, KV_HEADS, HEADS, DIM, CHUNK = 4, 2, 8, 128, 2048
WINDOW_S = 1.0
LEAST = 0.99  # part of the speed without a scrape


class Scraper:
    """A process that scrapes when it is told to."""

    def __init__(self, port: int) -> None:
        self.process = subprocess.Popen([sys.executable, __file__, "--scrape", str(port)], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE)

    def scrape(self) -> None:
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def answered(self) -> int:
        """Bytes of the page."""
        return int(self.process.stdout.readline())

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait(10)


def scrape_when_told(port: int) -> None:
    for _ in sys.stdin:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        page = answer.read()
        assert answer.status == 200, answer.status
        print(len(page), flush=True)


def port_of(daemon: Daemon) -> int:
    """Which the daemon chose."""
    log = pathlib.Path(daemon.log).read_text()
    line = next(line for line in log.splitlines() if "event=http " in line)
    return int(line.split("listen=127.0.0.1:")[1].split()[0].strip('"'))


class Took(NamedTuple):
    """Seconds of a step in a window."""
    median: float
    mean: float
    cpu: float


class Steps:
    def __init__(self, session: kvstrata.Session, tokens: int, plan: str) -> None:
        rng = np.random.default_rng(1)
        self.session = session
        noise = rng.standard_normal((CHUNK, HEADS, DIM)).astype(np.float32)
        self.rows = (noise.view(np.uint32) >> 16).astype(np.uint16)
        model = session.register_model("scrape", "scrape", layers=LAYERS, query_heads=HEADS, kv_heads=KV_HEADS,
                                       head_dim=DIM, page_tokens=16)
        ids = np.arange(tokens, dtype=np.int32)
        self.sequence = session.open(model, plan, ids)
        for first in range(0, tokens, CHUNK):
            self.step(ids[first:first + CHUNK])
        self.sequence.prefill_done()

    def step(self, ids: np.ndarray) -> None:
        n = len(ids)
        keys = np.ascontiguousarray(self.rows[:n, :KV_HEADS])
        with self.session.step([(self.sequence, ids)]) as step:
            for layer in range(LAYERS):
                step.append(layer, keys, keys)
                step.attend(layer, self.rows[:n])

    def window(self, scraper: Scraper | None) -> Took:
        one, times, told = np.zeros(1, np.int32), [], False
        begin, cpu = time.perf_counter(), time.thread_time()
        now = begin
        while now < begin + WINDOW_S:
            if scraper and not told and now > begin + WINDOW_S / 2:
                scraper.scrape()
                told = True
            before, now = now, self.timed(one)
            times.append(now - before)
        cpu = time.thread_time() - cpu
        if scraper:
            assert scraper.answered() > 10_000
        return Took(statistics.median(times), statistics.fmean(times), cpu / len(times))

    def timed(self, ids: np.ndarray) -> float:
        self.step(ids)
        return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--json-out")
    parser.add_argument("--commit", default="uncommitted")
    parser.add_argument("--date", default="")
    parser.add_argument("--scrape", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.scrape:
        return scrape_when_told(args.scrape)
    order, pairs = random.Random(1), []
    with (Daemon("--set", "http.listen=127.0.0.1:0", "--set", "recall.every=0") as daemon,
          kvstrata.attach(daemon.socket, threads=1) as session):
        scraper, steps = Scraper(port_of(daemon)), Steps(session, args.tokens, "quest{min_tokens = 0}")
        steps.window(None)
        for _ in range(args.pairs):
            which = [scraper, None]
            order.shuffle(which)
            took = {s is not None: steps.window(s) for s in which}
            pairs.append((took[True], took[False]))
        scraper.end()
    rows, step_us = [], statistics.median(alone.median for _, alone in pairs) * 1e6
    for name in Took._fields:
        ratios = [getattr(beside, name) / getattr(alone, name) for beside, alone in pairs]
        low, median, high = statistics.quantiles(ratios, n=4)
        rows.append({"id": f"scrape/{name}", "value": step_us * median, "unit": "us", "n": len(ratios),
                     "baseline": {"name": "without a scrape", "value": step_us}, "ratio": 1 / median, "must": LEAST})
        print(f"scrape/{name:7} {median:.4f}  quartiles {low:.4f} {high:.4f}")
    load = f"load {os.getloadavg()[0]:.1f}"
    print(f"{len(pairs)} pairs, a step takes {step_us:.0f} us, {load}")
    if args.json_out:
        result = {"suite": "scrape", "device": device_name(), "commit": args.commit, "date": args.date,
                  "command": "bench/scrape.py", "ceilings": {}, "rows": rows,
                  "context": {"notes": f"{args.tokens} tokens, medians of {len(pairs)} pairs, {load}"}}
        pathlib.Path(args.json_out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
