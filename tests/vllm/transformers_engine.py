#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""transformers on a daemon, each request in a process that may be killed: forked, since to load takes seconds.

    transformers_engine.py FOLDER SOCKET

A line of stdin is a request: {prompt, tokens, stop_at, plain (without the daemon)}. Before call number stop_at of the
binding (null: never) the process of the request says {"stopped": its pid} and waits: for a line, to go on, or to be
killed. It ends with {"tokens", "top", "held", "reason", "calls": how many there were}; then, killed or not, this
program says {"ended": its exit code}.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")  # threads do not survive a fork

import kvstrata_transformers  # noqa: E402
from engine_cases import SHARED  # noqa: E402
import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

import kvstrata  # noqa: E402

CALLS = ((kvstrata.Session, "open"), (kvstrata.Session, "step"), (kvstrata.Step, "append"), (kvstrata.Step, "attend"),
         (kvstrata.Step, "end"), (kvstrata.Sequence, "prefill_done"), (kvstrata.Sequence, "close"))

TOP = 4  # logprobs, to tell near-ties


def line() -> str:
    """Of stdin, byte by byte: what follows may be another process's."""
    read = b""
    while not read.endswith(b"\n"):
        if not (byte := os.read(0, 1)):
            return ""
        read += byte
    return read.decode()


def say(**what: Any) -> None:
    os.write(1, (json.dumps(what) + "\n").encode())


class Stop:
    """Waits before call number `at`."""

    def __init__(self, at: int | None) -> None:
        self._at, self.calls = at, 0
        for owner, name in CALLS:
            setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, call: Any) -> Any:
        @functools.wraps(call)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self.calls == self._at:
                say(stopped=os.getpid())
                line()
            self.calls += 1
            return call(*args, **kwargs)
        return counted


def run(model: Any, socket: str, prompt: list[int], tokens: int, stop_at: int | None = None, plain: bool = False
        ) -> None:
    stop = Stop(stop_at)
    if not plain:
        kvstrata_transformers.enable(model, socket=socket, digest=SHARED)
    cache = None if plain else kvstrata_transformers.cache(model)
    out = model.generate(torch.tensor([prompt]), past_key_values=cache, max_new_tokens=tokens, min_new_tokens=tokens,
                         do_sample=False, return_dict_in_generate=True, output_scores=True)
    held = 0 if cache is None else cache.rows[0].sequence.held
    if not plain:
        kvstrata_transformers.disable(model)
    best = [scores[0].log_softmax(-1).topk(TOP) for scores in out.scores]
    say(tokens=out.sequences[0, len(prompt):].tolist(), held=held, calls=stop.calls, reason="length",
        top=[dict(zip(map(str, at.indices.tolist()), at.values.tolist())) for at in best])


def main() -> None:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    say(ready=True)
    while request := line():
        if (child := os.fork()) == 0:
            try:
                run(model, sys.argv[2], **json.loads(request))
            finally:
                os._exit(0 if sys.exc_info()[0] is None else 1)
        say(ended=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


if __name__ == "__main__":
    main()
