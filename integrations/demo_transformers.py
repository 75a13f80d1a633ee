#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The demo in Hugging Face transformers: generate() of an enabled model, twice on the same prompt.

    DOC=path ASK="question" PLAN="bits{budget = 256, min_tokens = 0}" integrations/demo_transformers.py

Starts a kvstratad of its own (KVSTRATA_SOCKET: uses that one), makes a Hugging Face folder of the GGUF of
SmolLM2-135M-Instruct once, and shows for each run the answer, what was held of the prompt, and the bytes that a decode
step read.
"""

from __future__ import annotations

import os
import pathlib
import sys
import time
from dataclasses import dataclass
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / name / "src") for name in ("kvstrata", "kvstrata_numpy", "kvstrata_transformers")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer  # noqa: E402
from transformers.generation.streamers import BaseStreamer  # noqa: E402

import kvstrata  # noqa: E402
import kvstrata_transformers  # noqa: E402
from demo_engine import ANSWER, PLANS, arguments, leave, model_folder, socket_of_daemon, turn_of  # noqa: E402


@dataclass
class Reading:
    """What attention has read: bytes of all steps, and how many layers were attended."""

    bytes: int = 0
    layers: int = 0

    def watch(self, layer: int, step: kvstrata.Step) -> None:
        if step.tokens == 1:  # a decode step
            cost = step.cost()
            self.bytes += cost.attend_bytes + cost.select_bytes
            self.layers += 1


class Stopwatch(BaseStreamer):
    """Passes on to another streamer; notes when tokens came."""

    def __init__(self, inner: BaseStreamer) -> None:
        self.times: list[float] = []
        self._inner = inner

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())  # the first are the prompt's
        self._inner.put(value)

    def end(self) -> None:
        self._inner.end()


def run(model: Any, tokenizer: Any, inputs: dict[str, torch.Tensor]) -> None:
    cache, reading = kvstrata_transformers.cache(model), Reading()
    cache.watch = reading.watch
    streamer = Stopwatch(TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True))
    model.generate(**inputs, past_key_values=cache, streamer=streamer, max_new_tokens=ANSWER, do_sample=False)
    row, times = cache.rows[0], streamer.times
    steps = reading.layers // model.config.num_hidden_layers
    each = (times[-1] - times[1]) / max(1, len(times) - 2)
    print(f"-> held {row.sequence.held} of {len(row.prompt)} prompt tokens; first token after "
          f"{times[1] - times[0]:.2f} s, then {each * 1e3:.0f} ms each; {reading.bytes / max(1, steps) / 1e6:.1f} MB of "
          f"keys and values read a step; status: {row.sequence.status}\n", flush=True)
    cache.close()


def main() -> None:
    arguments(__doc__)
    torch.manual_seed(0)
    folder = model_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = tokenizer.apply_chat_template(turn_of(tokenizer), add_generation_prompt=True, return_tensors="pt",
                                           return_dict=True)
    with socket_of_daemon() as socket:
        for plan in PLANS:
            kvstrata_transformers.enable(model, plan, tokenizer=tokenizer, socket=socket)
            for number in ("first", "second"):
                print(f"{plan}, {number} run, of {inputs['input_ids'].shape[1]} tokens of prompt; what is not held is "
                      "computed, which takes a while on a CPU:", flush=True)
                run(model, tokenizer, dict(inputs))
        kvstrata_transformers.disable(model)


if __name__ == "__main__":
    leave(main)
