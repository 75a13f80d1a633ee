#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Engines of small models one after the other in this process, each asked the same prompt three times.

    family.py SPECS.json            [[name, arguments of vllm.LLM, more of each request], ...], written by small_models.py

A line of stdout each: what the second answer, behind vLLM's own prefix hit, and the third, behind a load, had held and
said, and what recorder.py counted. An error is a line, too, and ends the process.
"""

from __future__ import annotations

import gc
import json
import os
import pathlib
import random
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from driver import Driver

TOKENS, NEW = 1290, 8  # blocks of 16 and of 640 tokens hold as much of it
_PATIENCE = 30.0
_TRIES = 3


def prompt(number: int = 0) -> list[int]:
    return [3 + (7 * i * i + 3 * i + 11 * number) % 500 for i in range(number, number + TOKENS)]


def settle(llm: Any) -> None:
    """Steps until what is under way is stored."""
    end = time.monotonic() + _PATIENCE
    core = llm.llm_engine.engine_core.engine_core
    while core.scheduler.has_requests():
        if time.monotonic() > end:
            raise TimeoutError(f"stores are not over after {_PATIENCE:g} s")
        core.step_fn()
        time.sleep(0.002)


def image(seed: int) -> Any:
    from PIL import Image
    draw = random.Random(seed)
    return Image.frombytes("RGB", (56, 56), draw.randbytes(56 * 56 * 3))


def requests_of(more: dict[str, Any]) -> list[dict[str, Any]]:
    """Arguments of Driver.add: two images; or without an adapter, and with each of more["adapters"]."""
    if "image" in more:
        ids = [*prompt()[:40], more["image"], *prompt()[40:-16]]  # which stands for 16 tokens
        return [{"prompt": {"prompt_token_ids": ids, "multi_modal_data": {"image": image(seed)}}} for seed in (1, 2)]
    if not more.get("adapters"):
        return [{}]
    from vllm.lora.request import LoRARequest
    adapters = [LoRARequest(path, number + 1, path) for number, path in enumerate(more["adapters"])]
    return [{}, *({"more": {"lora_request": adapter}} for adapter in adapters)]


def answers(llm: Any, more: dict[str, Any]) -> dict[str, Any]:
    driver, requests = Driver(llm), requests_of(more)

    def ask_all() -> list[dict[str, Any]]:
        runs = [driver.run([request.get("prompt", prompt())], NEW, **request.get("more", {})) for request in requests]
        settle(llm)
        return runs

    computed, hit = ask_all(), ask_all()
    tries = 0
    while tries == 0 or (tries < _TRIES and not all(run["held"][0] for run in loaded)):
        tries += 1  # a daemon that has no processor is taken for absent, and what it has is computed
        if not llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: requests are under way")
        loaded = ask_all()
    rounds = computed, hit, loaded
    counts = llm.collective_rpc("recorded")
    return {"held": [[run["held"][0] for run in of] for of in rounds],
            "equal_to_hit": [a["tokens"] == b["tokens"] for a, b in zip(hit, loaded)],
            "equal_to_computed": [a["tokens"] == b["tokens"] for a, b in zip(computed, loaded)],
            "tries": tries, "said": [run["tokens"][0] for run in loaded],
            **{name: sum(count[name] for count in counts) for name in counts[0]}}


def end(llm: Any) -> None:
    """Takes the engine down, so that another can be made."""
    from vllm.distributed import cleanup_dist_env_and_memory
    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()
    gc.collect()


def learn(specs: list[list[Any]]) -> None:
    """vLLM looks at each architecture in a process of its own and keeps what it finds: here at all of them at once."""
    from vllm.model_executor.models.registry import ModelRegistry
    paths = {arguments["model"] for _, arguments, _ in specs}
    names = {json.loads((pathlib.Path(path) / "config.json").read_text())["architectures"][0] for path in paths}
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // 2)) as pool:
        wait([pool.submit(ModelRegistry.models[name].inspect_model_cls) for name in names])  # what fails fails again


def tune_nothing() -> None:
    """Triton takes the first of a kernel's configurations: trying all takes minutes, and what is compared here are bytes
    and tokens."""
    from triton.runtime.autotuner import Autotuner
    make = Autotuner.__init__

    def with_one(self: Any, fn: Any, arg_names: Any, configs: Any, *others: Any, **named: Any) -> None:
        make(self, fn, arg_names, configs[:1], *others, **named)

    Autotuner.__init__ = with_one


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints
    tune_nothing()
    import vllm
    specs = json.loads(pathlib.Path(sys.argv[1]).read_text())
    learn(specs)
    for name, arguments, more in specs:
        began = time.perf_counter()
        try:
            llm = vllm.LLM(**arguments)
            started = time.perf_counter() - began
            found = {"family": name, "start_s": started, **answers(llm, more)}
        except Exception as error:
            traceback.print_exc()
            print(json.dumps({"family": name, "error": f"{type(error).__name__}: {error}"[:400]}), file=out, flush=True)
            os._exit(1)
        print(json.dumps(found), file=out, flush=True)
        end(llm)
        del llm
    os._exit(0)


if __name__ == "__main__":
    main()
