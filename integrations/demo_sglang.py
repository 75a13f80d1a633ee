#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The demo in SGLang: the same prompt twice under plan `full`, then under a plan that reads less.

    DOC=path ASK="question" PLAN="strata{budget = 256, min_tokens = 0}" integrations/demo_sglang.py

Starts a kvstratad of its own (KVSTRATA_SOCKET: uses that one), makes a Hugging Face folder of the GGUF of
SmolLM2-135M-Instruct once, and shows for each run the answer, what was held of the prompt, and the bytes that a decode
step read. One SGLang a process: each plan runs in one of its own. sgl_kernel, which PyPI has for CUDA only, is stood in
for as in the tests where it is not installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import pathlib
import subprocess
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
from kvstrata.daemon import Daemon  # noqa: E402
from kvstrata_numpy import hugging_face  # noqa: E402
from kvstrata_numpy.download import DownloadError  # noqa: E402

DOCUMENT = "/usr/share/common-licenses/GPL-3"
QUESTION = "What is this document about, and what does it allow people to do?"
PLAN = "strata{budget = 256, min_tokens = 0}"
PROMPT = 2048  # tokens of the document
ANSWER = 48


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


def prompt_of(tokenizer: Any) -> list[int]:
    document = pathlib.Path(os.environ.get("DOC") or DOCUMENT).read_text(errors="replace")
    kept = tokenizer.decode(tokenizer(document).input_ids[:PROMPT])
    turn = [{"role": "user", "content": f"{kept}\n\n{os.environ.get('ASK') or QUESTION}"}]
    return tokenizer.apply_chat_template(turn, add_generation_prompt=True)["input_ids"]


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)  # folder, plan, socket: of its processes
    if of_one := parser.parse_args().run:
        run(pathlib.Path(of_one[0]), of_one[1], of_one[2])
        return 0
    folder = hugging_face.cached()
    print(f"MODEL is {folder}", flush=True)
    with contextlib.ExitStack() as stack:
        socket = os.environ.get("KVSTRATA_SOCKET") or stack.enter_context(Daemon()).socket
        for plan in ("full", os.environ.get("PLAN") or PLAN):
            subprocess.run([sys.executable, __file__, "--run", str(folder), plan, socket], check=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (DownloadError, OSError, kvstrata.KvstrataError, subprocess.CalledProcessError) as problem:
        sys.exit(f"demo: {problem}")
    except KeyboardInterrupt:
        sys.exit(130)
