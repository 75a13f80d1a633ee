# SPDX-License-Identifier: Apache-2.0
"""Token ids that come after their step, and members that only fill a batch."""

import numpy as np
import pytest
from toy import LAYERS, Toy

import kvstrata
from kvstrata.daemon import Daemon
from kvstrata.grpc import Client

N = 70
PLANS = ["full", "quest{budget = 32, min_tokens = 0}", "tokenselect{k = 16, n_init = 4, n_local = 8, min_tokens = 0}"]


@pytest.fixture
def session(daemon: Daemon):
    with kvstrata.attach(daemon.socket) as opened:
        yield opened


@pytest.fixture
def toy(random: np.random.Generator) -> Toy:
    return Toy(random, 2 * N)


def run(step: kvstrata.Step, toy: Toy, *parts: slice) -> list[np.ndarray]:
    """Each layer's output for the members' parts, in order."""
    outs = []
    for layer in range(LAYERS):
        k, v, q = (np.concatenate([x[layer, part] for part in parts]) for x in (toy.k, toy.v, toy.q))
        step.append(layer, k, v)
        outs.append(step.attend(layer, q))
    return outs


def decode(session: kvstrata.Session, sequence: kvstrata.Sequence, toy: Toy, first: int, end: int, late: bool
           ) -> list[np.ndarray]:
    outs = []
    for t in range(first, end):
        with session.step([(sequence, 1 if late else toy.ids[t:t + 1])]) as step:
            outs += run(step, toy, slice(t, t + 1))
        if late and t > first:  # one behind, as an engine that waits for no id
            session.late_tokens([(sequence, toy.ids[t - 1:t])])
    if late:
        session.late_tokens([(sequence, toy.ids[end - 1:end])])
    return outs


@pytest.mark.parametrize("plan", PLANS)
def test_outputs_and_pages_are_the_same(session: kvstrata.Session, toy: Toy, plan: str):
    model = toy.register(session)
    outs = []
    for late in (True, False):
        with session.open(model, plan) as sequence:
            toy.feed(session, sequence, 0, N)
            sequence.prefill_done()
            outs.append(decode(session, sequence, toy, N, 2 * N, late))
            sequence.settle()
        with session.open(model, plan, toy.ids) as again:  # found by the ids that came late
            assert again.held == 2 * N // 16 * 16
    for a, b in zip(*outs):
        np.testing.assert_array_equal(a, b)


def test_a_page_is_found_when_its_ids_are_there(session: kvstrata.Session, toy: Toy):
    model = toy.register(session)
    sequence = session.open(model)
    for first, end in [(0, 20), (20, 40), (40, N)]:
        with session.step([(sequence, end - first)]) as step:
            run(step, toy, slice(first, end))
    held = lambda: session.lookup(model, toy.ids[:N]).held
    assert sequence.tokens == N and held() == 0
    for first, end, found in [(0, 19, 0), (19, 40, 32), (40, N - 1, 32), (N - 1, N, 64)]:  # a step's are told together
        session.late_tokens([(sequence, toy.ids[first:end])])
        with session.open(model) as other:  # the daemon takes what it is told in order
            other.settle()
        assert held() == found
    sequence.settle()
    sequence.close()


def test_what_needs_ids_says_so(session: kvstrata.Session, toy: Toy):
    model = toy.register(session)
    sequence = session.open(model)
    with session.step([(sequence, 3)]) as step:
        run(step, toy, slice(0, 3))
    for call in (sequence.fork, sequence.settle, lambda: sequence.truncate(1), lambda: sequence.build(),
                 lambda: session.step([(sequence, toy.ids[3:4])])):
        with pytest.raises(kvstrata.FailedPrecondition, match="3 tokens whose ids have not come") as error:
            call()
        assert error.value.reason == "LATE_TOKENS"
    other = session.open(model)
    for members in ([(sequence, toy.ids[:4])], [(sequence, toy.ids[:3]), (other, toy.ids[:1])]):
        with pytest.raises(kvstrata.InvalidArgument, match="LATE_TOKENS"):
            session.late_tokens(members)
    with pytest.raises(kvstrata.FailedPrecondition, match="ids twice"):
        session.late_tokens([(sequence, toy.ids[:1]), (sequence, toy.ids[1:2])])
    session.late_tokens([(sequence, toy.ids[:3])])
    sequence.settle()
    with session.step([(sequence, toy.ids[3:4])]) as step:
        out = run(step, toy, slice(3, 4))
    np.testing.assert_allclose(out[1][0], toy.expected(1, 3)[0], rtol=1e-4, atol=1e-5)


def test_reports_and_the_prompts_end_wait_in_order(session: kvstrata.Session, toy: Toy):
    sequence = session.open(toy.register(session), "quest")
    with session.step([(sequence, N)]) as step:
        run(step, toy, slice(0, N))
    sequence.prefill_done()
    sequence.report(0, surprisal=np.zeros(N, np.float32))
    session.late_tokens([(sequence, toy.ids[:N])])
    sequence.settle()


def test_sentence_ends_need_ids_at_begin(session: kvstrata.Session, toy: Toy):
    model = session.register_model("toy", toy.digest, layers=LAYERS, query_heads=4, kv_heads=2, head_dim=64,
                                   page_tokens=16, boundary_tokens=[5])
    sequence = session.open(model, "sentencekv")
    with pytest.raises(kvstrata.FailedPrecondition, match="LATE_BOUNDARY"):
        session.step([(sequence, 3)])
    with session.open(model, "full") as full, session.step([(full, 3)]) as step:
        run(step, toy, slice(0, 3))


def test_what_never_got_ids_is_not_kept(daemon: Daemon, session: kvstrata.Session, toy: Toy):
    sequence = session.open(toy.register(session))
    toy.feed(session, sequence, 0, 32)
    with session.step([(sequence, 32)]) as step:
        run(step, toy, slice(32, 64))
    sequence.close()
    assert session.lookup(toy.register(session), toy.ids[:N]).held == 32
    with Client(daemon.socket) as client:
        assert not client.sequences()


@pytest.mark.parametrize("plan", PLANS)
def test_padding_leaves_no_trace(session: kvstrata.Session, toy: Toy, plan: str):
    model = toy.register(session)
    real, filler, alone = (session.open(model, plan) for _ in range(3))
    for sequence in (real, alone):
        toy.feed(session, sequence, 0, N)
        sequence.prefill_done()
    toy.feed(session, filler, 0, 1)
    filler.prefill_done()
    for t in range(N, N + 20):
        with session.step([(real, toy.ids[t:t + 1])], padding=[(filler, 1)]) as step:
            both = run(step, toy, slice(t, t + 1), slice(t, t + 1))
        with session.step([(alone, toy.ids[t:t + 1])]) as step:
            want = run(step, toy, slice(t, t + 1))
        for a, b in zip(both, want):
            np.testing.assert_array_equal(a[:1], b)
        assert filler.tokens == 1
    for sequence in (real, filler, alone):
        sequence.settle()


def test_the_remote_transport_has_neither(daemon: Daemon, toy: Toy):
    with kvstrata.attach(daemon.socket, transport="remote") as remote:
        sequence = remote.open(toy.register(remote))
        for call in (lambda: remote.step([(sequence, 1)]), lambda: remote.step([], padding=[(sequence, 1)]),
                     lambda: remote.late_tokens([(sequence, [1])])):
            with pytest.raises(kvstrata.Unimplemented, match="REMOTE_LATE_TOKENS"):
                call()
