# SPDX-License-Identifier: Apache-2.0
"""A daemon that is stopped (SIGSTOP): each call ends by its session's timeout and says DEADLINE; once the daemon goes on,
so does the session, and no late answer is taken for another call's."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from toy import Toy

import kvstrata
from kvstrata.daemon import Daemon
from kvstrata.grpc import Client

N = 80


@pytest.fixture
def toy(random: np.random.Generator) -> Toy:
    return Toy(random, N + 40)


@pytest.fixture(params=["linked", "remote"])
def session(daemon: Daemon, request: pytest.FixtureRequest) -> Iterator[kvstrata.Session]:
    with kvstrata.attach(daemon.socket, transport=request.param, timeout_ms=250) as opened:
        yield opened


@contextlib.contextmanager
def stopped(daemon: Daemon) -> Iterator[None]:
    daemon.process.send_signal(signal.SIGSTOP)
    os.waitpid(daemon.process.pid, os.WUNTRACED)  # the signal alone leaves its threads some time
    try:
        yield
    finally:
        daemon.process.send_signal(signal.SIGCONT)


def filled(session: kvstrata.Session, toy: Toy, tokens: int = N, plan: str = "full") -> kvstrata.Sequence:
    sequence = session.open(toy.register(session), plan, toy.ids[:tokens], private=True)
    toy.feed(session, sequence, 0, tokens)
    return sequence


def expect_deadline(call: Callable[[], object]) -> None:
    with pytest.raises(kvstrata.KvstrataError) as ended:
        call()
    assert (ended.value.code, ended.value.reason) == (4, "DEADLINE"), ended.value


def awake(session: kvstrata.Session) -> None:
    """Waits until it answers again; a busy machine may need longer than the session's timeout."""
    end = time.monotonic() + 60
    while True:
        try:
            return session.ping()
        except kvstrata.KvstrataError as error:
            assert error.reason == "DEADLINE" and time.monotonic() < end, error


def await_sequences(daemon: Daemon, alive: set[int]) -> None:
    with Client(daemon.socket) as client:
        end = time.monotonic() + 60
        while (there := {s.sequence for s in client.sequences()}) != alive:
            assert time.monotonic() < end, (there, alive)


def test_each_call_ends_in_time_and_the_session_goes_on(daemon: Daemon, session: kvstrata.Session, toy: Toy):
    model = toy.register(session)
    kept, cut, forked, closed = (filled(session, toy) for _ in range(4))
    with stopped(daemon):
        expect_deadline(session.ping)
        expect_deadline(lambda: session.register_model("other", "d", layers=1, query_heads=1, kv_heads=1, head_dim=64))
        expect_deadline(lambda: session.lookup(model, toy.ids, "full"))
        expect_deadline(lambda: session.lookup(model, toy.ids, "full", lease_ms=100))
        expect_deadline(lambda: session.capacity(model))
        expect_deadline(lambda: session.open(model, "full", toy.ids))
        expect_deadline(lambda: cut.truncate(40))
        expect_deadline(forked.fork)
        expect_deadline(kept.settle)
        expect_deadline(closed.close)
        expect_deadline(lambda: session.close_key("a key"))
    awake(session)
    # Whether the daemon cut, or made a fork, is not known: nothing is computed on a guess.
    for unknown in (cut, forked):
        with pytest.raises(kvstrata.KvstrataError, match="close it and open another") as refused:
            toy.feed(session, unknown, 40, 41)
        assert refused.value.reason == "SEQUENCE_UNANSWERED"
        with pytest.raises(kvstrata.KvstrataError):
            unknown.truncate(10)
        unknown.close()
    assert kept.tokens == N
    out = toy.feed(session, kept, N, N + 1)
    for layer in range(toy.layers):
        np.testing.assert_allclose(out[layer][0], toy.expected(layer, N)[0], atol=2e-2)
    with filled(session, toy, 33) as another:
        assert another.tokens == 33
        with contextlib.suppress(kvstrata.KvstrataError):  # closed by the call that was not answered
            closed.close()
        await_sequences(daemon, {kept.handle, another.handle})
    kept.close()


def test_a_step_that_meets_it_ends_in_time(daemon: Daemon, session: kvstrata.Session, toy: Toy):
    """Linked, a step with room needs no daemon; remote, nobody knows whether its end was done."""
    sequence = filled(session, toy)
    with stopped(daemon):
        if session.transport == "linked":
            toy.feed(session, sequence, N, N + 1)
        else:
            expect_deadline(lambda: toy.feed(session, sequence, N, N + 1))
    awake(session)
    if session.transport == "linked":
        sequence.settle()
        assert sequence.tokens == N + 1
    else:
        with pytest.raises(kvstrata.KvstrataError) as refused:
            toy.feed(session, sequence, N, N + 1)
        assert refused.value.reason == "SEQUENCE_UNANSWERED"
    sequence.close()
    await_sequences(daemon, set())


@pytest.mark.parametrize("call", ["append", "end", "abort"])
def test_an_open_step_that_meets_it_ends_in_time(daemon: Daemon, session: kvstrata.Session, toy: Toy, call: str):
    sequence = filled(session, toy)
    linked = session.transport == "linked"
    step = session.step([(sequence, toy.ids[N:N + 1])])
    for layer in range(toy.layers - (call == "append")):
        step.append(layer, toy.k[layer, N:N + 1], toy.v[layer, N:N + 1])
    with stopped(daemon):
        if call == "append" and not linked:
            expect_deadline(lambda: step.append(1, toy.k[1, N:N + 1], toy.v[1, N:N + 1]))
        if call == "end" and not linked:
            expect_deadline(step.end)
        elif call == "end":
            step.end()
        else:
            step.abort()
    awake(session)
    if linked:
        assert sequence.tokens == N + (call == "end")
    sequence.close()
    await_sequences(daemon, set())


def test_an_attach_and_a_detach_end_in_time(daemon: Daemon, toy: Toy):
    for transport in ("linked", "remote"):
        session = kvstrata.attach(daemon.socket, transport=transport, timeout_ms=250)
        filled(session, toy)
        with stopped(daemon):
            expect_deadline(lambda: kvstrata.attach(daemon.socket, transport=transport, timeout_ms=250))  # noqa: B023
            session.close()
        await_sequences(daemon, set())
