# SPDX-License-Identifier: Apache-2.0
"""Engines killed by SIGKILL at N random moments of stores and loads, the daemon killed, and resets amid stores.

Two engines of a small model work at a time behind one daemon, whose memory is little more than what they store, while
the next two start: each loads what others have stored, computes, and loads all of it, until it is killed up to 6 ms
behind the begin of a copy. Every page of every load must be what the last store of that chunk took of its engine's
blocks (recorder.py), and answers must be as before, which on a GPU takes VLLM_BATCH_INVARIANT. Behind all of them the
daemon must have nothing but chunks that are shown. Then the daemon is killed under an engine that goes on, and two
engines begin epochs while they store. The seed is printed.
"""

from __future__ import annotations

import json
import pathlib
import random
import signal
import time
from typing import Any

from launch import Daemon, Engine, Launcher

_PATIENCE = 240.0
_AT_ONCE = 2


def run(launcher: Launcher) -> None:
    Kills(launcher, launcher.given.seed or random.SystemRandom().randrange(2**32)).run()


class Kills:
    def __init__(self, launcher: Launcher, seed: int) -> None:
        self._launcher, self._draw = launcher, random.Random(seed)
        self._records = launcher.folder / "records"
        self._records.mkdir()
        tiny = launcher.given.tiny
        self._shape = {"count": 3, "tokens": 600 if tiny else 4200}
        # Twice what an engine works with, 32 KiB a token; of the tiny model 1 KiB.
        self._memory = "8MiB" if tiny else "2GiB"
        self._started = 0
        launcher.say(f"seed {seed}")

    def run(self) -> None:
        daemon = self._launcher.daemon(self._memory)
        reached, left = 0, self._launcher.given.kills
        ready = self._pair(left)
        while ready:
            left -= len(ready)
            working, ready = ready, self._pair(left)
            reached += sum(self._killed(working))
        self._launcher.say(f"{reached} of {self._launcher.given.kills} engines were killed amid their copies")
        self._last(daemon)
        self._resets(daemon)
        self._books(daemon, "at the end")
        for _ in range(self._launcher.given.daemon_kills or max(1, self._launcher.given.kills // 5)):
            self._daemon_killed(daemon)
            daemon = self._launcher.daemon(self._memory)
        self._loads()

    def _start(self) -> Engine:
        self._started += 1
        return self._launcher.start(self._launcher.spec(
            "ours", f"engine {self._started}", shape="small", settle=3.0,
            llm={**self._launcher.memory(2), "worker_extension_cls": "recorder.Recorder", "max_model_len": 8192},
            environment=self._launcher.invariant | {"KVSTRATA_RECORDS": str(self._records)}) | {"warm": 40})

    def _pair(self, left: int) -> list[Engine]:
        if left > 0 and self._launcher.left < 150:
            self._launcher.say(f"no time is left for {left} engines")
            return []
        return [self._start() for _ in range(min(left, _AT_ONCE))]

    def _killed(self, engines: list[Engine]) -> list[bool]:
        """Whether they were, by themselves."""
        for engine in engines:
            engine.hear(_PATIENCE)
            copy, delay = self._draw.randrange(3 * self._shape["count"]), self._draw.uniform(0, 0.006)
            engine.ask(_PATIENCE, "kill_at", pid=None, copy=copy, delay=delay)
            number = int(engine.name.split()[1])
            self._launcher.say(f"{engine.name} is killed {1e3 * delay:.2f} ms behind copy {copy}")
            engine.say("work", mine=100 * number, others=100 * max(1, number - _AT_ONCE), **self._shape)
        return [self._ends(engine) for engine in engines]

    def _ends(self, engine: Engine) -> bool:
        try:
            engine.hear(_PATIENCE)
        except RuntimeError:
            died = engine.process.returncode == -signal.SIGKILL
            self._must(died, f"{engine.name} ended with {engine.process.returncode}")
            return died
        engine.kill()  # it had fewer copies
        return False

    def _last(self, daemon: Daemon) -> None:
        """Nobody kills this one."""
        engine = self._start()
        engine.hear(_PATIENCE)
        last = 100 * (self._started - 1)
        found = engine.ask(_PATIENCE, "work", mine=100 * self._started, others=last, **self._shape)
        self._must(engine.end(60) == 0, "the last engine did not end by itself")
        self._must(all(found["as_before"]) and min(found["held"]) > 0, f"behind all kills: {found}")
        self._launcher.say(f"the last engine: {found}")
        self._books(daemon, "behind the last engine")

    def _resets(self, daemon: Daemon) -> None:
        engines = [self._start() for _ in range(2)]
        for engine in engines:
            engine.hear(_PATIENCE)
        for number, engine in enumerate(engines):
            engine.say("resets", mine=7000 + 100 * number, times=10, **self._shape)
        for engine in engines:
            found = engine.hear(_PATIENCE)
            self._must(found["stale"] == 0 and found["held"] > 0, f"resets: {found}")
            self._launcher.say(f"resets amid stores, {engine.name}: {found['answers'].count(True)} of "
                               f"{len(found['answers'])} at once, {found['stale']} tokens of before were found, "
                               f"{found['held']} behind them")
            self._must(engine.end(60) == 0, f"{engine.name} did not end by itself")

    def _daemon_killed(self, daemon: Daemon) -> None:
        engine = self._start()
        engine.hear(_PATIENCE)
        copy, delay = self._draw.randrange(3 * self._shape["count"]), self._draw.uniform(0, 0.006)
        engine.ask(_PATIENCE, "kill_at", pid=daemon.pid, copy=copy, delay=delay)
        found = engine.ask(_PATIENCE, "work", mine=100 * self._started, others=100, **self._shape)
        again = engine.ask(_PATIENCE, "work", mine=100 * self._started, others=100, **self._shape)
        self._must(all(found["as_before"] + again["as_before"]), f"the daemon killed: {found}, {again}")
        self._must(engine.end(60) == 0, f"{engine.name} did not end by itself")
        self._launcher.say(f"the daemon is killed {1e3 * delay:.2f} ms behind copy {copy}: {engine.name} goes on, "
                           f"{sum(found['as_before'] + again['as_before'])} of {2 * len(found['held'])} answers as before")
        daemon.stop(signal.SIGKILL)  # if there were fewer copies

    def _books(self, daemon: Daemon, when: str) -> None:
        """No engine is there: the daemon has chunks that are shown, and nothing else."""
        end = time.monotonic() + 20
        while True:
            room = daemon.says("tier", "ls")["rooms"][0]
            leaks = {name: room[name] for name in ("leased_bytes", "credited_bytes", "engines", "connections", "resting")}
            leaks["beside shown"] = room["used_bytes"] - room["shown_bytes"]
            if not any(leaks.values()) or time.monotonic() > end:
                break
            time.sleep(0.1)
        self._must(not any(leaks.values()), f"{when} the daemon still has {leaks}")
        self._must(room["changed"] == 0, f"{room['changed']} chunks were written to when they were shown")
        self._launcher.row("ours", "kills", kind=when, room=room)
        self._launcher.say(f"{when}: {room['shown']} chunks are shown, nothing else is held")

    def _loads(self) -> None:
        """Judges the loads of all engines."""
        lines = [json.loads(line) for path in self._records.glob("loads-*.jsonl")
                 for line in path.read_text().rpartition("\n")[0].splitlines()]
        total: dict[str, Any] = {name: sum(line[name] for line in lines) for name in ("loads", "pages", "wrong", "unknown")}
        self._must(total["wrong"] == total["unknown"] == 0 < total["loads"], f"loads: {total}")
        self._launcher.row("ours", "kills", kind="loads", **total)
        self._launcher.say(f"of all engines: {total}")

    def _must(self, true: bool, text: str) -> None:
        if not true:
            self._launcher.failed = True
            self._launcher.say(f"WRONG: {text}")
