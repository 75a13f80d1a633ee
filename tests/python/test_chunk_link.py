# SPDX-License-Identifier: Apache-2.0
"""kvstrata.chunks against a scripted peer: packets of both sides, answers that come late or never, a daemon that
ends."""

from __future__ import annotations

import os
import pathlib
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from kvstrata import chunks
from kvstrata.chunks import ABSENT, COMING, SCHEDULER, WORKER, ChunkClient, ChunkLink, LayerRecall

import kvstrata

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from chunk_peer import EPOCH, PATIENCE, REGION, ROW, Peer  # noqa: E402

KEYS = [(bytes([number]) * 32, number) for number in range(1, 6)]


@pytest.fixture
def peer(tmp_path: pathlib.Path) -> Iterator[Peer]:
    made = Peer(tmp_path)
    yield made
    made.close()


def beside(run: Callable[[], object]) -> list[object]:
    """What it returned or raised, on a thread, since a connect waits for the peer; a list that is filled."""
    out: list[object] = []

    def kept() -> None:
        try:
            out.append(run())
        except Exception as error:  # noqa: BLE001
            out.append(error)

    thread = threading.Thread(target=kept)
    thread.start()
    out.append(thread)
    return out


def outcome(made: list[object]) -> object:
    thread = next(x for x in made if isinstance(x, threading.Thread))
    thread.join(PATIENCE)
    return next(x for x in made if not isinstance(x, threading.Thread))


def link_of(peer: Peer, role: int = SCHEDULER) -> ChunkLink:
    made = beside(lambda: ChunkLink(peer.path, role=role, row_bytes=ROW, engine="e", client_name="test"))
    peer.accept()
    peer.welcome()
    link = outcome(made)
    assert isinstance(link, ChunkLink), link
    return link


@pytest.fixture
def client(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChunkClient]:
    monkeypatch.setattr(chunks, "short_of_processors", lambda: False)
    made = ChunkClient(link_of(peer))
    yield made
    made.close(detach=False)


