#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Two data parallel ranks, as `vllm serve --data-parallel-size 2` has them: each loads what the other stored.

    replicas.py SPECS.json          as family.py has them, with data_parallel_size 2 among the arguments

Both ranks compute a prompt at once, then both load the other's, then each has its own prefix hit on that. A line of
stdout each, with family.py's fields: `held` and tokens by round and rank, and what recorder.py counted of both.
"""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import sys
import time
from typing import Any

from family import NEW, prompt

_PATIENCE = 30.0
_TRIES = 3


class Replicas:
    """llm: vLLM's AsyncLLM of two ranks."""

    def __init__(self, llm: Any) -> None:
        from vllm import SamplingParams
        self._llm, self._asked = llm, 0
        self._wanted = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, detokenize=False)

    async def _ask(self, rank: int, ids: list[int]) -> tuple[int, list[int]]:
        """How much of the prompt was held, and what it answers."""
        self._asked += 1
        said: Any = None
        async for output in self._llm.generate({"prompt_token_ids": ids}, self._wanted, f"r{self._asked}",
                                               data_parallel_rank=rank):
            said = output
        return said.num_cached_tokens, list(said.outputs[0].token_ids)

    async def round(self, *prompts: list[int]) -> list[tuple[int, list[int]]]:
        """A prompt for each rank, all at once."""
        return await asyncio.gather(*(self._ask(rank, ids) for rank, ids in enumerate(prompts)))

    async def settle(self) -> None:
        """vLLM empties its prefix caches only when all that is under way is stored, on each rank."""
        end = time.monotonic() + _PATIENCE
        while not await self._llm.reset_prefix_cache():
            if time.monotonic() > end:
                raise TimeoutError(f"stores are not over after {_PATIENCE:g} s")
            await asyncio.sleep(0.002)


async def answers(arguments: dict[str, Any]) -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    folder = pathlib.Path(os.environ["KVSTRATA_RECORDS"])
    before = {*folder.iterdir()}
    began = time.perf_counter()
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    try:
        started, replicas, tries = time.perf_counter() - began, Replicas(llm), 0
        while tries == 0 or (tries < _TRIES and not all(held for held, _ in loaded)):
            # Each try has new prompts: what is loaded must be the other rank's, not what this one computed itself.
            ids = [prompt(2 * tries), prompt(2 * tries + 1)]
            tries += 1
            computed = await replicas.round(*ids)
            await replicas.settle()
            loaded = await replicas.round(*ids[::-1])
        hit = await replicas.round(*ids[::-1])
    finally:
        llm.shutdown()
    lines = [json.loads(line) for path in {*folder.glob("loads-*.jsonl")} - before
             for line in path.read_text().rpartition("\n")[0].splitlines()]
    return {"start_s": started, "held": [[held for held, _ in of] for of in (computed, loaded, hit)],
            "equal_to_hit": [a == b for (_, a), (_, b) in zip(hit, loaded)],
            "equal_to_computed": [a == b for (_, a), (_, b) in zip(computed[::-1], loaded)],
            "tries": tries, "said": [tokens[0] for _, tokens in loaded],
            **{name: sum(line[name] for line in lines) for name in ("loads", "pages", "wrong", "unknown")}}


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints
    for name, arguments, _ in json.loads(pathlib.Path(sys.argv[1]).read_text()):
        try:
            found = asyncio.run(answers(arguments))
        except Exception as error:
            print(json.dumps({"family": name, "error": f"{type(error).__name__}: {error}"[:400]}), file=out, flush=True)
            raise
        print(json.dumps({"family": name, **found}), file=out, flush=True)


if __name__ == "__main__":
    main()
