#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""vLLM in a process of its own, as a test asks for it: one engine, its batches one after the other.

    engine.py SPEC.json RESULT.json

SPEC: mode (null: plain vLLM; "chunks": KvstrataConnector; "disabled": KVSTRATA_DISABLE=1 with all flags of ours),
socket of a daemon (null: one is started, and started again when it was killed), llm (arguments of vllm.LLM), extra (of
kv_connector_extra_config), batches [{prompts [ids], tokens, kill_at (number of the transfer of chunks before which the
daemon is killed, or null), die_at (before which this process is), reset (vLLM's own cache is emptied first), do (names
of ACTIONS, done before that), with (more of each prompt), lora (folder of an adapter), leave (what is under way behind
the batch, for the next one), stop_at (the step before which the daemon is stopped, until the batch ends)}] (null: each
a line of stdin, answered by a line of stdout), fail_loads: of chunks. RESULT: batches [[{tokens, top, held, reason}]],
the longest step of each batch, done: what the resets of `do` answered.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1",
                  DO_NOT_TRACK="1", HF_HUB_OFFLINE="1", VLLM_CPU_CI_ENV="1")

from kvstrata.daemon import Daemon  # noqa: E402
from restarts import go_on, hang  # noqa: E402

TOP = 4  # logprobs, to tell near-ties
PATIENCE = 60  # seconds until what is saved must be


class Killer:
    """Kills a process before the left-th transfer of chunks from now on."""

    def __init__(self) -> None:
        from kvstrata_vllm.transfers import Transfers
        self.process = os.getpid()
        self.left = -1
        submit = Transfers._submit

        def counted(*args: Any) -> bool:
            if self.left == 0:
                os.kill(self.process, signal.SIGKILL)
                os.waitid(os.P_PID, self.process, os.WEXITED | os.WNOWAIT)
            self.left -= 1
            return submit(*args)

        Transfers._submit = counted

    def aim(self, batch: dict[str, Any], daemon: Daemon | None) -> None:
        """As a batch says."""
        self.left = -1
        if (at := batch.get("kill_at")) is not None and daemon is not None:
            self.process, self.left = daemon.process.pid, at
        elif (at := batch.get("die_at")) is not None:
            self.process, self.left = os.getpid(), at


def fail_loads() -> None:
    from kvstrata_vllm.cpu_copies import CpuCopies
    copy = CpuCopies._copy

    def copied(copies: Any, blocks: Any, chunks: Any, store: bool) -> Any:
        if not store:
            raise OSError("a load that fails")
        return copy(copies, blocks, chunks, store)

    CpuCopies._copy = copied


def end_requests(llm: Any) -> None:
    """The worker hears of a request's end with the step behind it; then what is stored is."""
    until = time.monotonic() + PATIENCE
    while llm.llm_engine.engine_core.engine_core.scheduler.has_requests():
        assert time.monotonic() < until, "blocks are never free"
        llm.llm_engine.step()
        time.sleep(0.002)


def flags(mode: str | None, extra: dict[str, Any]) -> dict[str, Any]:
    if mode is None:
        return {}
    transfer = {"kv_connector": "KvstrataConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return {"kv_transfer_config": transfer, **({"attention_backend": "CUSTOM"} if mode == "disabled" else {})}


def change(model: Any) -> None:
    """As those who train change it, in place."""
    for name, tensor in model.named_parameters():
        if "layernorm" in name:
            tensor.data[::2] *= 1.5


def sleep(llm: Any) -> None:
    llm.sleep(1)
    llm.wake_up()


class Stopwatch:
    """Times the engine's steps. longest: seconds of one; stop_at: the step before which the daemon is stopped."""

    def __init__(self, llm: Any) -> None:
        self._step, llm.llm_engine.step = llm.llm_engine.step, self.step
        self.begin(None, None)

    def begin(self, daemon: Daemon | None, stop_at: int | None) -> None:
        self.longest, self._steps, self._stop_at, self._daemon = 0.0, 0, stop_at, daemon

    def end(self) -> None:
        """A daemon that was stopped goes on."""
        if self._daemon is not None and self._stop_at is not None:
            go_on(self._daemon)

    def step(self) -> Any:
        if self._daemon is not None and self._steps == self._stop_at:
            hang(self._daemon)
        self._steps += 1
        begin = time.perf_counter()
        out = self._step()
        self.longest = max(self.longest, time.perf_counter() - begin)
        return out


ACTIONS = {"reset": lambda llm: llm.reset_prefix_cache(reset_connector=True),
           "change": lambda llm: llm.apply_model(change),
           "reload": lambda llm: llm.collective_rpc("reload_weights"), "sleep": sleep}


def generate(llm: Any, batch: dict[str, Any]) -> list[dict[str, Any]]:
    from vllm import SamplingParams
    parameters = SamplingParams(temperature=0, max_tokens=batch["tokens"], ignore_eos=True, logprobs=TOP,
                                detokenize=not llm.model_config.skip_tokenizer_init)
    if batch.get("reset"):
        assert llm.reset_prefix_cache()
    prompts = [{"prompt_token_ids": ids, **batch.get("with", {})} for ids in batch["prompts"]]
    adapter = {}
    if (folder := batch.get("lora")) is not None:
        from vllm.lora.request import LoRARequest
        number = 1 + int(hashlib.sha256(folder.encode()).hexdigest()[:4], 16)
        adapter = {"lora_request": LoRARequest(folder, number, folder)}
    outputs = llm.generate(prompts, parameters, use_tqdm=False, **adapter)
    if not batch.get("leave"):
        end_requests(llm)
    return [{"tokens": list(o.outputs[0].token_ids), "held": o.num_cached_tokens, "reason": o.outputs[0].finish_reason,
             "top": [{str(i): p.logprob for i, p in at.items()} for at in o.outputs[0].logprobs or []]}
            for o in outputs]


def batches_of(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return iter(spec["batches"]) if spec["batches"] is not None else map(json.loads, sys.stdin)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints
    spec = json.load(open(sys.argv[1]))
    mode = spec["mode"]
    if mode == "disabled":
        os.environ["KVSTRATA_DISABLE"] = "1"
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        socket = spec.get("socket") or os.path.join(folder, "kvstratad.sock")
        daemon = stack.enter_context(Daemon(socket=socket)) if mode == "chunks" and not spec.get("socket") else None
        from vllm import LLM
        llm = LLM(**{"dtype": "float32", "seed": 0, "gpu_memory_utilization": 0.25,
                     **flags(mode, {"socket": socket, **spec.get("extra", {})}), **spec["llm"]})
        killer = Killer()
        if spec.get("fail_loads"):
            fail_loads()
        watch = Stopwatch(llm)
        result: dict[str, Any] = {"batches": [], "longest": [], "done": []}
        if spec["batches"] is None:
            print(json.dumps("ready"), file=answers, flush=True)
        for batch in batches_of(spec):
            killer.aim(batch, daemon)
            answers_of = [ACTIONS[name](llm) for name in batch.get("do", ())]
            result["done"] += [answer for answer in answers_of if isinstance(answer, bool)]
            watch.begin(daemon, batch.get("stop_at"))
            result["batches"].append(generate(llm, batch))
            watch.end()
            result["longest"].append(watch.longest)
            if spec["batches"] is None:
                print(json.dumps(result["batches"][-1]), file=answers, flush=True)
            if daemon is not None and daemon.process.poll() is not None:
                daemon = stack.enter_context(Daemon(socket=socket))
        llm.llm_engine.engine_core.shutdown()
        json.dump(result, open(sys.argv[2], "w"))


if __name__ == "__main__":
    main()
