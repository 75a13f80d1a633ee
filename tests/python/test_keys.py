"""Keys of sequences, both roads: what one session opened another closes, in a step and out of one."""

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
    with kvstrata.attach(daemon.socket, road=request.param, client_name="scheduler") as opened:
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
