# SPDX-License-Identifier: Apache-2.0
"""256 requests of 2K to 32K tokens arriving: throughput of a plan over plain's, and first tokens.

A request arrives every so many seconds of the engine's own clock, faster than they are served, so that batches are as
large as fits; lengths are drawn so that each octave has as many. Each answers 256 tokens. Engines one after the other:
those of --engines.
"""

from __future__ import annotations

import re
import statistics

from launch import Launcher

_PATIENCE = 400.0


def run(launcher: Launcher) -> None:
    tiny = launcher.given.tiny
    shape = ({"requests": 12, "shortest": 100, "longest": 800, "new": 8, "every": 0.05} if tiny else
             {"requests": 256, "shortest": 2048, "longest": 32768, "new": 256, "every": 0.25})
    kinds, first = re.split(r",(?![^{]*\})", launcher.given.engines), None
    if "ours" in kinds:
        launcher.daemon()
    for kind in kinds:
        engine = launcher.start(launcher.spec(kind, kind, llm={"max_num_seqs": 64}))
        engine.hear(launcher.left)
        found = engine.ask(min(_PATIENCE, launcher.left), "arrivals", **shape)
        launcher.failed = engine.end(30) != 0 or launcher.failed
        rate = found["answered"] / found["total_s"]
        first = first or rate
        launcher.row(kind, "arrivals", shape=shape, **found)
        launcher.say(f"{kind}: {rate:.1f} tokens answered a second ({rate / first:.3f} of the first), all in "
                     f"{found['total_s']:.1f} s; first token {statistics.median(found['seconds']):.2f} s")
