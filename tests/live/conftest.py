# SPDX-License-Identifier: Apache-2.0
"""A real daemon with sequences that decode while a test looks at them."""

from __future__ import annotations

import os
import pathlib
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "integrations" / "kvstrata" / "src"), str(ROOT / "integrations" / "kvstrata"),
                str(ROOT / "tests" / "python"), str(ROOT / "tests" / "live")]

import generate_stubs  # noqa: E402

generate_stubs.generate_if_stale()

from toy import LAYERS, Toy  # noqa: E402

import kvstrata  # noqa: E402
from kvstrata.daemon import Daemon, find_daemon  # noqa: E402

PROMPT, MOST_STEPS, PERIOD_S = 800, 4000, 0.02
PLANS = {"quest": "quest{budget = 64, min_tokens = 0}", "window": "window{n_sink = 4, n_recent = 60, min_tokens = 0}"}


class Engine(threading.Thread):
    """Decodes a token of each sequence some 50 times a second, until it is stopped."""

    def __init__(self, socket: str, transport: str, client_name: str = "live") -> None:
        super().__init__(daemon=True)
        self.session = kvstrata.attach(socket, transport=transport, client_name=client_name)
        self.ended, self.failure = threading.Event(), None
        self.toys, self.sequences = [], {}
        for plan, text in PLANS.items():
            toy = Toy(np.random.default_rng(7), PROMPT + MOST_STEPS)
            sequence = self.session.open(toy.register(self.session), text)
            toy.feed(self.session, sequence, 0, PROMPT)
            sequence.prefill_done()
            self.toys.append((toy, sequence))
            self.sequences[plan] = sequence.handle

    def run(self) -> None:
        try:
            for t in range(PROMPT, PROMPT + MOST_STEPS):
                if self.ended.wait(PERIOD_S):  # its pace, not a wait for anything
                    return
                self.decode(t)
        except kvstrata.KvstrataError as error:  # its daemon was killed
            self.failure = error

    def decode(self, t: int) -> None:
        members = [(sequence, toy.ids[t:t + 1]) for toy, sequence in self.toys]
        with self.session.step(members) as step:
            for layer in range(LAYERS):
                rows = [np.concatenate([getattr(toy, name)[layer, t:t + 1] for toy, _ in self.toys])
                        for name in ("k", "v", "q")]
                step.append(layer, rows[0], rows[1])
                step.attend(layer, rows[2])

    def stop(self) -> None:
        self.ended.set()
        if self.ident is not None:  # it was started
            self.join(30)
        assert not self.is_alive()
        try:
            self.session.close()
        except kvstrata.KvstrataError:  # its daemon was killed
            pass


@pytest.fixture
def cli() -> str:
    return os.path.join(os.path.dirname(find_daemon()), "kvstrata")


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon("--set", "http.listen=127.0.0.1:0") as started:
        yield started


@pytest.fixture(params=["linked", "remote"])
def engine(daemon: Daemon, request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = Engine(daemon.socket, request.param)
    made.start()
    yield made
    made.stop()
