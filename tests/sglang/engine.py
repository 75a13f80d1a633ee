#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""SGLang in processes of its own, as a test asks for it: one engine, its batches one after the other.

    engine.py SPEC.json RESULT.json

SPEC: plan (null: plain SGLang; "": KVSTRATA_DISABLE=1 with the flags of a plan; "hicache": SGLang's own pool with the
daemon as HiCache's storage), socket of a daemon (null: one is started with the arguments in `daemon`, and started again
when it was killed), server (arguments of sglang.Engine), batches [{prompts [ids], tokens, kill_at (number of the
attention call before which the daemon is killed, or null), stop_at: the same, it answers nothing until the batch has
ended, end_by: the signal that it gets behind the batch, when nothing runs, left_dead: it is not started again before the
next batch, flush: SGLang's cache before it, abort_at: requests are aborted when they have so many tokens}],
record: what the plan chose is compared with direct calls. RESULT: batches [[{tokens, top, held, reason, message,
retractions}]], seconds of each batch, sequences that a daemon of its own has behind each, differing: lists that differ,
chosen: lists that were compared.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

os.environ.update(SGLANG_USE_CPU_ENGINE="1", HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", DO_NOT_TRACK="1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from kvstrata.daemon import Daemon, find_daemon  # noqa: E402
from restarts import end, go_on  # noqa: E402

if __name__ == "__mp_main__":  # SGLang's own processes, which Python starts with this file
    if os.environ["KVSTRATA_PLAN"] == "hicache":
        from host_pools import serve_without_cuda
        serve_without_cuda()
    else:
        from orders import Orders
        Orders(pathlib.Path(os.environ["KVSTRATA_TEST_ORDERS"]))

TOP = 4  # logprobs, to tell near-ties
CLOSED = 10  # seconds until what ended must be closed
SERVED = 60  # until a daemon that goes on must serve


async def finished(engine: Any, ids: list[int], tokens: int, abort_at: int | None) -> dict[str, Any]:
    """Streams, since SGLang raises without what was generated when a request that does not ends with an error."""
    last: dict[str, Any] = {}
    async for last in await engine.async_generate(
            input_ids=ids, stream=True, return_logprob=True, top_logprobs_num=TOP,
            sampling_params={"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}):
        if len(last["output_ids"]) == abort_at:
            engine.tokenizer_manager.abort_request(last["meta_info"]["id"])
    meta = last["meta_info"]
    return {"tokens": last["output_ids"], "held": meta["cached_tokens"], "reason": meta["finish_reason"]["type"],
            "message": meta["finish_reason"].get("message"), "retractions": meta["num_retractions"],
            "top": [{str(i): logprob for logprob, i, _ in at or ()} for at in meta["output_top_logprobs"]]}


async def generate(engine: Any, batch: dict[str, Any]) -> list[dict[str, Any]]:
    return await asyncio.gather(*(finished(engine, ids, batch["tokens"], batch.get("abort_at"))
                                  for ids in batch["prompts"]))


def await_served(engine: Any, batch: dict[str, Any]) -> None:
    until = time.monotonic() + SERVED
    while engine.loop.run_until_complete(finished(engine, batch["prompts"][0], 1, None))["reason"] == "abort":
        assert time.monotonic() < until, "it goes on, and does not serve"


def sequences(socket: str) -> int:
    """That the daemon still has when those that ended had time to be closed, beside."""
    cli, until = pathlib.Path(find_daemon()).with_name("kvstrata"), time.monotonic() + CLOSED
    while True:
        said = subprocess.run([cli, "--socket", socket, "--output", "json", "seq", "ls"], check=True,
                              capture_output=True)
        left = len(json.loads(said.stdout)["sequences"])
        if left == 0 or time.monotonic() > until:
            return left
        time.sleep(0.02)


def flags(plan: str | None) -> dict[str, Any]:
    if plan is None:
        return {"attention_backend": "torch_native"}
    if plan == "hicache":
        storage = {"backend_name": "kvstrata", "module_path": "kvstrata_sglang.storage",
                   "class_name": "KvstrataStorage", "interface_v1": 1, "prefetch_threshold": 64}
        return {"attention_backend": "torch_native", "enable_hierarchical_cache": True, "page_size": 64,
                "hicache_size": 1, "hicache_storage_backend": "dynamic",
                "hicache_storage_prefetch_policy": "wait_complete",
                "hicache_storage_backend_extra_config": json.dumps(storage)}
    return {"attention_backend": "kvstrata", "radix_cache_backend": "kvstrata"}


def main() -> None:
    spec = json.load(open(sys.argv[1]))
    plan, orders = spec["plan"], pathlib.Path(f"{sys.argv[2]}.orders")
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        socket = spec.get("socket") or os.path.join(folder, "kvstratad.sock")
        start = functools.partial(Daemon, *spec.get("daemon", ()), socket=socket)
        daemon = stack.enter_context(start()) if plan and not spec.get("socket") else None
        os.environ.update(KVSTRATA_PLAN=plan or "full", KVSTRATA_SOCKET=socket, KVSTRATA_TEST_ORDERS=str(orders))
        if plan == "":
            os.environ["KVSTRATA_DISABLE"] = "1"
        import sglang
        engine = sglang.Engine(**{"device": "cpu", "dtype": "float32", "sampling_backend": "pytorch", "random_seed": 0,
                                  "disable_overlap_schedule": True, "skip_tokenizer_init": True, **flags(plan),
                                  **spec["server"]})
        stack.callback(engine.shutdown)
        result: dict[str, Any] = {"batches": [], "seconds": [], "sequences": []}
        for batch in spec["batches"]:
            if batch.get("flush"):
                flushed = engine.loop.run_until_complete(engine.tokenizer_manager.flush_cache(timeout_s=60))
                assert flushed.success
            if daemon is not None and batch.keys() & {"kill_at", "stop_at"}:
                orders.write_text(json.dumps({**batch, "daemon": daemon.process.pid}))
            if spec.get("record"):
                orders.write_text(json.dumps({"record": len(batch["prompts"][0])}))
            begin = time.perf_counter()
            result["batches"].append(engine.loop.run_until_complete(generate(engine, batch)))
            result["seconds"].append(time.perf_counter() - begin)
            if daemon is not None and "stop_at" in batch:
                go_on(daemon)
                await_served(engine, batch)
            if daemon is not None and batch.get("end_by"):
                end(daemon, batch["end_by"])
            if daemon is not None and daemon.process.poll() is None:
                result["sequences"].append(sequences(socket))
            elif daemon is not None and not batch.get("left_dead"):
                daemon = stack.enter_context(start())
        if spec.get("record"):
            result.update(json.loads(pathlib.Path(f"{orders}.compared").read_text()))
        json.dump(result, open(sys.argv[2], "w"))


if __name__ == "__main__":
    main()
