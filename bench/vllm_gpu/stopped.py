# SPDX-License-Identifier: Apache-2.0
"""The daemon stopped (SIGSTOP) for 20 s amid 32 requests: the longest step against plain's with the same arrivals.

A request arrives each time that the first one has so many tokens more; the daemon is stopped behind half of them. Twice:
with nothing held, and again when vLLM's own cache is reset, where ours has all of it to load. A look-up may have a
request begin a step later than plain's, in another batch. On a GPU vLLM is told that this must not change what it
computes (VLLM_BATCH_INVARIANT), and each request must have plain's tokens; elsewhere it changes a tie now and then, and it
is said for how many tokens the median request has plain's.
"""

from __future__ import annotations

import statistics

from launch import Launcher

_PATIENCE = 240.0


def run(launcher: Launcher) -> None:
    tiny = launcher.given.tiny
    shape = ({"pause": 2.0, "requests": 8, "tokens": 400, "new": 100, "every": 10} if tiny else
             {"pause": 20.0, "requests": 32, "tokens": 4000, "new": 1600, "every": 40})
    daemon = launcher.daemon()
    said: dict[tuple[str, str], list[list[int]]] = {}
    for kind in ("plain", "ours"):
        engine = launcher.start(launcher.spec(kind, kind, llm={**launcher.memory(30), "max_num_seqs": 32},
                                              environment=launcher.invariant))
        engine.hear(launcher.left)
        for held in ("computed", "held"):
            found = engine.ask(_PATIENCE, "stopped", pid=daemon.pid if kind == "ours" else None, **shape)
            engine.ask(_PATIENCE, "forget")
            said[kind, held] = found["tokens"]
            steps = sorted(found["steps"])
            launcher.row(kind, "stopped", kind=held, longest=steps[-1], second=steps[-2], count=len(steps),
                         held=found["held"], ended=sum(len(tokens) == shape["new"] for tokens in found["tokens"]),
                         to_the_end=found["to_the_end"])
            launcher.say(f"{kind}, {held}: {len(steps)} steps, the longest {1e3 * steps[-1]:.1f} and "
                         f"{1e3 * steps[-2]:.1f} ms; held {sum(found['held'])} tokens, "
                         f"{sum(len(tokens) == shape['new'] for tokens in found['tokens'])} of {shape['requests']} ended"
                         + ("; the daemon was stopped until the end" if found["to_the_end"] else ""))
        launcher.failed = engine.end(30) != 0 or launcher.failed
    for held in ("computed", "held"):
        same = [_same(*both) for both in zip(said["ours", held], said["plain", held], strict=True)]
        launcher.failed = launcher.failed or (not launcher.given.cpu and min(same) < shape["new"])
        launcher.row("ours", "stopped tokens", kind=held, same=same, of=shape["new"])
        launcher.say(f"{held}: {sum(count == shape['new'] for count in same)} of {shape['requests']} requests have plain's "
                     f"tokens, the median one {statistics.median(same):g} of {shape['new']}")


def _same(ours: list[int], plain: list[int]) -> int:
    """Tokens from the first on."""
    return next((i for i, both in enumerate(zip(ours, plain)) if both[0] != both[1]), min(len(ours), len(plain)))
