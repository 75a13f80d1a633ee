# SPDX-License-Identifier: Apache-2.0
"""Steps an engine by hand, so that it is known when each token came; and the prompts, which are the same everywhere."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

SEED = 20261128


def prompt_of(length: int, index: int, words: int) -> list[int]:
    """The same in every process."""
    draw = random.Random(f"{SEED}/{length}/{index}")
    return [draw.randrange(10, words) for _ in range(length)]


class Driver:
    """Steps an engine by hand, and notes when tokens come. Times: seconds from the call."""

    def __init__(self, llm: Any) -> None:
        from vllm import SamplingParams
        self._engine, self._parameters, self._asked = llm.llm_engine, SamplingParams, 0

    def add(self, prompt: list[int] | dict[str, Any], new: int, **of_request: Any) -> str:
        """prompt: ids, or vLLM's own form; of_request: more for add_request."""
        self._asked += 1
        name = f"r{self._asked}"
        wanted = self._parameters(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        asked = prompt if isinstance(prompt, dict) else {"prompt_token_ids": prompt}
        self._engine.add_request(name, asked, wanted, **of_request)
        return name

    def step(self) -> dict[str, tuple[int, list[int], int]]:
        """Requests that got tokens: how many they have, which, and how many of the prompt were held."""
        found = {}
        for output in self._engine.step():
            tokens = list(output.outputs[0].token_ids)
            found[output.request_id.split("-")[0]] = (len(tokens), tokens, output.num_cached_tokens or 0)
        return found

    def busy(self) -> bool:
        return self._engine.has_unfinished_requests()

    def first_token(self, prompt: list[int]) -> dict[str, Any]:
        """One prompt alone. seconds: to its first token; scheduled: until the first of it was; steps: at the end of each step
        of the engine until then; under_way: chunks that are being stored when the first token is there."""
        scheduler = self._engine.engine_core.engine_core.scheduler
        steps: list[float] = []
        got: dict[str, tuple[int, list[int], int]] = {}
        scheduled: float | None = None
        began = time.perf_counter()
        name = self.add(prompt, 2)
        while name not in got or got[name][0] == 0:
            got = self.step()
            steps.append(time.perf_counter() - began)
            if scheduled is None and scheduler.running:
                scheduled = steps[-1]
        offloading = getattr(scheduler.connector, "scheduler", None)  # vLLM's, of its own offloading and of ours
        under_way = 0 if offloading is None else sum(len(job.keys) for job in offloading._jobs.values())
        while self.busy():
            self.step()
        return {"seconds": steps[-1], "scheduled": scheduled, "steps": steps, "under_way": under_way}

    def run(self, prompts: Sequence[list[int] | dict[str, Any]], new: int, **of_request: Any) -> dict[str, Any]:
        """All at once, to their ends."""
        began = time.perf_counter()
        names = [self.add(prompt, new, **of_request) for prompt in prompts]
        first: dict[str, float] = {}
        held: dict[str, int] = {}
        last: dict[str, list[int]] = {}
        gaps, before = [], None
        while self.busy():
            got = self.step()
            now = time.perf_counter() - began
            for name, (count, tokens, cached) in got.items():
                if count:
                    first.setdefault(name, now)
                held[name], last[name] = max(held.get(name, 0), cached), tokens
            if len(got) == len(names):
                gaps += [] if before is None else [now - before]
                before = now
        return {"first": [first[name] for name in names], "held": [held[name] for name in names],
                "tokens": [last[name] for name in names], "gaps": gaps}
