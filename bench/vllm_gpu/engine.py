#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One engine in a process of its own: starts vLLM as it is told, measures, and appends rows to a file.

    engine.py SPEC.json          written by launch.py

First the parts of `spec["parts"]` (parts.py). With `spec["serve"]` it says "ready" then, and does what each line of
stdin asks for: {"do": a method of Served (served.py), and its arguments}; the answer is a line of stdout. What vLLM
prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time

from driver import Driver, prompt_of
from served import Served


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints
    spec = json.loads(pathlib.Path(sys.argv[1]).read_text())
    os.environ.update(spec["environment"])
    import vllm
    began = time.perf_counter()
    llm = vllm.LLM(**spec["arguments"])
    served = Served(spec, llm)
    cache = llm.llm_engine.vllm_config.cache_config
    served.row("start", seconds=[time.perf_counter() - began], version=vllm.__version__, blocks=cache.num_gpu_blocks,
               block_size=cache.block_size, connector=getattr(llm.llm_engine.vllm_config.kv_transfer_config,
                                                              "kv_connector", None))
    Driver(llm).run([prompt_of(spec["warm"], 5000 + i, spec["words"]) for i in range(4)], 24)
    for part in spec["parts"]:
        getattr(served, part)()
    if spec.get("serve"):
        print(json.dumps("ready"), file=answers, flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            print(json.dumps(getattr(served, asked.pop("do"))(**asked)), file=answers, flush=True)
    served.row("end", seconds=[time.perf_counter() - began])
    sys.stdout.flush()
    os._exit(0)  # tearing vLLM down takes seconds and tells nothing


if __name__ == "__main__":
    main()
