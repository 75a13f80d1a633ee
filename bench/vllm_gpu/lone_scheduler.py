# SPDX-License-Identifier: Apache-2.0
"""A scheduler of vLLM's without workers: what these would answer is made up. For waiting.py."""

from __future__ import annotations

import functools
import random
import time
from types import SimpleNamespace
from typing import Any

import torch
from kvstrata.chunks import COMING
from kvstrata.torch_identity import Identity

BLOCK, CHUNK, BATCH = 16, 16, 8192  # tokens a block, blocks a chunk, tokens a step
SEED, PATIENCE = 20261128, 60.0


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
