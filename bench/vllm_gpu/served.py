# SPDX-License-Identifier: Apache-2.0
"""What an engine does when it is asked, beside the parts: the answer is what the method returns."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import Any

from driver import SEED, prompt_of
from parts import Measured


class Served(Measured):
    def first(self, tokens: int, index: int) -> dict[str, Any]:
        """Driver.first_token; behind it what is stored of the prompt is stored."""
        found = self._driver.first_token(prompt_of(tokens, index, self._words))
        self.settle()
        return found

    def steps(self, tokens: int, batch: int, new: int) -> list[float]:
        """Seconds between the tokens of a batch, whose prompts are computed or loaded before."""
        prompts = [prompt_of(tokens, 2000 + i, self._words) for i in range(batch)]
        self._driver.run(prompts, 1)
        gaps = self._driver.run(prompts, new)["gaps"]
        self.settle()
        return list(gaps)

    def stopped(self, pid: int | None, pause: float, requests: int, tokens: int, new: int, every: int) -> dict[str, Any]:
        """Requests of which one arrives each time that the first has so many tokens more. Behind half of them the process
        `pid`, if any, is stopped, for `pause` seconds. steps: how long each took."""
        waiting = [prompt_of(tokens, 3000 + i, self._words) for i in range(requests)]
        names, held, said = [], {}, {}
        steps: list[float] = []
        stopped_at = None
        while waiting or self._driver.busy():
            if waiting and len(said.get(names[0], ()) if names else ()) >= every * len(names):
                names.append(self._driver.add(waiting.pop(0), new))
                if pid is not None and len(waiting) == requests // 2:
                    os.kill(pid, signal.SIGSTOP)
                    stopped_at = time.perf_counter()
            if pid is not None and stopped_at is not None and time.perf_counter() - stopped_at > pause:
                os.kill(pid, signal.SIGCONT)
                stopped_at = None
            before = time.perf_counter()
            for name, (_, said[name], cached) in self._driver.step().items():
                held[name] = max(held.get(name, 0), cached)
            steps.append(time.perf_counter() - before)
        if pid is not None and stopped_at is not None:
            os.kill(pid, signal.SIGCONT)
        return {"steps": steps, "tokens": [said[name] for name in names], "held": [held[name] for name in names],
                "to_the_end": stopped_at is not None}

    def work(self, mine: int, others: int, count: int, tokens: int) -> dict[str, Any]:
        """Loads `count` prompts of number `others` on, as far as they are held, computes as many of number `mine` on, and,
        when vLLM's own cache is reset, loads all of them. held: of the prompts, then; as_before: whether they are
        answered as before."""
        prompts = [prompt_of(tokens, index, self._words) for first in (others, mine) for index in range(first, first + count)]
        before = [self._driver.run([prompt], 4)["tokens"][0] for prompt in prompts]
        self.forget()
        runs = [self._driver.run([prompt], 4) for prompt in prompts]
        self.settle()
        return {"held": [run["held"][0] for run in runs],
                "as_before": [run["tokens"][0] == tokens for run, tokens in zip(runs, before)]}

    def resets(self, mine: int, count: int, tokens: int, times: int) -> dict[str, Any]:
        """Prompts whose stores are under way when an epoch begins; then computed anew, and loaded. held: of prompts that
        may not be found, and of those that must."""
        prompts = [prompt_of(tokens, index, self._words) for index in range(mine, mine + count)]
        answers, stale, held = [], 0, 0
        for _ in range(times):
            self._driver.run(prompts, 2)
            answers.append(self._llm.reset_prefix_cache(reset_connector=True))
            if not answers[-1]:  # blocks were in use
                self.settle()
                self._llm.reset_prefix_cache(reset_connector=True)
            stale += sum(self._driver.run(prompts, 2)["held"])
            self.forget()
            held += sum(self._driver.run(prompts, 2)["held"])
        self.settle()
        return {"answers": answers, "stale": stale, "held": held, "of": times * count}

    def arrivals(self, requests: int, shortest: int, longest: int, new: int, every: float) -> dict[str, Any]:
        """One request every so many seconds, of lengths whose logarithms are drawn evenly. seconds: from its arrival to
        each one's first token."""
        draw = random.Random(SEED)
        waiting = [prompt_of(int(shortest * (longest / shortest) ** draw.random()), 8000 + i, self._words)
                   for i in range(requests)]
        tokens = sum(map(len, waiting))
        since: dict[str, float] = {}
        firsts: dict[str, float] = {}
        answered = 0
        began = time.perf_counter()
        while waiting or self._driver.busy():
            now = time.perf_counter()
            while waiting and now - began >= every * len(since):
                since[self._driver.add(waiting.pop(0), new)] = now
            for name, (count, _, _) in self._driver.step().items():
                if count:
                    firsts.setdefault(name, time.perf_counter() - since[name])
                answered += new if count == new else 0
        return {"prompts": tokens, "answered": answered, "total_s": time.perf_counter() - began,
                "seconds": [firsts[name] for name in since]}

    def reused(self, seconds: float, seed: int) -> dict[str, Any]:
        """Requests on a cache that is too small for them, for so long; between steps indexes are checked (reused.py)."""
        from index_check import IndexCheck
        draw, check = random.Random(seed), IndexCheck(self._llm)
        beginnings = [prompt_of(length, 7000 + i, self._words) for i, length in enumerate((500, 1200, 2400, 3600))]
        begun: dict[str, int] = {}  # tokens held of each request
        checks = 0
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            while len(self._llm.llm_engine.engine_core.engine_core.scheduler.requests) < 40:
                length = draw.randrange(16, 2500)
                tail = [draw.randrange(10, self._words) for _ in range(length)]
                begun[self._driver.add((draw.choice(beginnings) if draw.random() < 0.5 else []) + tail,
                                       draw.randrange(2, 400))] = 0
            for name, (_, _, held) in self._driver.step().items():
                begun[name] = max(begun[name], held)
            check.check()
            checks += 1
        return {"requests": len(begun), "held": sum(begun.values()), "checks": checks, "checked": check.checked,
                "stale": check.stale, "preempted": self._preempted()}

    def _preempted(self) -> int:
        core = self._llm.llm_engine.engine_core.engine_core
        return sum(request.num_preemptions for request in core.scheduler.requests.values())

    def kill_at(self, pid: int | None, copy: int, delay: float) -> None:
        """SIGKILL to a process, None: this one, so many seconds behind the begin of the copy-th copy from now on."""
        from kvstrata_vllm.transfers import Transfers
        submit, left = Transfers._submit, [copy]

        def counted(*arguments: Any) -> bool:
            begun = submit(*arguments)
            left[0] -= 1
            if left[0] == -1:
                threading.Timer(delay, os.kill, (pid or os.getpid(), signal.SIGKILL)).start()
            return begun

        Transfers._submit = counted
