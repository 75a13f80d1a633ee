#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The demo in SGLang: the same prompt twice under plan `full`, then under a plan that reads less.

    DOC=path ASK="question" PLAN="bits{budget = 256, min_tokens = 0}" integrations/demo_sglang.py

Starts a kvstratad of its own (KVSTRATA_SOCKET: uses that one), makes a Hugging Face folder of the GGUF of
SmolLM2-135M-Instruct once, and shows for each run the answer, what was held of the prompt, and the bytes that a decode
step read. One SGLang a process: each plan runs in one of its own. sgl_kernel, which PyPI has for CUDA only, is stood in
for as in the tests where it is not installed.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import sys
import tempfile
import time
from typing import Any

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
PATHS = [str(HERE / name / "src") for name in ("kvstrata", "kvstrata_numpy", "kvstrata_sglang")]
if importlib.util.find_spec("sgl_kernel") is None:
    PATHS.append(str(HERE.parent / "tests" / "sglang" / "stand_in"))
sys.path[:0] = PATHS
os.environ["PYTHONPATH"] = os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")])
for name, value in (("SGLANG_USE_CPU_ENGINE", "1"), ("HF_HUB_OFFLINE", "1"), ("PYTHONWARNINGS", "ignore")):
    os.environ.setdefault(name, value)

import kvstrata  # noqa: E402
from demo_engine import ANSWER, PLANS, in_processes, leave, prompt_of  # noqa: E402


def count_reading(file: str) -> None:
    """Adds to the file's two int64 what attention reads: bytes of decode steps, and layers that were attended."""
    read, attend = np.memmap(file, np.int64, "r+", shape=(2,)), kvstrata.Step.attend

    def counted(step: kvstrata.Step, *args: Any) -> Any:
        out = attend(step, *args)
        if step.tokens == 1:
            cost = step.cost()
            read[:] += cost.attend_bytes + cost.select_bytes, 1
        return out

    kvstrata.Step.attend = counted  # type: ignore[method-assign, assignment]


if __name__ == "__mp_main__":  # SGLang's own processes, which Python starts with this file
    count_reading(os.environ["KVSTRATA_DEMO_READ"])


def run(folder: pathlib.Path, plan: str, socket: str) -> None:
    """Twice on one prompt."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(16))
        file.flush()
        read = np.memmap(file.name, np.int64, "r+", shape=(2,))
        os.environ.update(KVSTRATA_PLAN=plan, KVSTRATA_SOCKET=socket, KVSTRATA_DEMO_READ=file.name)
        import sglang
        from transformers import AutoConfig, AutoTokenizer
        prompt = prompt_of(AutoTokenizer.from_pretrained(folder))
        layers = AutoConfig.from_pretrained(folder).num_hidden_layers
        print(f"starting SGLang under {plan}; it then computes {len(prompt)} tokens of prompt, which takes a while on "
              "a CPU", flush=True)
        engine = sglang.Engine(model_path=str(folder), device="cpu", dtype="float32", attention_backend="kvstrata",
                               radix_cache_backend="kvstrata", disable_overlap_schedule=True,
                               sampling_backend="pytorch", context_length=4096, max_total_tokens=8192,
                               log_level="error")
        for number in ("first", "second"):
            read[:] = 0
            begin = time.perf_counter()
            output = engine.generate(input_ids=prompt, sampling_params={"temperature": 0, "max_new_tokens": ANSWER})
            meta = output["meta_info"]
            steps = max(1, read[1] // layers)
            print(f"{plan}, {number} run:\n{output['text'].strip()}\n-> held {meta['cached_tokens']} of {len(prompt)} "
                  f"prompt tokens; {time.perf_counter() - begin:.2f} s for {meta['completion_tokens']} tokens; "
                  f"{read[0] / steps / 1e6:.1f} MB of keys and values read a step\n", flush=True)
        engine.shutdown()


if __name__ == "__main__":
    leave(lambda: in_processes(__file__, __doc__, run, PLANS))
