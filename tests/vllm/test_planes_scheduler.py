# SPDX-License-Identifier: Apache-2.0
"""Plan strata under vLLM's own scheduler, without a GPU: prefix hits, pieces of prompts, preemption, steps of many
requests. Each row attends its request's tokens and nothing else."""

from __future__ import annotations

import pathlib
import random
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm installs it")

import families  # noqa: E402
import torch  # noqa: E402
from planes_engine import BLOCK, BLOCKS, MOST, NAME, SLOTS, Runner  # noqa: E402
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager  # noqa: E402

from kvstrata_vllm.planes_spec import PlanesManager, PlanesSpec  # noqa: E402

BUDGET, REQUESTS = 192, 60


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Any]:
    from vllm.engine.arg_utils import EngineArgs
    made = families.made("llama", pathlib.Path(tmp_path_factory.mktemp("model")))

    def make(ahead: bool) -> Any:
        found = EngineArgs(**{**made, "max_model_len": MOST, "max_num_batched_tokens": BUDGET, "max_num_seqs": SLOTS,
                              "enforce_eager": True, "async_scheduling": ahead,
                              "skip_tokenizer_init": True}).create_engine_config()
        found.cache_config.block_size = BLOCK
        found.cache_config.num_gpu_blocks = BLOCKS
        return found
    return make


class Engine:
    """ahead: a step is scheduled before vLLM hears of the one before it."""

    def __init__(self, config: Any, ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
        from vllm.v1.structured_output import StructuredOutputManager
        spec = PlanesSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.bfloat16, state_content_bytes=136)
        page = spec.page_size_bytes
        cache = KVCacheConfig(BLOCKS, [KVCacheTensor(BLOCKS * page, [NAME], BLOCKS * page, page)],
                              [KVCacheGroupSpec([NAME], spec)])
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        kind = AsyncScheduler if ahead else Scheduler
        self.scheduler = kind(config, cache, StructuredOutputManager(config), BLOCK, BLOCK)
        self.runner, self._ahead, self.preempted = Runner(self.scheduler, monkeypatch), ahead, 0
        self._untold: list[Any] = []

    def add(self, name: str, prompt: list[int], new: int) -> Any:
        from vllm import SamplingParams
        from vllm.v1.request import Request
        request = Request(name, prompt, SamplingParams(max_tokens=new, ignore_eos=True), None, block_hasher=self._hasher)
        self.scheduler.add_request(request)
        return request

    def step(self) -> None:
        from vllm.v1.outputs import ModelRunnerOutput
        output = self.scheduler.schedule()
        self.preempted += len(output.preempted_req_ids or ())
        sampled = self.runner.step(output)
        names = list(sampled)
        self._untold.append((output, ModelRunnerOutput(names, {name: i for i, name in enumerate(names)},
                                                       list(sampled.values()))))
        while len(self._untold) > (1 if self._ahead and names else 0):
            self.scheduler.update_from_output(*self._untold.pop(0))


def serve(engine: Engine, draw: random.Random) -> None:
    """Prompts that begin alike, come at once, or go on from what was answered; more of them until one is preempted."""
    stems = [draw.choices(range(10, 900), k=300) for _ in range(3)]
    requests: list[Any] = []
    while (more := len(requests) < REQUESTS or not engine.preempted) or engine.scheduler.has_requests():
        if more and draw.random() < 0.2:
            prompt = draw.choice(stems)[:draw.choice((1, 63, 64, 65, 128, 129, 191, 192, draw.randrange(1, 300)))]
            if requests and draw.random() < 0.4:
                prompt = list(draw.choice(requests).all_token_ids)[:500]
            prompt = prompt + draw.choices(range(10, 900), k=draw.choice((0, 0, 1, draw.randrange(1, 100))))
            new = draw.choice((1, 2, draw.randrange(1, 150)))
            requests += [engine.add(f"r{len(requests) + i}", prompt, new) for i in range(draw.choice((1, 1, 3)))]
        engine.step()


@pytest.mark.parametrize("ahead", [False, True])
def test_rows_attend_what_is_theirs(config: Any, monkeypatch: pytest.MonkeyPatch, ahead: bool):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    engine = Engine(config(ahead), ahead, monkeypatch)
    serve(engine, random.Random(seed))
    assert engine.runner.hits > 5 and engine.preempted > 0


def test_vllms_manager_offers_what_is_not_sealed(config: Any, monkeypatch: pytest.MonkeyPatch):
    """The control: a request would attend blocks that another fills in the same step."""
    monkeypatch.setattr(PlanesManager, "cache_blocks", FullAttentionManager.cache_blocks)
    engine = Engine(config(False), False, monkeypatch)
    prompt = random.Random(1).choices(range(10, 900), k=2 * BLOCK)
    engine.add("first", prompt, 4)
    engine.add("second", [*prompt, 11], 4)
    with pytest.raises(AssertionError, match="second, 129 tokens"):
        engine.step()


@pytest.mark.parametrize("ahead", [False, True])
def test_a_prompt_of_one_step_is_found_later(config: Any, monkeypatch: pytest.MonkeyPatch, ahead: bool):
    """Its blocks are offered, though no step follows in which they would have been."""
    engine = Engine(config(ahead), ahead, monkeypatch)
    prompt = random.Random(2).choices(range(10, 900), k=2 * BLOCK + 5)
    for name in ("first", "second"):
        engine.add(name, prompt, 1)
        while engine.scheduler.has_requests():
            engine.step()
    assert engine.runner.hits == 1
