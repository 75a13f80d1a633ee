#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""vLLM in a process of its own, as a test asks for it: one engine, its batches one after the other.

    engine.py SPEC.json RESULT.json

SPEC: plan (null: plain vLLM; "chunks": KvstrataConnector; "": KVSTRATA_DISABLE=1 with the flags of a plan), socket of
a daemon (null: one is started with the arguments in `daemon`, and started again when it was killed), llm (arguments
of vllm.LLM), extra (more of kv_connector_extra_config), batches [{prompts [ids], tokens, kill_at (number of the
attention call, or of a transfer of chunks, before which the daemon is killed, or null), die_at (before which this
process is), end_by (the signal that the daemon gets behind the batch, when nothing runs), reset (vLLM's own cache is
emptied first), do (names of ACTIONS, done before that), with (more of each prompt), lora (folder of an adapter),
leave (what is under way behind the batch, for the next one), stop_at (the step before which the daemon is stopped,
until the batch ends)}] (null: each a line of stdin, answered by a line of stdout), record: what the plan chose is
compared with direct calls, fail_loads: of chunks. RESULT: batches [[{tokens, top, held, reason}]], seconds and the
longest step of each batch, blocks: that vLLM counts with, differing: lists that differ, chosen: lists that were
compared, done: what the resets of `do` answered.
"""

from __future__ import annotations

import contextlib
import functools
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

import kvstrata  # noqa: E402
from kvstrata.daemon import Daemon  # noqa: E402
from restarts import end, go_on, hang  # noqa: E402

TOP = 4  # logprobs, to tell near-ties
PATIENCE = 60  # seconds until what is saved must be


class Recorder:
    """What went through the binding, and what the plan chose; one request at a time."""

    def __init__(self) -> None:
        self.steps: list[tuple[list[int], dict[int, list[Any]]]] = []  # ids; layer: k, v, q, chosen
        self.begin, self.append, self.attend = kvstrata.Session.step, kvstrata.Step.append, kvstrata.Step.attend
        recorder = self

        def begin(session: kvstrata.Session, members: Any) -> kvstrata.Step:
            members = list(members)
            recorder.steps.append((list(members[0][1]), {}))
            recorder.last = session, members[0][0].model, members[0][0].plan
            return recorder.begin(session, members)

        def append(step: kvstrata.Step, layer: int, k: Any, v: Any) -> None:
            recorder.steps[-1][1][layer] = [k.clone(), v.clone()]
            recorder.append(step, layer, k, v)

        def attend(step: kvstrata.Step, layer: int, q: Any, *args: Any) -> Any:
            kept = q.clone()
            out = recorder.attend(step, layer, q, *args)
            recorder.steps[-1][1][layer] += [kept, step.selected_tokens()]
            return out

        kvstrata.Session.step, kvstrata.Step.append, kvstrata.Step.attend = begin, append, attend

    def compare(self, prompt: int) -> tuple[int, int]:
        """(lists that differ, all lists) when the same keys and queries are passed to the binding alone."""
        kvstrata.Session.step, kvstrata.Step.append, kvstrata.Step.attend = self.begin, self.append, self.attend
        session, model, plan = self.last
        differing = every = done = 0
        with session.open(model, plan) as sequence:
            for ids, layers in self.steps:
                with session.step([(sequence, ids)]) as step:
                    for layer, (k, v, q, chosen) in layers.items():
                        step.append(layer, k, v)
                        step.attend(layer, q)
                        for a, b in zip(step.selected_tokens(), chosen, strict=True):
                            every += 1
                            differing += a.tolist() != b.tolist()
                if done < prompt <= done + len(ids):
                    sequence.prefill_done()
                done += len(ids)
        return differing, every


class Killer:
    """Kills a process before the left-th call of a method from now on."""

    def __init__(self, owner: type, method: str) -> None:
        self.process = os.getpid()
        self.left = -1
        called = getattr(owner, method)

        def counted(half: Any, *args: Any) -> Any:
            if self.left == 0:
                os.kill(self.process, signal.SIGKILL)
                os.waitid(os.P_PID, self.process, os.WEXITED | os.WNOWAIT)
            self.left -= 1
            return called(half, *args)

        setattr(owner, method, counted)

    def aim(self, batch: dict[str, Any], daemon: Daemon | None) -> None:
        """As a batch says."""
        self.left = -1
        if (at := batch.get("kill_at")) is not None and daemon is not None:
            self.process, self.left = daemon.process.pid, at
        elif (at := batch.get("die_at")) is not None:
            self.process, self.left = os.getpid(), at


def killer_of(plan: str) -> Killer:
    if plan == "chunks":
        from kvstrata_vllm.transfers import Transfers
        return Killer(Transfers, "_submit")
    from kvstrata_vllm.worker import WorkerHalf
    return Killer(WorkerHalf, "attend")


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


def flags(plan: str | None, extra: dict[str, Any]) -> dict[str, Any]:
    if plan is None:
        return {}
    transfer = {"kv_connector": "KvstrataConnector", "kv_role": "kv_both",
                "kv_connector_extra_config": {"plan": plan or "full", **extra}}
    if plan == "chunks":
        return {"kv_transfer_config": {**transfer, "kv_connector_extra_config": extra}}
    transfer["kv_connector"] = "KvstrataOwnedConnector"
    return {"attention_backend": "CUSTOM", "kv_transfer_config": transfer}


def change(model: Any) -> None:
    """As those who train change it, in place."""
    for name, tensor in model.named_parameters():
        if "layernorm" in name:
            tensor.data[::2] *= 1.5


def sleep(llm: Any) -> None:
    llm.sleep(1)
    llm.wake_up()


class Stopwatch:
    """Of the engine's steps. longest: seconds of one; stop_at: the step before which the daemon is stopped."""

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
    plan = spec["plan"]
    if plan == "":
        os.environ["KVSTRATA_DISABLE"] = "1"
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        socket = spec.get("socket") or os.path.join(folder, "kvstratad.sock")
        start = functools.partial(Daemon, *spec.get("daemon", ()), socket=socket)
        daemon = stack.enter_context(start()) if plan and not spec.get("socket") else None
        from vllm import LLM
        llm = LLM(**{"dtype": "float32", "seed": 0, "gpu_memory_utilization": 0.25,
                     **flags(plan, {"socket": socket, **spec.get("extra", {})}), **spec["llm"]})
        recorder = Recorder() if spec.get("record") else None
        killer = killer_of(plan) if plan else None
        if spec.get("fail_loads"):
            fail_loads()
        watch = Stopwatch(llm)
        result: dict[str, Any] = {"batches": [], "seconds": [], "longest": [], "done": [],
                                  "blocks": llm.llm_engine.vllm_config.cache_config.num_gpu_blocks}
        if spec["batches"] is None:
            print(json.dumps("ready"), file=answers, flush=True)
        for batch in batches_of(spec):
            if killer is not None:
                killer.aim(batch, daemon)
            answers_of = [ACTIONS[name](llm) for name in batch.get("do", ())]
            result["done"] += [answer for answer in answers_of if isinstance(answer, bool)]
            watch.begin(daemon, batch.get("stop_at"))
            begin = time.perf_counter()
            result["batches"].append(generate(llm, batch))
            result["seconds"].append(time.perf_counter() - begin)
            watch.end()
            result["longest"].append(watch.longest)
            if spec["batches"] is None:
                print(json.dumps(result["batches"][-1]), file=answers, flush=True)
            if daemon is not None and batch.get("end_by"):
                end(daemon, batch["end_by"])
            if daemon is not None and daemon.process.poll() is not None:
                daemon = stack.enter_context(start())
        if recorder is not None:
            result["differing"], result["chosen"] = recorder.compare(len(spec["batches"][0]["prompts"][0]))
        llm.llm_engine.engine_core.shutdown()
        json.dump(result, open(sys.argv[2], "w"))


if __name__ == "__main__":
    main()
