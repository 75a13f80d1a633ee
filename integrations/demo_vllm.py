#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The demo in vLLM: what one engine computed of a prompt the next one loads.

    DOC=path ASK="question" integrations/demo_vllm.py

Starts a kvstratad of its own (KVSTRATA_SOCKET: uses that one), makes a Hugging Face folder of the GGUF of
SmolLM2-135M-Instruct once, and starts vLLM twice, in a process each: the second one's cache is empty, and the prompt
comes from the daemon. Shows for each the answer, how much of the prompt was held, and the time.
"""

from __future__ import annotations

import os
import pathlib
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / name / "src") for name in ("kvstrata", "kvstrata_numpy", "kvstrata_vllm")]
for name, value in (("VLLM_ENABLE_V1_MULTIPROCESSING", "0"), ("VLLM_CPU_KVCACHE_SPACE", "1"), ("HF_HUB_OFFLINE", "1"),
                    ("VLLM_NO_USAGE_STATS", "1"), ("VLLM_LOGGING_LEVEL", "WARNING")):
    os.environ.setdefault(name, value)

from demo_engine import ANSWER, in_processes, leave, prompt_of  # noqa: E402


def run(folder: pathlib.Path, number: str, socket: str) -> None:
    """The number-th engine."""
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams
    prompt = prompt_of(AutoTokenizer.from_pretrained(folder))
    print(f"starting the {number} engine, for a prompt of {len(prompt)} tokens; it takes a while on a CPU", flush=True)
    llm = LLM(str(folder), dtype="float32", enforce_eager=True, max_model_len=4096, max_num_batched_tokens=4096,
              gpu_memory_utilization=0.25,
              kv_transfer_config={"kv_connector": "KvstrataConnector", "kv_role": "kv_both",
                                  "kv_connector_extra_config": {"socket": socket}})
    begin = time.perf_counter()
    output, = llm.generate([{"prompt_token_ids": prompt}], use_tqdm=False,
                           sampling_params=SamplingParams(temperature=0, max_tokens=ANSWER))
    print(f"{output.outputs[0].text.strip()}\n-> held {output.num_cached_tokens} of {len(prompt)} prompt tokens; "
          f"{time.perf_counter() - begin:.2f} s for {len(output.outputs[0].token_ids)} tokens\n", flush=True)


if __name__ == "__main__":
    leave(lambda: in_processes(__file__, __doc__, run, ("first", "second")))
