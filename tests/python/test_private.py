# SPDX-License-Identifier: Apache-2.0
"""Private sequences, both transports: what one of them leaves behind nobody finds, and it finds nothing; on disk, after
a restart, in forks, under every kind of plan, and in imported mode."""

from __future__ import annotations

import pathlib
import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest
from test_imported_blocks import BLOCK_TOKENS, Blocks, lend, register
from toy import Toy

import kvstrata
from kvstrata.daemon import Daemon
from kvstrata.grpc import Client, admin_pb2

N, PAGE = 200, 16
WHOLE = (N - 1) // PAGE * PAGE
PLANS = {
    "full": "full",
    "quest": "quest{min_tokens = 0, page = 16}",
    "sekv": "sekv{min_tokens = 0, local = 16}",
    "mosaickv": "mosaickv{max_loss = 1, share = 0.1, min_tokens = 0}",
    "sentencekv": "sentencekv{min_tokens = 0, tau = 16, start = 4, recent = 8, n_obs = 8}",
    "strata": "strata{min_tokens = 0}",
    "packed": '{selector = "full", codec = "packed", max_loss = 1, min_tokens = 0, keep_raw = "no"}',
}


def start(folder: pathlib.Path) -> Daemon:
    return Daemon("--set", f"disk.path={folder}/tier", "--set", "disk.budget_bytes=512MiB",
                  "--set", "disk.load_timeout=10s")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with start(tmp_path_factory.mktemp("private")) as started:
        yield started
        assert started.process.poll() is None, f"kvstratad died:\n{started.said()}"


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with Client(daemon.socket) as opened:
        yield opened


@pytest.fixture
def toy(random: np.random.Generator) -> Toy:
    return Toy(random, N + PAGE)


def prompt(session: kvstrata.Session, toy: Toy, plan: str, *, private: bool) -> kvstrata.Sequence:
    """A complete prompt with all that its plan makes of it, and the page of tokens behind it."""
    sequence = session.open(toy.register(session), plan, toy.ids[:N], private=private)
    toy.feed(session, sequence, sequence.held, N)
    first = sequence.surprisal_tokens
    sequence.report(first, surprisal=np.ones(N - first, np.float32), boundary=np.arange(first, N) % 7 == 0)
    sequence.prefill_done()
    sequence.settle()
    toy.feed(session, sequence, N, N + PAGE)
    sequence.settle()
    return sequence


def disk(client: Client) -> admin_pb2.Disk:
    """When all that was offered to it is written."""
    until = time.monotonic() + 60
    while True:
        [found] = client.status().disks
        if not found.waiting:
            return found
        assert time.monotonic() < until, found


def used(client: Client) -> int:
    return sum(pool.used_bytes for pool in client.pools())


def held(session: kvstrata.Session, toy: Toy, plan: str, tokens: int = N + PAGE) -> int:
    model, ids = toy.register(session), toy.ids[:tokens]
    found = [session.lookup(model, ids).held, session.lookup(model, ids, plan).held,
             session.lookup(model, ids, plan, lease_ms=1).held]
    with session.open(model, plan, ids) as sequence:
        assert max(found) <= sequence.held
        return sequence.held


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_nobody_finds_it_and_its_memory_comes_back(session: kvstrata.Session, client: Client, toy: Toy, plan: str):
    client.call(client.admin.Evict, admin_pb2.EvictRequest())
    before, on_disk = used(client), disk(client).written
    sequence = prompt(session, toy, plan, private=True)
    assert sequence.held == 0
    fork = sequence.fork()
    assert [s.private_pages for s in client.sequences()] == [True, True]
    assert held(session, toy, plan) == 0
    sequence.close()
    assert held(session, toy, plan) == 0
    fork.close()
    assert disk(client).written == on_disk
    assert used(client) == before
    assert held(session, toy, plan) == 0


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_it_finds_nothing(session: kvstrata.Session, client: Client, toy: Toy, plan: str):
    with prompt(session, toy, plan, private=False):
        pass
    found = held(session, toy, plan, N)
    assert found > 0
    on_disk = disk(client).written
    with prompt(session, toy, plan, private=True) as sequence:
        assert (sequence.held, sequence.indexed, sequence.surprisal_tokens) == (0, 0, 0)
    assert held(session, toy, plan, N) == found
    assert disk(client).written == on_disk


