#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a prompt on disk saves transformers: time to its first token, after daemon and engine were started again.

    transformers_first_token.py [--rounds N] [--tokens N] [--json-out FILE] [--commit HASH] [--date DATE]

A round: a process with SmolLM2-135M enabled under plan full, beside a daemon with an empty disk tier, generates the
first token of a prompt of licence texts. Both end, and are started anew on the same directory, whose files are dropped
from the page cache: the same prompt again. A time begins where a ready engine, which has served another prompt, gets
the request. Both name the same token.

first/disk  ms of the second; the baseline, computing the prompt, is the first
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

import torch
from transformers_smollm2 import arguments, kvstrata_transformers, load, row, text_ids, write_result

from kvstrata.daemon import Daemon

PATIENCE = 1800  # seconds of an engine
MUST = 10
WARM = 40  # tokens of the prompt before


@dataclass
class First:
    ms: float
    token: int
    held: int


def first_token(socket: str, tokens: int) -> First:
    """In this process, which is the engine."""
    model, ids = load(), text_ids(tokens + WARM)
    kvstrata_transformers.enable(model, socket=socket)
    model.generate(torch.tensor([ids[tokens:]]), max_new_tokens=2)
    prompt = torch.tensor([ids[:tokens]])
    begin = time.perf_counter()
    cache = kvstrata_transformers.cache(model)
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), past_key_values=cache, max_new_tokens=1,
                         do_sample=False)
    ms = (time.perf_counter() - begin) * 1e3
    held = cache.rows[0].sequence.held
    cache.close()
    kvstrata_transformers.disable(model)
    return First(ms, int(out[0, -1]), held)


def engine(directory: str, tokens: int) -> First:
    """A daemon and an engine, started and ended."""
    with Daemon("--set", f"disk.path={directory}/tier", "--set", "disk.budget_bytes=4GiB",
                "--set", "disk.load_timeout=10s") as daemon:
        ran = subprocess.run([sys.executable, __file__, "--socket", daemon.socket, "--tokens", str(tokens)],
                             stdout=subprocess.PIPE, text=True, timeout=PATIENCE, check=True)
    return First(**json.loads(ran.stdout.splitlines()[-1]))


def drop_from_page_cache(directory: str) -> None:
    for path in pathlib.Path(directory).rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def one_round(tokens: int) -> tuple[First, First]:
    with tempfile.TemporaryDirectory(prefix="kvstrata-first-token-") as directory:
        computed = engine(directory, tokens)
        drop_from_page_cache(directory)
        loaded = engine(directory, tokens)
    print(f"computed {computed}, held on disk {loaded}", flush=True)
    if computed.token != loaded.token or computed.held or loaded.held != (tokens - 1) // 32 * 32:
        raise RuntimeError(f"not the same prompt: {computed}, then {loaded}")
    return computed, loaded


def measure(options: argparse.Namespace) -> None:
    rounds = [one_round(options.tokens) for _ in range(options.rounds)]
    base = ("computing it", statistics.median(computed.ms for computed, _ in rounds))
    write_result(options, "transformers-first-token",
                 f"SmolLM2-135M-Instruct, fp32, {options.tokens} tokens of licence texts, plan full",
                 [row(f"first/disk/{options.tokens}", "ms", [loaded.ms for _, loaded in rounds], base, MUST)])


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=7600)
    parser.add_argument("--socket", help=argparse.SUPPRESS)  # be the engine of a round
    options = parser.parse_args()
    if options.socket:
        print(json.dumps(vars(first_token(options.socket, options.tokens))))
    else:
        measure(options)


if __name__ == "__main__":
    main()
