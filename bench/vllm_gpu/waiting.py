#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A step of vLLM's scheduler while requests of 128K tokens wait, with its own offloading and with ours.

    waiting.py [--requests 64] [--tokens 130816] [--steps 200] [--json-out FILE]

Two schedulers without workers in one process, asked in turns: native (16 blocks of 16 tokens a chunk) and ours, behind a
daemon of this program's. One request decodes and has nearly all blocks; the others wait. What is timed is schedule():

    nothing    the daemon, or vLLM's host memory, has nothing of what waits
    held       it has all of it: there are no blocks to load it to
    coming     all of it is being stored by others: vLLM asks for each request in each step
    arrival    the first step behind the arrival of all of them, with their arrival (add_request), when all is held

Of "coming" ours has an answer that says so put in the place of the daemon's, which has stores for no more than a moment.
No GPU is needed, and nothing is computed: what workers would answer is made up. A row is ours over native's: at most 1.1,
but for the arrival, where ours asks for all keys of all requests and vLLM makes the first one's alone.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "integrations" / name / "src") for name in ("kvstrata", "kvstrata_vllm")]
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", HF_HUB_OFFLINE="1",
                  VLLM_LOGGING_LEVEL="ERROR", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_CI_ENV="1")

import torch  # noqa: E402
from kvstrata.chunks import COMING  # noqa: E402
from kvstrata.daemon import Daemon  # noqa: E402
from kvstrata.machine import device_name  # noqa: E402
from kvstrata.torch_identity import Identity  # noqa: E402

BLOCK, CHUNK, BATCH = 16, 16, 8192  # tokens a block, blocks a chunk, tokens a step
SEED, PATIENCE = 20261128, 60.0
KINDS = ("native", "ours")


@functools.cache
def prompt_of(tokens: int, seed: int) -> tuple[int, ...]:
    return tuple(random.Random(f"{SEED}/{seed}").choices(range(10, 900), k=tokens))