def test_it_attends_as_any_other(session: kvstrata.Session, toy: Toy):
    out = []
    for private in (False, True):
        with session.open(toy.register(session), "full", toy.ids[:N], private=private) as sequence:
            assert sequence.held == 0
            out.append(np.array(toy.feed(session, sequence, 0, N)))
    np.testing.assert_array_equal(out[1], out[0])


@pytest.mark.parametrize("transport", ["linked", "remote"])
@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL], ids=["term", "kill"])
def test_a_restart_finds_what_was_shown_alone(tmp_path: pathlib.Path, random: np.random.Generator, transport: str,
                                              by: signal.Signals):
    private, shown = Toy(random, N + PAGE), Toy(random, N + PAGE)
    with start(tmp_path) as first, kvstrata.attach(first.socket, transport=transport) as session, \
            Client(first.socket) as client:
        with prompt(session, private, "full", private=True), prompt(session, shown, "full", private=False):
            assert disk(client).entries == (N + PAGE) // PAGE
            first.process.send_signal(by)
            first.process.wait()
    with start(tmp_path) as second, kvstrata.attach(second.socket, transport=transport) as session:
        assert held(session, private, "full") == 0
        assert held(session, shown, "full") > 0


def test_reorders_and_truncations_stay_private(session: kvstrata.Session, toy: Toy):
    one = session.open(toy.register(session), "full", toy.ids[:1], private=True)
    two = one.fork()
    toy.feed(session, one, 0, 100)
    one.truncate(40)
    beams = session.reorder([one, two], [0, 0])
    for beam in beams:
        toy.feed(session, beam, 40, N)
    assert held(session, toy, "full") == 0
    for beam in beams:
        beam.close()
    assert held(session, toy, "full") == 0


def test_operators_see_that_it_is_and_pin_nothing_of_it(session: kvstrata.Session, client: Client, toy: Toy):
    with prompt(session, toy, "full", private=True) as sequence:
        assert client.show_sequence(sequence.handle).sequence.private_pages
        with pytest.raises(kvstrata.KvstrataError) as refused:
            client.call(client.admin.Pin, admin_pb2.PinRequest(sequence=sequence.handle, ttl_us=60_000_000))
        assert refused.value.reason == "PIN_PRIVATE"
        with pytest.raises(kvstrata.KvstrataError) as refused:
            sequence.build("quest{page = 16}")
        assert refused.value.reason == "BUILD_PRIVATE"


def test_ids_that_come_late_are_as_private(daemon: Daemon, toy: Toy):
    with kvstrata.attach(daemon.socket) as session, \
            session.open(toy.register(session), "full", private=True) as sequence:
        with session.step([(sequence, N)]) as step:
            for layer in range(toy.layers):
                step.append(layer, toy.k[layer, :N], toy.v[layer, :N])
        session.late_tokens([(sequence, toy.ids[:N])])
        sequence.settle()
        assert held(session, toy, "full") == 0


def test_imported_blocks_are_as_private(daemon: Daemon, toy: Toy):
    blocks = Blocks()
    with kvstrata.attach(daemon.socket) as lender, kvstrata.attach(daemon.socket) as reader:
        model = lend(lender, toy, blocks)
        with lender.open(model, "full", private=True) as sequence:
            blocks.put(toy, [0, 1, 2])
            sequence.seal(0, [0, 1, 2], toy.ids[:3 * BLOCK_TOKENS])
            sequence.settle()
            assert sequence.acknowledged == 3 * BLOCK_TOKENS
            assert reader.lookup(register(reader, toy), toy.ids).held == 0
        assert reader.lookup(register(reader, toy), toy.ids).held == 0
        with lender.open(model, "full") as sequence:  # the same blocks, shown: they are found
            sequence.seal(0, [0, 1, 2], toy.ids[:3 * BLOCK_TOKENS])
            sequence.settle()
            assert reader.lookup(register(reader, toy), toy.ids).held == 3 * BLOCK_TOKENS
