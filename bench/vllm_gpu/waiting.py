#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A step of vLLM's scheduler while requests of 128K tokens wait, with its own offloading and with ours.

    waiting.py [--requests 64] [--tokens 130816] [--steps 200] [--json-out FILE]

Two schedulers without workers in one process, asked in turns: native (16 blocks of 16 tokens a chunk) and ours, behind a
daemon of this program's. One request decodes and has nearly all blocks; the others wait. What is timed is schedule():

    nothing    the daemon, or vLLM's host memory, has nothing of what waits
    held       it has all of it: there are no blocks to load it to
    coming     all of it is being stored by others, or read from a disk: vLLM asks for each request in each step
    arrival    the first step behind the arrival of all of them, with their arrival (add_request), when all is held

Of "coming" ours has an answer that says so put in the place of the daemon's, which has stores for no more than a moment.
No GPU is needed, and nothing is computed: what workers would answer is made up. A row is ours over native's: at most 1.1,
but for the arrival, where ours asks for all keys of all requests and vLLM makes the first one's alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "integrations" / name / "src") for name in ("kvstrata", "kvstrata_vllm")]
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", HF_HUB_OFFLINE="1",
                  VLLM_LOGGING_LEVEL="ERROR", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_CI_ENV="1")

from kvstrata.daemon import Daemon  # noqa: E402
from kvstrata.machine import device_name  # noqa: E402

from lone_scheduler import BLOCK, CHUNK, SEED, Queue  # noqa: E402

KINDS = ("native", "ours")


class Waiting:
    def __init__(self, given: argparse.Namespace, queues: list[Queue]) -> None:
        self._given, self._queues = given, queues
        self.seconds: dict[tuple[str, str], list[float]] = {}

    def _requests(self, name: str, seed: int) -> dict[str, list[Any]]:
        """Requests for each queue; not added yet."""
        return {queue.kind: [queue.request(f"{name}{i}", seed + i) for i in range(self._given.requests)]
                for queue in self._queues}

    def _steps(self, case: str) -> None:
        """Steps one and the other in turns, when all look-ups are answered."""
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            for queue in self._queues:
                queue.step()
            time.sleep(0.01)
        gc.collect()
        for _ in range(self._given.steps):
            for queue in self._queues:
                self.seconds.setdefault((case, queue.kind), []).append(queue.step())

    def _wait(self, case: str, requests: dict[str, list[Any]]) -> None:
        for queue in self._queues:
            for request in requests[queue.kind]:
                queue.scheduler.add_request(request)
        self._steps(case)
        for queue in self._queues:
            queue.end(requests[queue.kind])

    def run(self) -> None:
        for queue in self._queues:
            queue.occupy()
        self._wait("nothing", self._requests("n", 0))
        self._hold(1000, complete=True)
        self._arrive(1000)
        self._wait("held", self._requests("h", 1000))
        self._hold(2000, complete=False)
        next(queue for queue in self._queues if queue.kind == "ours").say_coming()
        self._wait("coming", self._requests("c", 2000))

    def _hold(self, seed: int, complete: bool) -> None:
        """By others, which have ended."""
        requests = self._requests(f"s{seed}-", seed)
        for queue in self._queues:
            if not complete and queue.kind == "ours":
                continue
            for request in requests[queue.kind]:
                queue.scheduler.add_request(request)
            queue.hold(requests[queue.kind], complete)
            queue.end(requests[queue.kind])

    def _arrive(self, seed: int) -> None:
        for number in range(5):
            requests = self._requests(f"a{number}-", seed)
            for queue in self._queues:
                gc.collect()
                began = time.perf_counter()
                for request in requests[queue.kind]:
                    queue.scheduler.add_request(request)
                added = time.perf_counter() - began
                self.seconds.setdefault(("arrival", queue.kind), []).append(added + queue.step())
            for queue in self._queues:
                queue.end(requests[queue.kind])


def rows_of(seconds: dict[tuple[str, str], list[float]]) -> list[dict[str, Any]]:
    rows = []
    for case in dict.fromkeys(case for case, _ in seconds):
        native, ours = (sorted(1e3 * value for value in seconds[case, kind]) for kind in KINDS)
        rows.append({"id": f"vllm-waiting/{case}", "value": statistics.median(ours), "unit": "ms",
                     "p10": ours[len(ours) // 10], "p90": ours[len(ours) * 9 // 10], "n": len(ours),
                     "baseline": {"name": "vLLM's offloading", "value": statistics.median(native)},
                     "ratio": statistics.median(native) / statistics.median(ours),
                     **({} if case == "arrival" else {"must": 1 / 1.1})})
        print(f"{case}: native {statistics.median(native):.3f} ms (90 %: {native[len(native) * 9 // 10]:.3f}), ours "
              f"{statistics.median(ours):.3f} ({ours[len(ours) * 9 // 10]:.3f}), over native's "
              f"{statistics.median(ours) / statistics.median(native):.3f}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=131072 - 256)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json-out", type=pathlib.Path)
    parser.add_argument("--commit", default="uncommitted")
    parser.add_argument("--date", default="")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Daemon("--set", "chunks.bytes=2GiB") as daemon:
        subprocess.run([sys.executable, HERE / "model.py", f"{folder}/tiny", "--shape", "tiny"], check=True)
        waiting = Waiting(given, [Queue(kind, f"{folder}/tiny", daemon.socket, given.tokens) for kind in KINDS])
        waiting.run()
        rows = rows_of(waiting.seconds)
        if given.json_out:
            import vllm
            given.json_out.write_text(json.dumps({
                "suite": "vllm-waiting", "device": device_name(), "commit": given.commit, "date": given.date,
                "command": "bench/vllm_gpu/waiting.py", "ceilings": {}, "rows": rows,
                "context": {"notes": f"vLLM {vllm.__version__}, {given.requests} requests of {given.tokens} tokens, blocks of "
                                     f"{BLOCK} tokens and chunks of {CHUNK * BLOCK}, no worker, seed {SEED}"}},
                indent=1) + "\n")
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
