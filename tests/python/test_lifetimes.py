# SPDX-License-Identifier: Apache-2.0
"""Who closes what: `with`, exceptions, a daemon that dies, and what is dropped without being closed."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from toy import Toy

import kvstrata
from kvstrata.daemon import Daemon
from kvstrata.grpc import Client


@pytest.fixture
def toy(random: np.random.Generator) -> Toy:
    return Toy(random, 40)


@pytest.fixture(params=["linked", "remote"])
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


def eventually(holds: Callable[[], bool]) -> bool:
    """The daemon hears of an end when it gets to it."""
    deadline = time.monotonic() + 20
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def handles(client: Client) -> set[int]:
    return {s.sequence for s in client.sequences()}


def test_with_shows_the_first_error_of_a_daemon_that_dies(transport: str, toy: Toy):
    with Daemon() as own, kvstrata.attach(own.socket, transport=transport, timeout_ms=2000) as session:
        model = toy.register(session)
        with pytest.raises(ZeroDivisionError), session.open(model) as sequence:
            toy.feed(session, sequence, 0, 4)
            own.process.kill()
            own.process.wait()
            raise ZeroDivisionError
        with pytest.raises(kvstrata.Unavailable) as error:
            session.ping()
        assert error.value.reason == "DAEMON_GONE"
        sequence.close()


def test_close_of_a_sequence_whose_daemon_is_gone_is_no_error(transport: str, toy: Toy):
    with Daemon() as own, kvstrata.attach(own.socket, transport=transport, timeout_ms=2000) as session:
        sequence = session.open(toy.register(session))
        own.process.kill()
        own.process.wait()
        sequence.close()
        with pytest.raises(kvstrata.FailedPrecondition, match="SEQUENCE_CLOSED"):
            sequence.settle()


def test_close_in_an_open_step_says_so_and_may_be_tried_again(session: kvstrata.Session, toy: Toy):
    sequence = session.open(toy.register(session))
    step = session.step([(sequence, toy.ids[:1])])
    with pytest.raises(kvstrata.FailedPrecondition) as error:
        sequence.close()
    assert error.value.reason == "SEQUENCE_BUSY"
    step.abort()
    assert sequence.tokens == 0
    sequence.close()


def test_an_error_in_a_step_is_not_hidden_by_a_busy_sequence(session: kvstrata.Session, toy: Toy):
    with pytest.raises(ZeroDivisionError), session.open(toy.register(session)) as sequence:
        step = session.step([(sequence, toy.ids[:1])])
        raise ZeroDivisionError
    step.abort()
    sequence.close()


def test_dropped_sequences_are_closed(daemon: Daemon, session: kvstrata.Session, toy: Toy):
    with Client(daemon.socket) as client:
        sequence = session.open(toy.register(session))
        fork, kept = sequence.fork(), sequence.fork()
        mine = {s.handle for s in (sequence, fork, kept)}
        assert mine <= handles(client)
        del sequence
        circle: list = [fork]
        circle.append(circle)
        del circle, fork
        gc.collect()
        assert eventually(lambda: handles(client) & mine == {kept.handle})
        kept.close()


def test_a_sequence_that_is_dropped_in_its_step_is_closed_behind_it(daemon: Daemon, session: kvstrata.Session,
                                                                    toy: Toy):
    with Client(daemon.socket) as client:
        for end in ("end", "abort", "drop"):
            sequence = session.open(toy.register(session))
            handle = sequence.handle
            step = session.step([(sequence, toy.ids[:1])])
            del sequence
            gc.collect()
            assert handle in handles(client)
            if end == "end":
                for layer in range(2):
                    step.append(layer, toy.k[layer, :1], toy.v[layer, :1])
                step.end()
            elif end == "abort":
                step.abort()
            del step
            gc.collect()
            assert eventually(lambda handle=handle: handle not in handles(client)), end


@pytest.mark.parametrize("sequence_first", [True, False])
def test_a_sequence_and_its_open_step_are_collected_together(daemon: Daemon, session: kvstrata.Session, toy: Toy,
                                                             sequence_first: bool):
    """Python may finalize either first: both are garbage of one cycle."""
    sequence = session.open(toy.register(session))
    handle = sequence.handle
    step = session.step([(sequence, toy.ids[:1])])
    first, then = (sequence._drop, step._drop) if sequence_first else (step._drop, sequence._drop)
    circle: list = [sequence, step]
    circle.append(circle)
    del sequence, step, circle
    # What the collector may do, in the order that this test is about.
    first()
    then()
    gc.collect()
    with Client(daemon.socket) as client:
        assert eventually(lambda: handle not in handles(client))


def test_garbage_cycles_through_an_open_step_leave_no_sequence(daemon: Daemon, session: kvstrata.Session, toy: Toy):
    """In both orders of allocation, by which the collector goes."""
    model = toy.register(session)
    mine = set()
    for step_knows in (True, False):
        sequence = session.open(model)
        mine.add(sequence.handle)
        step = session.step([(sequence, toy.ids[:1])])
        owner = step if step_knows else sequence
        owner.circle = [sequence, step]
        del sequence, step, owner
        gc.collect()
    with Client(daemon.socket) as client:
        assert eventually(lambda: not handles(client) & mine)


def test_dropped_sessions_detach(daemon: Daemon, transport: str, toy: Toy):
    with Client(daemon.socket) as client:
        session = kvstrata.attach(daemon.socket, transport=transport, client_name="dropped")
        sequence = session.open(toy.register(session))
        handle = sequence.handle
        assert handle in handles(client)
        del session
        sequence.settle()  # it holds its session
        del sequence
        gc.collect()
        assert eventually(lambda: handle not in handles(client)
                          and all(s.client_name != "dropped" for s in client.sessions()))


def test_what_is_dropped_after_its_session_was_closed_is_let_be(daemon: Daemon, transport: str, toy: Toy):
    """Handles of a closed session may be somebody else's by then."""
    for _ in range(20):
        session = kvstrata.attach(daemon.socket, transport=transport)
        sequence = session.open(toy.register(session))
        step = session.step([(sequence, toy.ids[:1])])
        session.close()
        with kvstrata.attach(daemon.socket, transport=transport) as other:
            mine = other.open(toy.register(other))
            theirs = other.step([(mine, toy.ids[:1])])
            del sequence, step, session
            gc.collect()
            for layer in range(2):
                theirs.append(layer, toy.k[layer, :1], toy.v[layer, :1])
            theirs.end()
            assert mine.tokens == 1


def test_drops_in_many_threads(daemon: Daemon, session: kvstrata.Session, toy: Toy):
    model = toy.register(session)
    opened: list[int] = []

    def churn() -> None:
        for _ in range(30):
            sequence = session.open(model)
            opened.append(sequence.handle)
            circle: list = [sequence]
            circle.append(circle)
            del sequence, circle
        gc.collect()

    threads = [threading.Thread(target=churn) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    with Client(daemon.socket) as client:
        assert len(set(opened)) == 120 and eventually(lambda: not handles(client) & set(opened))


def test_the_interpreter_ends_with_everything_open(daemon: Daemon, transport: str):
    program = ("import sys, kvstrata\n"
               "session = kvstrata.attach(sys.argv[1], transport=sys.argv[2])\n"
               "model = session.register_model('m', 'ends', layers=1, query_heads=1, kv_heads=1, head_dim=64)\n"
               "sequence = session.open(model)\n"
               "step = session.step([(sequence, [1])])\n"
               "print('open')\n")
    done = subprocess.run([sys.executable, "-c", program, daemon.socket, transport], capture_output=True, text=True,
                          timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "open\n", "")