class Queue:
    """A scheduler of one kind, and the requests that it has."""

    def __init__(self, kind: str, model: str, socket: str, tokens: int) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
        from vllm.v1.structured_output import StructuredOutputManager
        from vllm.utils.hashing import sha256
        self.kind, self._tokens = kind, tokens
        extra = ({"cpu_bytes_to_use": 8 << 30, "blocks_per_chunk": CHUNK} if kind == "native" else {"socket": socket})
        connector = {"native": "OffloadingConnector", "ours": "KvstrataConnector"}[kind]
        config = EngineArgs(model=model, skip_tokenizer_init=True, max_model_len=tokens + 4096, dtype="bfloat16",
                            max_num_batched_tokens=BATCH, max_num_seqs=128, enforce_eager=True, async_scheduling=False,
                            kv_transfer_config={"kv_connector": connector, "kv_role": "kv_both",
                                                "kv_connector_extra_config": extra}).create_engine_config()
        blocks = tokens // BLOCK + 300
        config.cache_config.block_size = BLOCK
        config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.bfloat16)
        name, page = "model.layers.0.self_attn.attn", spec.page_size_bytes
        cache = KVCacheConfig(blocks, [KVCacheTensor(blocks * page, [name], blocks * page, page)],
                              [KVCacheGroupSpec([name], spec)])
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self.scheduler = Scheduler(config, cache, StructuredOutputManager(config), BLOCK, BLOCK)
        self.connector: Any = self.scheduler.connector
        if kind == "ours":
            from kvstrata_vllm.chunk_metadata import Loaded
            welcome = self.connector._source.client.welcome
            self.connector.set_xfer_handshake_metadata_pp_aware(
                {(0, 0): Loaded(0, Identity("ab" * 32, None), ["none"], welcome)})

    def request(self, name: str, seed: int) -> Any:
        from vllm import SamplingParams
        from vllm.v1.request import Request
        return Request(name, list(prompt_of(self._tokens, seed)), SamplingParams(max_tokens=10**6, ignore_eos=True), None,
                       block_hasher=self._hasher)

    def step(self) -> float:
        """Seconds of schedule(); the workers have then done what it says, but for copies."""
        from vllm.v1.outputs import ModelRunnerOutput
        began = time.perf_counter()
        output = self.scheduler.schedule()
        seconds = time.perf_counter() - began
        names = list(output.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = self.scheduler.requests[name]
            sampled.append([7] if request.num_computed_tokens >= request.num_prompt_tokens else [])
        self.scheduler.update_from_output(output, ModelRunnerOutput(names, {name: i for i, name in enumerate(names)},
                                                                    sampled))
        return seconds

    def occupy(self) -> None:
        """The first request has nearly all blocks, and decodes."""
        self.scheduler.add_request(self.request("first", -1))
        request = self.scheduler.requests["first"]
        while request.num_output_tokens < 2:
            self.step()

    def hold(self, requests: list[Any], complete: bool) -> None:
        """All keys of these are stored, or are on the way to be, without a copy."""
        manager = self.connector.connector_scheduler.manager
        for request in requests:
            status = self.connector.connector_scheduler._req_status[request.request_id]
            status.update_offload_keys()
            keys = list(status.group_states[0].offload_keys)
            if self.kind == "ours":
                self._store(manager, keys, status.req_context)
                continue
            manager.prepare_store(keys, status.req_context)
            if complete:
                manager.complete_store(keys, status.req_context)

    def _store(self, source: Any, keys: list[bytes], context: Any) -> None:
        """As workers would, as far as there are credits."""
        from types import SimpleNamespace
        source.begins(context.req_id)
        end = time.monotonic() + PATIENCE
        while keys:
            ready = source.client.available
            if ready == 0:
                if time.monotonic() > end:
                    raise TimeoutError(f"{len(keys)} chunks get no credits within {PATIENCE:g} s")
                source._fetch()
                time.sleep(0.002)
                continue
            now, keys = keys[:ready], keys[ready:]
            ids = source.prepare_store(now, context).store_spec.block_ids
            source.scheduled([], {}, {10**6: SimpleNamespace(dst_spec=SimpleNamespace(block_ids=ids))})
            source.reported({10**6: 1}, ())

    def end(self, requests: list[Any]) -> None:
        from vllm.v1.request import RequestStatus
        self.scheduler.finish_requests([request.request_id for request in requests], RequestStatus.FINISHED_ABORTED)
        self.step()

    def say_coming(self) -> None:
        """Ours: from now on all that is asked for is on the way."""
        from kvstrata.chunks import Lease

        def ask(keys: Any, lease: Any = None) -> Any:
            lease = lease or Lease(0)
            lease.ids += [COMING] * len(keys)
            return lease

        client = self.connector._source.client
        client.ask, client.release = ask, lambda leases: None


class Waiting:
    def __init__(self, given: argparse.Namespace, queues: list[Queue]) -> None:
        self._given, self._queues = given, queues
        self.seconds: dict[tuple[str, str], list[float]] = {}

    def _requests(self, name: str, seed: int) -> dict[str, list[Any]]:
        """Of each queue; not added yet."""
        return {queue.kind: [queue.request(f"{name}{i}", seed + i) for i in range(self._given.requests)]
                for queue in self._queues}

    def _steps(self, case: str) -> None:
        """Of one and the other in turns, when all look-ups are answered."""
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            for queue in self._queues:
                queue.step()
            time.sleep(0.01)
        gc.collect()
        for _ in range(self._given.steps):
            for queue in self._queues:
                self.seconds.setdefault((case, queue.kind), []).append(queue.step())

    def _wait(self, case: str, requests: dict[str, list[Any]]) -> None:
        for queue in self._queues:
            for request in requests[queue.kind]:
                queue.scheduler.add_request(request)
        self._steps(case)
        for queue in self._queues:
            queue.end(requests[queue.kind])

    def run(self) -> None:
        for queue in self._queues:
            queue.occupy()
        self._wait("nothing", self._requests("n", 0))
        self._hold(1000, complete=True)
        self._arrive(1000)
        self._wait("held", self._requests("h", 1000))
        self._hold(2000, complete=False)
        next(queue for queue in self._queues if queue.kind == "ours").say_coming()
        self._wait("coming", self._requests("c", 2000))

    def _hold(self, seed: int, complete: bool) -> None:
        """By others, which have ended."""
        requests = self._requests(f"s{seed}-", seed)
        for queue in self._queues:
            if not complete and queue.kind == "ours":
                continue
            for request in requests[queue.kind]:
                queue.scheduler.add_request(request)
            queue.hold(requests[queue.kind], complete)
            queue.end(requests[queue.kind])

    def _arrive(self, seed: int) -> None:
        for number in range(5):
            requests = self._requests(f"a{number}-", seed)
            for queue in self._queues:
                gc.collect()
                began = time.perf_counter()
                for request in requests[queue.kind]:
                    queue.scheduler.add_request(request)
                added = time.perf_counter() - began
                self.seconds.setdefault(("arrival", queue.kind), []).append(added + queue.step())
            for queue in self._queues:
                queue.end(requests[queue.kind])


def rows_of(seconds: dict[tuple[str, str], list[float]]) -> list[dict[str, Any]]:
    rows = []
    for case in dict.fromkeys(case for case, _ in seconds):
        native, ours = (sorted(1e3 * value for value in seconds[case, kind]) for kind in KINDS)
        rows.append({"id": f"vllm-waiting/{case}", "value": statistics.median(ours), "unit": "ms",
                     "p10": ours[len(ours) // 10], "p90": ours[len(ours) * 9 // 10], "n": len(ours),
                     "baseline": {"name": "vLLM's offloading", "value": statistics.median(native)},
                     "ratio": statistics.median(native) / statistics.median(ours),
                     **({} if case == "arrival" else {"must": 1 / 1.1})})
        print(f"{case}: native {statistics.median(native):.3f} ms (90 %: {native[len(native) * 9 // 10]:.3f}), ours "
              f"{statistics.median(ours):.3f} ({ours[len(ours) * 9 // 10]:.3f}), over native's "
              f"{statistics.median(ours) / statistics.median(native):.3f}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=131072 - 256)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json-out", type=pathlib.Path)
    parser.add_argument("--commit", default="uncommitted")
    parser.add_argument("--date", default="")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Daemon("--set", "chunks.bytes=2GiB") as daemon:
        subprocess.run([sys.executable, HERE / "model.py", f"{folder}/tiny", "--shape", "tiny"], check=True)
        waiting = Waiting(given, [Queue(kind, f"{folder}/tiny", daemon.socket, given.tokens) for kind in KINDS])
        waiting.run()
        rows = rows_of(waiting.seconds)
        if given.json_out:
            import vllm
            given.json_out.write_text(json.dumps({
                "suite": "vllm-waiting", "device": device_name(), "commit": given.commit, "date": given.date,
                "command": "bench/vllm_gpu/waiting.py", "ceilings": {}, "rows": rows,
                "context": {"notes": f"vLLM {vllm.__version__}, {given.requests} requests of {given.tokens} tokens, blocks of "
                                     f"{BLOCK} tokens and chunks of {CHUNK * BLOCK}, no worker, seed {SEED}"}},
                indent=1) + "\n")
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
