# SPDX-License-Identifier: Apache-2.0
"""Blocks used again and again under load: each index against one made anew (index_check.py).

Requests of random lengths, a part of whose prompts begin as another's does, on a cache that has room for a few: blocks
are freed, found again, preempted and loaded from the daemon. Between steps all full blocks of running requests are
looked at. A small model, an engine a plan, side by side; so many seconds, the seed is printed.
"""

from __future__ import annotations

import random

from launch import Launcher, transfer

PLANS = ("quest", "bits{run = 8}")
_PATIENCE = 240.0


def run(launcher: Launcher) -> None:
    seed = launcher.given.seed or random.randrange(2**31)
    launcher.say(f"seed {seed}")
    launcher.daemon("4GiB")
    seconds = float(launcher.given.reused)
    connector = transfer("KvstrataConnector", {"socket": launcher.socket})
    engines = [launcher.start(launcher.spec(
        f"plan:{plan}", f"plan:{plan}", shape="small", warm=3000,
        llm={**launcher.memory(1, 4096), "max_num_seqs": 64, "max_num_batched_tokens": 2048,
             "kv_transfer_config": connector})) for plan in PLANS]
    for engine in engines:
        engine.hear(launcher.left)
    for engine in engines:
        engine.say("reused", seconds=seconds, seed=seed)
    for engine in engines:
        found = engine.hear(seconds + _PATIENCE)
        launcher.row(engine.name, "reused", seed=seed, **found)
        launcher.say(f"{engine.name}: {found['stale']} stale of {found['checked']} indexes in {found['checks']} checks; "
                     f"{found['requests']} requests, {found['held']} tokens held, {found['preempted']} preempted")
        launcher.failed = launcher.failed or found["stale"] > 0 or found["checked"] == 0
    for engine in engines:
        launcher.failed = engine.end(30) != 0 or launcher.failed
