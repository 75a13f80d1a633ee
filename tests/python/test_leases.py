# SPDX-License-Identifier: Apache-2.0
"""Look-ups with a lease, both transports: one session asks, everything that may go goes, another session opens."""

import os
import time
from collections.abc import Iterator

import numpy as np
import pytest
from toy import Toy

import kvstrata
from kvstrata.daemon import Daemon
from kvstrata.grpc import Client, admin_pb2

N = 96
PLAN = "quest{page = 16}"


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with Client(daemon.socket) as opened:
        yield opened


@pytest.fixture
def toy(random: np.random.Generator) -> Toy:
    return Toy(random, N)


def compute(session: kvstrata.Session, toy: Toy) -> kvstrata.Model:
    model = toy.register(session)
    with session.open(model, PLAN, toy.ids) as sequence:
        toy.feed(session, sequence, sequence.held, N)
        sequence.prefill_done()
        sequence.settle()
    return model


def evict(client: Client) -> None:
    client.call(client.admin.Evict, admin_pb2.EvictRequest())


def held(session: kvstrata.Session, toy: Toy) -> int:
    with session.open(toy.register(session), PLAN, toy.ids) as sequence:
        return sequence.held


@pytest.mark.parametrize("lease_ms", [0, 60000])
def test_what_is_answered_stays_held(daemon: Daemon, client: Client, session: kvstrata.Session, toy: Toy,
                                     lease_ms: int):
    found = session.lookup(compute(session, toy), toy.ids, PLAN, lease_ms=lease_ms)
    assert found.held > 0
    evict(client)
    with kvstrata.attach(daemon.socket, client_name="worker") as worker:
        assert held(worker, toy) == (found.held if lease_ms else 0)


def test_ends_by_its_time_and_is_renewed(client: Client, session: kvstrata.Session, toy: Toy):
    model = compute(session, toy)
    asked = time.monotonic()
    for _ in range(3):
        session.lookup(model, toy.ids, PLAN, lease_ms=300)
        assert len(client.sequences()) == 1
    while client.sequences():
        assert time.monotonic() < asked + 10
    assert time.monotonic() >= asked + 0.3
    evict(client)
    assert held(session, toy) == 0


def test_ends_with_its_session(daemon: Daemon, client: Client, session: kvstrata.Session, toy: Toy):
    compute(session, toy)
    with kvstrata.attach(daemon.socket, transport=session.transport, client_name="scheduler") as scheduler:
        assert scheduler.lookup(toy.register(scheduler), toy.ids, PLAN, lease_ms=60000).held > 0
    end = time.monotonic() + 10
    while client.sequences():  # a stream that is cancelled ends its session a moment later
        assert time.monotonic() < end
    evict(client)
    assert held(session, toy) == 0


def test_refusals_say_what_is_allowed(session: kvstrata.Session, toy: Toy):
    model = compute(session, toy)
    for lease_ms in (-1, 60001, 1 << 32):
        with pytest.raises(kvstrata.KvstrataError, match="60000") as error:
            session.lookup(model, toy.ids, PLAN, lease_ms=lease_ms)
        assert error.value.reason == "LEASE_TIME"
    with pytest.raises(kvstrata.KvstrataError, match="name the plan"):
        session.lookup(model, toy.ids, lease_ms=100)


def test_once_opened_it_counts_no_more(daemon: Daemon, client: Client, session: kvstrata.Session, toy: Toy):
    model = compute(session, toy)
    user = f"uid:{os.getuid()}"
    client.call(client.admin.SetQuota, admin_pb2.SetQuotaRequest(user=user, limit="sequences", value=1))
    try:
        found = session.lookup(model, toy.ids, PLAN, lease_ms=60000)
        with kvstrata.attach(daemon.socket, client_name="worker") as worker:
            for _ in range(2):
                with worker.open(toy.register(worker), PLAN, toy.ids) as sequence:
                    assert sequence.held == found.held > 0
                    with pytest.raises(kvstrata.ResourceExhausted, match="SEQUENCE_LIMIT"):
                        worker.open(toy.register(worker), PLAN, toy.ids)
            evict(client)
            assert held(worker, toy) == found.held
    finally:
        client.call(client.admin.SetQuota, admin_pb2.SetQuotaRequest(user=user, limit="sequences", reset=True))
