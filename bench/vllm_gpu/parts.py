# SPDX-License-Identifier: Apache-2.0
"""What an engine is measured at. A part is a name in `spec["parts"]`:

    fresh     time to first token of prompts that nobody holds, and the next tokens
    load      the same prompts behind a reset of vLLM's own cache: what lies below is loaded; and before, as others left it
    decode    batches of prompts, a step a token
    kernels   what a step of each of these batches spends its time on, by kernel
    capacity  as many prompts as the cache has room for, at once: how many, and their steps
    arrive    a batch decodes while a prompt arrives: one that is stored, and one that is loaded
    tokens    tokens behind vLLM's own prefix hit, behind a load, and computed anew
    identity  of ours: what the model is known by without a name, and why it would be private, if it would
    trace     conversations (conversations.py): first tokens, and seconds for all of it
"""

from __future__ import annotations

import json
import time
from typing import Any

from conversations import Shape, Trace
from driver import Driver, prompt_of


class Measured:
    """The parts, and the file that rows go to."""

    def __init__(self, spec: dict[str, Any], llm: Any) -> None:
        self._spec, self._llm, self._driver = spec, llm, Driver(llm)
        self._words = spec["words"]

    def row(self, part: str, **fields: Any) -> None:
        with open(self._spec["rows"], "a") as file:
            file.write(json.dumps({"engine": self._spec["engine"], "part": part, **fields}) + "\n")

    def settle(self) -> None:
        """Steps on until what was computed is stored below: a step lets the connector report."""
        end = time.monotonic() + self._spec["settle"]
        core = self._llm.llm_engine.engine_core.engine_core
        while time.monotonic() < end and core.scheduler.has_requests():
            core.step_fn()
        time.sleep(self._spec["settle"] / 4)

    def forget(self) -> None:
        """vLLM's own cache on the GPU, not what lies below."""
        self.settle()
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: requests are under way")

    def identity(self) -> None:
        from kvstrata_vllm import loaded
        began = time.perf_counter()
        found = loaded._Loaded(self._llm.llm_engine.vllm_config, loaded._worker().get_model(), None).identity
        self.row("identity", digest=found.now().digest, private=found.now().private, unknown=found._unknown[:8],
                 made_s=time.perf_counter() - began)

    def fresh(self) -> None:
        for length, times in self._spec["fresh"]:
            firsts, held = [], []
            for i in range(times):
                done = self._driver.run([prompt_of(length, i, self._words)], 2)
                firsts.append(done["first"][0])
                held.append(done["held"][0])
            self.row("fresh", tokens=length, seconds=firsts, held=held)

    def load(self) -> None:
        """first: as the engine finds them, which others have computed, or nobody; then behind resets."""
        for length, times, count in self._spec["load"]:
            prompts = [prompt_of(length, i, self._words) for i in range(count)]
            self._loaded("first", length, [self._driver.run([prompt], 2) for prompt in prompts])
            runs = []
            for i in range(times):
                if i % count == 0:
                    self.forget()
                runs.append(self._driver.run([prompts[i % count]], 2))
            self._loaded("load", length, runs)

    def _loaded(self, part: str, length: int, runs: list[dict[str, Any]]) -> None:
        self.row(part, tokens=length, seconds=[run["first"][0] for run in runs], held=[run["held"][0] for run in runs])

    def hits(self) -> None:
        """First token behind vLLM's own cache: what loading adds to."""
        for length, times, _ in self._spec["load"]:
            self._driver.run([prompt_of(length, 0, self._words)], 2)
            done = [self._driver.run([prompt_of(length, 0, self._words)], 2) for _ in range(times)]
            self.row("hits", tokens=length, seconds=[run["first"][0] for run in done],
                     held=[run["held"][0] for run in done])

    def decode(self) -> None:
        for length, batch in self._spec["decode"]:
            prompts = [prompt_of(length, i, self._words) for i in range(batch)]
            self._driver.run(prompts, 1)  # computed or loaded; what follows decodes together
            done = self._driver.run(prompts, self._spec["decode_tokens"])
            self.row("decode", tokens=length, batch=batch, seconds=done["gaps"], held=done["held"],
                     output=done["tokens"])
        self._losses()

    def kernels(self) -> None:
        """Prompts are held, so that their steps are nearly all there is."""
        for length, batch in self._spec["decode"]:
            prompts = [prompt_of(length, i, self._words) for i in range(batch)]
            self._driver.run(prompts, 1)
            self._by_kernel(length, prompts)

    def _by_kernel(self, length: int, prompts: list[list[int]]) -> None:
        from torch.profiler import ProfilerActivity, profile
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            self._driver.run(prompts, 17)
        longest = sorted(found.key_averages(), key=lambda kernel: -kernel.device_time_total)[:16]
        self.row("kernels", tokens=length, batch=len(prompts), counted=16,
                 kernels=[(kernel.key[:120], kernel.count, kernel.device_time_total) for kernel in longest])

    def capacity(self) -> None:
        """Prompts that are computed before decode together. most: of them, however large the cache is."""
        length, new, most = self._spec["capacity"]
        cache = self._llm.llm_engine.vllm_config.cache_config
        each = -(-(length + new) // cache.block_size)
        count = min(most, (cache.num_gpu_blocks - 1) // each)  # vLLM keeps a block for itself
        prompts = [prompt_of(length, i, self._words) for i in range(count)]
        began = time.perf_counter()
        self._driver.run(prompts, 1)
        computed = time.perf_counter() - began
        done = self._driver.run(prompts, new)
        self.row("capacity", tokens=length, sequences=count, blocks=cache.num_gpu_blocks, block_size=cache.block_size,
                 computed_s=computed, seconds=done["gaps"], held=done["held"])
        self._by_kernel(length, prompts)

    def _losses(self) -> None:
        """What a plan has lost, as far as the engine has measured it."""
        from kvstrata_vllm.block_rows import BlockRows
        losses = BlockRows.losses()
        if losses:
            self.row("losses", layers=[loss._asdict() for loss in losses])

    def arrive(self) -> None:
        """Steps of a batch that decodes while one more prompt is computed (and stored), and while it is loaded."""
        length, batch = self._spec["arrive"]
        prompts = [prompt_of(length, i, self._words) for i in range(batch)]
        for kind in self._spec["arrive_kinds"]:
            late = prompt_of(length, 9000, self._words)
            self.forget()
            self._driver.run(prompts, 1)
            for prompt in prompts:
                self._driver.add(prompt, 400)
            steps: list[float] = []
            arrived, first = 0.0, 0.0
            began = time.perf_counter()
            for number in range(260):
                if number == 60:
                    name, arrived = self._driver.add(late, 2), time.perf_counter()
                before = time.perf_counter()
                got = self._driver.step()
                now = time.perf_counter()
                steps.append(now - before)
                if number >= 60 and first == 0.0 and name in got and got[name][0] > 0:
                    first = now - arrived
            while self._driver.busy():
                self._driver.step()
            self.row("arrive", kind=kind, tokens=length, batch=batch, steps=steps, first=first,
                     seconds_in_all=time.perf_counter() - began)

    def tokens(self) -> None:
        """Equal bytes give equal tokens: behind vLLM's own prefix hit, and behind a load of the same blocks."""
        for length, count in self._spec["tokens"]:
            prompts = [prompt_of(length, 100 + i, self._words) for i in range(count)]
            computed = [self._driver.run([prompt], 16)["tokens"][0] for prompt in prompts]
            hit = [self._driver.run([prompt], 16) for prompt in prompts]
            self.forget()
            loaded = [self._driver.run([prompt], 16) for prompt in prompts]
            self.row("tokens", tokens=length, prompts=count,
                     equal_to_hit=sum(a["tokens"] == b["tokens"] for a, b in zip(hit, loaded)),
                     equal_to_computed=sum(a == b["tokens"][0] for a, b in zip(computed, loaded)),
                     held_by_hit=[run["held"][0] for run in hit], held_by_load=[run["held"][0] for run in loaded])

    def trace(self) -> dict[str, Any]:
        """Its row: the time to first token of requests behind the first of a conversation, and of those."""
        shape = Shape(**self._spec["trace"])
        trace = Trace(shape, self._words)
        open_now: dict[str, tuple[int, float]] = {}  # by name: the number, and when it was asked
        firsts: dict[int, float] = {}
        held: dict[int, int] = {}
        prompts: dict[int, int] = {}
        began = time.perf_counter()
        while not trace.over:
            while len(open_now) < shape.at_once and (asked := trace.next_prompt()) is not None:
                number, prompt = asked
                prompts[number] = len(prompt)
                open_now[self._driver.add(prompt, shape.answer)] = number, time.perf_counter()
            for name, (count, tokens, cached) in self._driver.step().items():
                number, since = open_now[name]
                if count:
                    firsts.setdefault(number, time.perf_counter() - since)
                held[number] = max(held.get(number, 0), cached)
                if count == shape.answer:
                    del open_now[name]
                    trace.answered(number, tokens)
        total = time.perf_counter() - began
        later = [number for number in sorted(firsts) if not trace.is_first(number)]
        row = {"shape": self._spec["trace"], "tokens": sum(prompts.values()), "held": sum(held.values()),
               "seconds": [firsts[number] for number in later], "total_s": total,
               "first_turn": [firsts[number] for number in sorted(firsts) if trace.is_first(number)],
               "later_tokens": sum(prompts[number] for number in later),
               "later_held": sum(held[number] for number in later)}
        self.row("trace", **row)
        return row
