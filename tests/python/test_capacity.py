# SPDX-License-Identifier: Apache-2.0
"""Admission, on both transports: what there is room for, refusals that say what fits, reservations that are kept."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest
from kvstrata.daemon import Daemon
from toy import LAYERS, Toy

import kvstrata

PAGE = 16 * 1024  # bytes of the toy's page: 16 tokens
POOL_PAGES = 64  # in each of both
PLANS = ("full", "quest{budget = 16, min_tokens = 0}")


@pytest.fixture(params=["linked", "remote"])
def session(request: pytest.FixtureRequest) -> Iterator[kvstrata.Session]:
    with (Daemon("--set", "pool.device_bytes=1MiB", "--set", "pool.host_bytes=1MiB") as daemon,
          kvstrata.attach(daemon.socket, transport=request.param) as opened):
        yield opened


@pytest.fixture
def toy(random: np.random.Generator) -> Toy:
    return Toy(random, 2 * POOL_PAGES * 16)


@pytest.mark.parametrize("plan", PLANS)
def test_room_is_what_an_open_finds(session: kvstrata.Session, toy: Toy, plan: str):
    model = toy.register(session)
    room = session.capacity(model, plan)
    assert room.device.free.bytes == room.host.free.bytes == POOL_PAGES * PAGE
    assert room.device.after_eviction == room.device.free
    assert (room.device.free.tokens < POOL_PAGES * 16) == (plan != "full"), "an index has a share"
    with pytest.raises(kvstrata.ResourceExhausted) as refused:
        session.open(model, plan, toy.ids[:room.open_tokens + 16])
    assert refused.value.reason == "POOL_EXHAUSTED"
    assert f" {room.open_tokens} tokens of this model fit now" in refused.value.message
    assert session.capacity(model, plan) == room, "nothing was taken"
    with session.open(model, plan, toy.ids[:room.open_tokens]):
        assert session.capacity(model, plan).open_tokens == 0


def test_what_nobody_uses_is_room(session: kvstrata.Session, toy: Toy):
    model = toy.register(session)
    before = session.capacity(model)
    with session.open(model, "full", toy.ids[:320]) as sequence:
        toy.feed(session, sequence, 0, 320)
        assert session.capacity(model).open_tokens <= before.open_tokens - 320
    after = session.capacity(model)
    assert after.device.free.bytes == before.device.free.bytes - 20 * PAGE
    assert after.device.after_eviction == before.device.after_eviction


def test_refusals_of_a_capacity(session: kvstrata.Session, toy: Toy):
    model = toy.register(session)
    with pytest.raises(kvstrata.KvstrataError, match="qest"):
        session.capacity(model, "qest")
    with pytest.raises(kvstrata.NotFound, match="model"):
        session.capacity(kvstrata.Model(model.handle + 1, *list(vars(model).values())[1:]))


@pytest.mark.parametrize("plan", PLANS)
def test_a_reservation_is_kept_when_all_else_is_taken(session: kvstrata.Session, toy: Toy, plan: str):
    model, reserved = toy.register(session), 640
    with session.open(model, plan, toy.ids[:100], reserve_tokens=reserved) as sequence:
        toy.feed(session, sequence, 0, 100)
        sequence.prefill_done()
        others = []
        with pytest.raises(kvstrata.ResourceExhausted):
            while True:
                others.append(session.open(model, plan))
        for t in range(100, reserved, 45):
            out = toy.feed(session, sequence, t, min(t + 45, reserved))
        if plan == "full":
            for layer in range(LAYERS):
                np.testing.assert_allclose(out[layer][-1], toy.expected(layer, reserved - 1)[0], rtol=1e-2, atol=1e-3)
        with pytest.raises(kvstrata.ResourceExhausted) as refused:
            toy.feed(session, sequence, reserved, reserved + 200)
        fits = re.search(r" (\d+) tokens of this model fit now", refused.value.message)
        assert fits and reserved <= int(fits[1]) < reserved + 200, refused.value.message
        for other in others:
            other.close()


def test_without_one_the_pool_may_run_out(session: kvstrata.Session, toy: Toy):
    model = toy.register(session)
    with session.open(model, "full", toy.ids[:100]) as sequence:
        toy.feed(session, sequence, 0, 100)
        others = []
        with pytest.raises(kvstrata.ResourceExhausted):
            while True:
                others.append(session.open(model, "full"))
        with pytest.raises(kvstrata.ResourceExhausted):
            toy.feed(session, sequence, 100, 640)
        for other in others:
            other.close()


def test_a_reservation_is_all_or_nothing(session: kvstrata.Session, toy: Toy):
    model = toy.register(session)
    room = session.capacity(model)
    most = room.device.free.tokens + room.host.free.tokens
    with pytest.raises(kvstrata.ResourceExhausted, match="tokens of this model fit now"):
        session.open(model, "full", toy.ids[:20], reserve_tokens=most + 1)
    assert session.capacity(model) == room
    with session.open(model, "full", toy.ids[:20], reserve_tokens=most) as sequence:
        toy.feed(session, sequence, 0, 20)
        assert session.capacity(model).open_tokens == 0
        sequence.truncate(16)
        assert session.capacity(model).open_tokens > 0, "it is over"
    assert session.capacity(model).open_tokens == room.open_tokens
    for tokens in (-1, (1 << 24) + 1):
        with pytest.raises(kvstrata.InvalidArgument, match="reserve_tokens"):
            session.open(model, "full", reserve_tokens=tokens)
