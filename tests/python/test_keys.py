# SPDX-License-Identifier: Apache-2.0
"""Keys of sequences, both transports: what one session opened another closes or truncates, in a step and out of one."""

import itertools
import subprocess
import sys
import threading

import numpy as np
import pytest
from toy import DIM, HEADS, KV_HEADS, LAYERS, Toy

import kvstrata
from kvstrata.daemon import Daemon
from kvstrata.grpc import Client

N = 64
SHAPE = {"layers": LAYERS, "query_heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "page_tokens": 16}
KEY = "request 17, \u00fc"


@pytest.fixture
def toy(random: np.random.Generator) -> Toy:
    return Toy(random, 4 * N)


@pytest.fixture(params=["linked", "remote"])
def scheduler(daemon: Daemon, request: pytest.FixtureRequest):
    with kvstrata.attach(daemon.socket, transport=request.param, client_name="scheduler") as opened:
        yield opened


def gone(call) -> None:
    with pytest.raises(kvstrata.NotFound) as error:
        call()
    assert error.value.reason in ("SEQUENCE_CLOSED", "SEQUENCE_UNKNOWN")


def test_another_session_closes(daemon: Daemon, session: kvstrata.Session, scheduler: kvstrata.Session, toy: Toy):
    sequence = session.open(toy.register(session), "full", key=KEY)
    toy.feed(session, sequence, 0, N)
    with Client(daemon.socket) as client:
        assert [s.key for s in client.sequences()] == [KEY]
        scheduler.close_key(KEY)
        assert not client.sequences()
    gone(lambda: toy.feed(session, sequence, N, N + 1))
    gone(sequence.fork)
    gone(lambda: sequence.truncate(8))
    gone(sequence.settle)
    sequence.close()
    with pytest.raises(kvstrata.NotFound, match="KEY_UNKNOWN"):
        scheduler.close_key(KEY)


def test_what_is_reused_is_not_read(session: kvstrata.Session, scheduler: kvstrata.Session, toy: Toy):
    """A step that is open reads what it began with, whoever wants its memory, and the others of its batch go on."""
    model = toy.register(session)
    victim = session.open(model, "full", toy.ids[:N], key=KEY)
    other = session.open(model, "full", toy.ids[2 * N:3 * N])
    toy.feed(session, victim, 0, N)
    k, v, q = (x[:, N:N + 1] for x in (toy.k, toy.v, toy.q))
    with session.step([(victim, toy.ids[N:N + 1]), (other, toy.ids[:1])]) as step:
        scheduler.close_key(KEY)
        taker = scheduler.open(scheduler.register_model("taker", toy.digest + "'", **SHAPE), "full")
        toy.feed(scheduler, taker, 0, 4 * N)
        for layer in range(LAYERS):
            step.append(layer, np.concatenate([k[layer], toy.k[layer, :1]]),
                        np.concatenate([v[layer], toy.v[layer, :1]]))
            out = step.attend(layer, np.concatenate([q[layer], toy.q[layer, :1]]))
            np.testing.assert_allclose(out[0], toy.expected(layer, N)[0], rtol=1e-4, atol=1e-5)
    assert other.tokens == 1
    gone(lambda: toy.feed(session, victim, N, N + 1))
    taker.close()
    other.close()
    victim.close()


def test_a_key_is_one_sequences(session: kvstrata.Session, scheduler: kvstrata.Session, toy: Toy):
    model = toy.register(session)
    sequence = session.open(model, "full", key=KEY)
    with pytest.raises(kvstrata.KvstrataError, match="is sequence") as error:
        scheduler.open(toy.register(scheduler), "full", key=KEY)
    assert error.value.reason == "KEY_IN_USE"
    fork = sequence.fork()
    sequence.close()
    with scheduler.open(toy.register(scheduler), "full", key=KEY):
        assert fork.tokens == 0
    fork.close()
    with pytest.raises(kvstrata.KvstrataError, match="KEY_TEXT"):
        session.open(model, "full", key="two\nlines")


def refuses(reason: str, call) -> None:
    with pytest.raises(kvstrata.KvstrataError) as error:
        call()
    assert error.value.reason == reason


@pytest.mark.parametrize("plan", ["full", "quest{budget = 32, n_sink = 4, n_recent = 16, min_tokens = 0}",
                                  "tokenselect{k = 32, min_tokens = 0}"])
def test_another_session_truncates(session: kvstrata.Session, scheduler: kvstrata.Session, toy: Toy, plan: str):
    """As its owner had: what follows is the same to the bit, whatever the plan had chosen before."""
    model = toy.register(session)
    named, plain = session.open(model, plan, key=KEY), session.open(model, plan)
    for sequence in (named, plain):
        toy.feed(session, sequence, 0, N)
        toy.feed(session, sequence, N, N + 1)
    scheduler.truncate_key(KEY, 40)
    plain.truncate(40)
    for first, end in ((N + 10, 2 * N), (2 * N, 2 * N + 1), (2 * N + 1, 2 * N + 2)):
        outs = toy.feed(session, named, first, end), toy.feed(session, plain, first, end)
        for own, expected in zip(*outs, strict=True):
            np.testing.assert_array_equal(own, expected)
    assert named.tokens == plain.tokens == 40 + N - 10 + 2
    named.close()
    plain.close()


def test_an_open_step_is_committed_first(session: kvstrata.Session, scheduler: kvstrata.Session, toy: Toy):
    model = toy.register(session)
    named, other = session.open(model, "full", key=KEY), session.open(model, "full")
    for sequence in (named, other):
        toy.feed(session, sequence, 0, N)
    k, v, q = (np.concatenate([x[:, N:N + 1]] * 2, axis=1) for x in (toy.k, toy.v, toy.q))
    with session.step([(named, toy.ids[N:N + 1]), (other, toy.ids[N:N + 1])]) as step:
        scheduler.truncate_key(KEY, 40)
        for layer in range(LAYERS):
            step.append(layer, k[layer], v[layer])
            out = step.attend(layer, q[layer])
            np.testing.assert_allclose(out[0], toy.expected(layer, N)[0], rtol=1e-4, atol=1e-5)
            np.testing.assert_array_equal(out[0], out[1])
    assert (named.tokens, other.tokens) == (40, N + 1)
    out = toy.feed(session, named, 40, 41)
    np.testing.assert_allclose(out[1][0], toy.expected(1, 40)[0], rtol=1e-4, atol=1e-5)
    named.close()
    other.close()


def test_the_least_that_waits_counts(session: kvstrata.Session, scheduler: kvstrata.Session, toy: Toy):
    named = session.open(toy.register(session), "full", key=KEY, reserve_tokens=2 * N)
    toy.feed(session, named, 0, N)
    refuses("TRUNCATE_TOKENS", lambda: scheduler.truncate_key(KEY, 1000))
    if session.transport == "remote":
        refuses("TRUNCATE_TOKENS", lambda: scheduler.truncate_key(KEY, N + 1))
    else:  # it may have committed more than the daemon has been told: as much as it has pages for
        scheduler.truncate_key(KEY, N + 1)
        assert named.tokens == N
    refuses("KEY_UNKNOWN", lambda: scheduler.truncate_key(KEY + "?", 8))
    for tokens in (50, 30, 45):
        scheduler.truncate_key(KEY, tokens)
    refuses("TRUNCATE_TOKENS", lambda: named.truncate(40))
    assert named.tokens == 30
    scheduler.truncate_key(KEY, 20)
    child = named.fork()
    assert child.tokens == 20
    toy.feed(session, child, 20, 25)
    scheduler.truncate_key(KEY, 10)
    named.truncate(5)
    toy.feed(session, named, 5, N)
    assert (named.tokens, child.tokens) == (N, 25)
    named.prefill_done()
    named.settle()  # the daemon has been told
    refuses("TRUNCATE_PROMPT", lambda: scheduler.truncate_key(KEY, 40))
    toy.feed(session, named, N, N + 8)
    scheduler.truncate_key(KEY, N + 2)
    named.settle()
    scheduler.truncate_key(KEY, N + 1)
    named.close()
    refuses("KEY_UNKNOWN", lambda: scheduler.truncate_key(KEY, 8))
    child.close()


def test_wishes_beside_steps(session: kvstrata.Session, scheduler: kvstrata.Session, toy: Toy,
                             random: np.random.Generator):
    """They come at any moment of a decode loop: each step finds a length, and all rows below it are its own."""
    named, ids = session.open(toy.register(session), "full", key=KEY), np.array([7], np.int32)
    over, wished = threading.Event(), []

    def wish() -> None:
        while not over.is_set():
            tokens = int(random.integers(1, 4 * N))
            try:
                scheduler.truncate_key(KEY, tokens)
            except kvstrata.InvalidArgument as error:
                assert error.reason == "TRUNCATE_TOKENS"
            else:
                wished.append(tokens)

    scheduling = threading.Thread(target=wish)
    scheduling.start()
    lengths = []
    try:
        for _ in range(300):
            with session.step([(named, ids)]) as step:
                t = named.tokens
                lengths.append(t)
                for layer in range(LAYERS):
                    step.append(layer, toy.k[layer, t:t + 1], toy.v[layer, t:t + 1])
                    out = step.attend(layer, toy.q[layer, t:t + 1])
                    np.testing.assert_allclose(out[0], toy.expected(layer, t)[0], rtol=1e-4, atol=1e-5)
    finally:
        over.set()
        scheduling.join()
    cuts = [after for before, after in itertools.pairwise(lengths) if after <= before]
    assert cuts and set(cuts) <= set(wished)
    named.close()


def test_another_process_truncates(daemon: Daemon, session: kvstrata.Session, toy: Toy):
    named = session.open(toy.register(session), "full", key="of a worker")
    toy.feed(session, named, 0, N)
    program = "import sys, kvstrata; kvstrata.attach(sys.argv[1]).truncate_key('of a worker', 17)"
    subprocess.run([sys.executable, "-c", program, daemon.socket], check=True, timeout=60)
    assert named.tokens == 17
    out = toy.feed(session, named, 17, 18)
    np.testing.assert_allclose(out[0][0], toy.expected(0, 17)[0], rtol=1e-4, atol=1e-5)
    named.close()


def test_ids_that_are_late_are_waited_for(daemon: Daemon, toy: Toy):
    with kvstrata.attach(daemon.socket) as worker, kvstrata.attach(daemon.socket) as other:
        named = worker.open(toy.register(worker), "full", key=KEY)
        toy.feed(worker, named, 0, N)
        with worker.step([(named, 1)]) as step:
            for layer in range(LAYERS):
                step.append(layer, toy.k[layer, N:N + 1], toy.v[layer, N:N + 1])
                step.attend(layer, toy.q[layer, N:N + 1])
        other.truncate_key(KEY, 40)
        assert named.tokens == N + 1
        worker.late_tokens([(named, toy.ids[N:N + 1])])
        assert named.tokens == 40