def until(true: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, "it never is"
        time.sleep(0.001)


def test_a_worker_maps_the_region(peer: Peer):
    with link_of(peer, WORKER) as link:
        assert struct.unpack_from("<IIIIQ64s", peer.hello) == (1, 0x4B56434B, 1, WORKER, ROW, b"e".ljust(64, b"\0"))
        assert link.welcome == (EPOCH, REGION, ROW)
        memory = link.map()
        memory[ROW:ROW + 4] = b"mine"
        assert os.pread(peer.region, 4, ROW) == b"mine"
        link.detach()
        assert peer.take(8)
        assert peer.link.recv(1) == b"" and memory[ROW:ROW + 4] == b"mine"


def recalled(peer: Peer) -> tuple[str, str, list[LayerRecall]]:
    packet = peer.take(9)
    count, plan, model = struct.unpack_from("<I128s120s", packet)
    rows = [LayerRecall(*struct.unpack_from("<IIfff", packet, 252 + 20 * at)) for at in range(count)]
    assert len(packet) == 252 + 20 * count
    return plan.rstrip(b"\0").decode(), model.rstrip(b"\0").decode(), rows


def test_what_a_plan_loses_is_told(peer: Peer):
    """Rounding is cut off, what is not finite left out, and text to what has room, between two characters."""
    nan, inf = float("nan"), float("inf")
    row = LayerRecall(3, 2, 0.75, 0.5, 0.125)
    with link_of(peer, WORKER) as link:
        assert link.recalled("quest{budget = 9}", "m", [row, row._replace(layer=4, recall=1.0000001, least=-1e-9)])
        assert recalled(peer) == ("quest{budget = 9}", "m", [row, LayerRecall(4, 2, 1.0, 0.0, 0.125)])
        ill = [row._replace(recall=nan), row._replace(least=inf), row._replace(error=nan), row._replace(error=-inf),
               row._replace(samples=0)]
        assert link.recalled("quest", "m", [*ill, row._replace(error=1e300)])
        plan, _, rows = recalled(peer)
        assert plan == "quest" and [n.layer for n in rows] == [3] and 1e38 < rows[0].error < inf
        assert link.recalled("quest", "m", ill) and link.recalled("quest", "m", [])
        assert link.recalled("p" * 126 + "\u00fc", "m" * 118 + "\u00fc", [row])
        assert recalled(peer) == ("p" * 126, "m" * 118, [row])


def test_what_a_plan_loses_waits_for_nobody(peer: Peer):
    """A daemon that reads nothing, then reads again, then is gone."""
    row = LayerRecall(0, 1, 1.0, 1.0, 0.0)
    with link_of(peer, WORKER) as link:
        assert link.socket.gettimeout() == 0
        for at in range(100000):
            if not link.recalled("quest", "m", [row] * 1024):
                break
        else:
            raise AssertionError("a full socket takes more")
        while at:
            assert len(recalled(peer)[2]) == 1024
            at -= 1
        assert link.recalled("quest", "m", [row]) and len(recalled(peer)[2]) == 1
        peer.link.close()
        assert not link.recalled("quest", "m", [row])
    assert not link.recalled("quest", "m", [row])


def test_a_refusal_is_raised_as_it_is(peer: Peer):
    made = beside(lambda: ChunkLink(peer.path, role=SCHEDULER, row_bytes=ROW, engine="e", client_name="test"))
    peer.accept()
    peer.refuse(9, b"CHUNKS_OFF", b"chunks.bytes is 0")
    error = outcome(made)
    assert isinstance(error, kvstrata.FailedPrecondition)
    assert (error.reason, error.message) == ("CHUNKS_OFF", "chunks.bytes is 0")


def test_nobody_is_there(tmp_path: pathlib.Path):
    with pytest.raises(kvstrata.Unavailable, match="start kvstratad.*KVSTRATA_SOCKET"):
        ChunkLink(tmp_path / "nobody.sock", role=WORKER, row_bytes=ROW, engine="e", client_name="test")


def test_what_is_asked_and_answered(peer: Peer, client: ChunkClient):
    client.space(b"s" * 32)
    lease = client.ask(KEYS[:3])
    assert lease.ids == [None] * 3 and not lease.answered
    assert peer.space() == b"s" * 32
    ask = peer.ask()
    assert ask.first == 0 and ask.keys == KEYS[:3]
    assert client.ask(KEYS[3:], lease) is lease
    more = peer.ask()
    assert (more.lease, more.first, more.keys) == (ask.lease, 3, KEYS[3:])
    peer.held(more, [7, ABSENT])
    peer.held(ask, [5, COMING, ABSENT])
    until(lambda: lease.answered)
    assert lease.ids == [5, COMING, ABSENT, 7, ABSENT]
    peer.arrived(ask.lease, {1: 9})
    until(lambda: lease.ids[1] == 9)
    client.release([lease])
    assert peer.numbers(4) == [ask.lease]
    peer.arrived(ask.lease, {2: 3})  # nobody's
    client.want(1)
    assert peer.numbers(5) == [1]


def test_many_keys_are_several_packets(peer: Peer, client: ChunkClient):
    keys = [(number.to_bytes(32, "big"), 0) for number in range(2500)]
    lease = client.ask(keys)
    asks = [peer.ask() for _ in range(3)]
    assert [(ask.first, len(ask.keys)) for ask in asks] == [(0, 1024), (1024, 1024), (2048, 452)]
    assert [key for ask in asks for key in ask.keys] == keys and {ask.lease for ask in asks} == {lease.number}
    for ask in asks[::-1]:
        peer.held(ask, list(range(ask.first, ask.first + len(ask.keys))))
    until(lambda: lease.answered)
    assert lease.ids == list(range(2500))


def test_credits(peer: Peer, client: ChunkClient):
    client.want(4)
    assert peer.numbers(5) == [4] and client.owed == 4 and client.credits(2) == []
    peer.credits([11, 12, 13])
    until(lambda: client.available == 3)
    assert client.owed == 1 and client.credits(2) == [11, 12] and client.credits(2) == [13]
    client.stored([(KEYS[0], 11)])
    client.give_back([12, 13])
    assert peer.stored() == [(*KEYS[0], 11)] and peer.numbers(7) == [12, 13]


def test_a_daemon_that_does_not_answer(peer: Peer, client: ChunkClient, caplog: pytest.LogCaptureFixture):
    """It is silent, and is not when it answers; what it says then counts. Nobody has waited."""
    lease = client.ask(KEYS[:1])
    ask = peer.ask()
    until(lambda: client.silent and "kvstratad has not answered" in caplog.text)
    assert not client.gone
    peer.held(ask, [3])
    until(lambda: not client.silent)
    assert lease.ids == [3]
    client.want(1)  # no answer is due
    assert peer.numbers(5) == [1]
    again = client.ask(KEYS[:1])
    peer.held(peer.ask(), [4])
    until(lambda: again.answered)
    assert not client.silent


def test_the_caller_exchanges_without_the_thread(peer: Peer, monkeypatch: pytest.MonkeyPatch):
    """An engine that computes in Python lets another thread run late."""
    monkeypatch.setattr(ChunkClient, "_run", lambda client: None)
    client = ChunkClient(link_of(peer))
    lease = client.ask(KEYS[:2])
    peer.held(peer.ask(), [3, ABSENT])
    client.want(2)
    assert peer.numbers(5) == [2]
    peer.credits([7, 8])
    client.receive()  # a packet of a socket of this machine is there when it has been sent
    assert lease.ids == [3, ABSENT] and client.credits(2) == [7, 8]


def test_processors_that_are_short_make_patient(peer: Peer, client: ChunkClient, monkeypatch: pytest.MonkeyPatch):
    """Silence is told from a machine that gives the daemon no processor: that is asked for before it is said."""
    asked = []
    monkeypatch.setattr(chunks, "short_of_processors", lambda: asked.append(1) or len(asked) < 3)
    client.ask(KEYS[:1])
    peer.ask()
    until(lambda: client.silent)
    assert len(asked) == 3


def test_a_daemon_that_ends(peer: Peer, client: ChunkClient, caplog: pytest.LogCaptureFixture):
    """What was held is held; what was not answered is not there; nothing raises."""
    lease = client.ask(KEYS[:3])
    peer.held(peer.ask(), [3, COMING, ABSENT])
    until(lambda: lease.answered)
    late = client.ask(KEYS[3:])
    peer.ask()
    peer.link.close()
    until(lambda: client.gone)
    assert lease.ids == [3, ABSENT, ABSENT] and late.ids == [ABSENT] * 2 and late.answered
    assert "takes the daemon that runs at its next start" in caplog.text
    assert client.ask(KEYS).ids == [ABSENT] * 5
    client.want(1)
    client.stored([(KEYS[0], 1)])
    client.give_back([1])
    client.release([lease])
    assert client.credits(5) == []


def test_the_end_of_an_engine(peer: Peer, client: ChunkClient):
    """All that was said is sent before."""
    client.stored([(KEYS[0], 11)])
    client.close(detach=True)
    assert peer.stored() == [(*KEYS[0], 11)] and peer.take(8) and peer.link.recv(1) == b""


def test_what_waits_for_a_peer_that_reads_nothing_is_sent_in_order(peer: Peer, client: ChunkClient):
    count = 3000
    for number in range(count):
        client.give_back([number] * 200)
    assert [peer.numbers(7)[0] for _ in range(count)] == list(range(count))
