# SPDX-License-Identifier: Apache-2.0
"""Nothing held: what kvstrata costs, of two engines that are asked in turns.

Plain and ours live side by side on one GPU, and only one of them works at a time: plain, ours, plain, ours. Nine of
each (three with --quick): time to first token of a prompt that nobody has computed, and the median step of a batch.
A cache of 16.5 GiB each: 128K tokens of a sequence, or four times 32K. Rows have besides what shows where time goes: when
the engine's steps ended until a first token, when the first tokens were scheduled, how many chunks were being stored at its
end; and the mean step, which has those that were waited for.
"""

from __future__ import annotations

import statistics
from typing import Any

from launch import Engine, Launcher

_PATIENCE = 240.0
K32, K128 = 32768 - 256, 131072 - 256
CASES = {False: ([K32, K128], [(K32, 1), (K32, 4), (K128, 1)], 65), True: ([300, 600], [(600, 1), (600, 2)], 9)}


def run(launcher: Launcher) -> None:
    prompts, batches, new = CASES[launcher.given.tiny]
    times = 3 if launcher.given.quick else 9
    launcher.daemon()
    engines = [launcher.start(launcher.spec(kind, kind, llm=launcher.memory(16.5))) for kind in ("plain", "ours")]
    for engine in engines:
        engine.hear(launcher.left)
        launcher.say(f"{engine.name} serves")
    for tokens in prompts:
        _in_turns(launcher, engines, "tax", times, [{"do": "first", "tokens": tokens, "index": 4000 + i}
                                                    for i in range(times)], {"tokens": tokens})
        for length, batch in batches:
            if length == tokens:
                asked = [{"do": "steps", "tokens": length, "batch": batch, "new": new}] * times
                _in_turns(launcher, engines, "steps", times, asked, {"tokens": length, "batch": batch})
    for engine in engines:
        launcher.failed = engine.end(30) != 0 or launcher.failed


def _in_turns(launcher: Launcher, engines: list[Engine], part: str, times: int, asked: list[dict[str, Any]],
              fields: dict[str, Any]) -> None:
    """A row of each; of steps the median of each time, of first tokens what Driver.first_token says of each."""
    seconds: dict[str, list[float]] = {engine.name: [] for engine in engines}
    details: dict[str, dict[str, list[Any]]] = {engine.name: {} for engine in engines}
    for i in range(times):
        if launcher.left < 20:
            launcher.say(f"{part} {fields}: {i} of {times}, no time is left")
            break
        for engine in engines:
            answer = engine.ask(_PATIENCE, **asked[i])
            if isinstance(answer, list):
                answer = {"seconds": statistics.median(answer), "mean": statistics.fmean(answer)}
            seconds[engine.name].append(answer.pop("seconds"))
            for field, value in answer.items():
                details[engine.name].setdefault(field, []).append(value)
    for name, of in seconds.items():
        launcher.row(name, part, seconds=of, **fields, **details[name])
    launcher.say(f"{part} {fields}")
