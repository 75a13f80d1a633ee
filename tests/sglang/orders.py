# SPDX-License-Identifier: Apache-2.0
"""What the tests do inside SGLang's scheduler, which is a process of its own.

engine.py leaves orders in a file: {"kill_at": n, "daemon": pid}: the daemon is killed before the n-th attention call
from then on; {"stop_at": n, "daemon": pid}: it is stopped, and answers nothing until somebody has it go on; {"record":
prompt tokens}: what a plan chooses for the next request is compared with direct calls, and the outcome is written to the
file's name and ".compared".
"""

from __future__ import annotations

import json
import os
import pathlib
import select
import signal
from typing import Any

import kvstrata

PATIENCE = 10  # seconds


class Orders:
    def __init__(self, file: pathlib.Path) -> None:
        from kvstrata_sglang.sequences import Sequences
        self._file, self._left, self._daemon, self._stops = file, -1, 0, False
        self._recorder: Recorder | None = None
        attend, begin, close, orders = Sequences.attend, Sequences.begin, Sequences.close, self

        def counted(sequences: Any, *args: Any) -> None:
            orders.end_if_due()
            attend(sequences, *args)

        def ordered(sequences: Any, *args: Any) -> None:
            orders.read()
            begin(sequences, *args)

        def compared(sequences: Any, *args: Any) -> None:
            close(sequences, *args)
            orders.compare()

        Sequences.attend, Sequences.begin, Sequences.close = counted, ordered, compared

    def read(self) -> None:
        if self._file.exists():
            orders = json.loads(self._file.read_text())
            self._file.unlink()
            self._stops, self._daemon = "stop_at" in orders, orders.get("daemon", 0)
            self._left = orders.get("stop_at", orders.get("kill_at", -1))
            if "record" in orders:
                self._recorder = Recorder(orders["record"])

    def end_if_due(self) -> None:
        if self._left == 0 and self._stops:
            os.kill(self._daemon, signal.SIGSTOP)
        elif self._left == 0:
            ended = os.pidfd_open(self._daemon)
            os.kill(self._daemon, signal.SIGKILL)
            assert select.select([ended], [], [], PATIENCE)[0], "kvstratad does not end"
            os.close(ended)
        self._left -= 1

    def compare(self) -> None:
        if self._recorder is not None:
            differing, chosen = self._recorder.compare()
            self._recorder = None
            pathlib.Path(f"{self._file}.compared").write_text(json.dumps({"differing": differing, "chosen": chosen}))


class Recorder:
    """What went through the binding, and what the plan chose; one request at a time. prompt: its tokens."""

    def __init__(self, prompt: int) -> None:
        self._prompt = prompt
        self.steps: list[tuple[list[int], dict[int, list[Any]]]] = []  # ids; layer: k, v, q, chosen
        self.begin, self.append, self.attend = kvstrata.Session.step, kvstrata.Step.append, kvstrata.Step.attend
        recorder = self

        def begin(session: kvstrata.Session, members: Any) -> kvstrata.Step:
            members = list(members)
            recorder.steps.append((list(members[0][1]), {}))
            recorder.last = session, members[0][0].model, members[0][0].plan
            return recorder.begin(session, members)

        def append(step: kvstrata.Step, layer: int, k: Any, v: Any) -> None:
            recorder.steps[-1][1][layer] = [k.clone(), v.clone()]
            recorder.append(step, layer, k, v)

        def attend(step: kvstrata.Step, layer: int, q: Any, *args: Any) -> Any:
            kept = q.clone()
            out = recorder.attend(step, layer, q, *args)
            recorder.steps[-1][1][layer] += [kept, step.selected_tokens()]
            return out

        kvstrata.Session.step, kvstrata.Step.append, kvstrata.Step.attend = begin, append, attend

    def compare(self) -> tuple[int, int]:
        """(lists that differ, all lists) when the same keys and queries are passed to the binding alone."""
        kvstrata.Session.step, kvstrata.Step.append, kvstrata.Step.attend = self.begin, self.append, self.attend
        session, model, plan = self.last
        differing = every = done = 0
        with session.open(model, plan) as sequence:
            for ids, layers in self.steps:
                with session.step([(sequence, ids)]) as step:
                    for layer, (k, v, q, chosen) in layers.items():
                        step.append(layer, k, v)
                        step.attend(layer, q)
                        for a, b in zip(step.selected_tokens(), chosen, strict=True):
                            every += 1
                            differing += a.tolist() != b.tolist()
                if done < self._prompt <= done + len(ids):
                    sequence.prefill_done()
                done += len(ids)
        return differing, every
