# SPDX-License-Identifier: Apache-2.0
"""Two engines at once, behind one daemon, and two with vLLM's own offloading and half the memory each.

Each engine has conversations (conversations.py) with as many documents as fill the memory of both together once; half
of the documents are also the other's. So both together want 1.5 times the memory, or twice as much where each keeps
its own. Turns come in an order drawn at random, the same for each kind. Both engines are on one GPU, with a cache of
8 GiB each. Hit rate: tokens that were not computed, over tokens of prompts.
"""

from __future__ import annotations

import statistics

from conversations import Shape
from launch import Launcher

_PATIENCE = 400.0


def run(launcher: Launcher) -> None:
    tiny = launcher.given.tiny
    # A conversation of the large model has 8.6K tokens at its end, 1.1 GiB; of the tiny one 740, 0.75 MiB.
    shape = {"conversations": 6, "turns": 4, "system": 128, "document": 500, "question": 16, "answer": 8,
             "at_once": 2} if tiny else {"conversations": 24, "turns": 4, "at_once": 4}
    memory = 4.5 / 1024 if tiny else 26.0
    # vLLM's own offloading has no worker on a CPU.
    for kind in ("plain" if launcher.given.cpu else "native:16", "ours"):
        if kind == "ours":
            launcher.daemon(f"{int(memory * 1024)}MiB")
        engines = [launcher.start(launcher.spec(
            kind, f"{kind} {number}", gib=memory / 2, llm=launcher.memory(8, Shape(**shape).longest),
            extra={"offload_prompt_only": False}, trace={**shape, "engine": number, "common": 0.5})) for number in (1, 2)]
        for engine in engines:
            engine.hear(launcher.left)
        launcher.say(f"both of {kind} serve")
        for engine in engines:
            engine.say("trace")
        found = [engine.hear(min(_PATIENCE, launcher.left)) for engine in engines]
        for engine in engines:
            launcher.failed = engine.end(30) != 0 or launcher.failed
        seconds = [one for of in found for one in of["seconds"]]
        hits, rate = sum(of["held"] for of in found) / sum(of["tokens"] for of in found), sum(
            of["tokens"] / of["total_s"] for of in found)
        launcher.row(kind, "shared", seconds=seconds, hit_rate=hits, tokens_a_second=rate, gib=memory,
                     later_hit_rate=sum(of["later_held"] for of in found) / sum(of["later_tokens"] for of in found))
        launcher.say(f"{kind}: hit rate {hits:.3f}, first token {1e3 * statistics.median(seconds):.1f} ms, "
                     f"{rate:.0f} tokens of prompts a second")
