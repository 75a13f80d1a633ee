# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of engine chunks against a scripted daemon: what is asked, promised, released, stored, given
back. Without an engine."""

from __future__ import annotations

import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm installs it")

from kvstrata import chunks  # noqa: E402
from kvstrata.chunks import ABSENT, COMING, SCHEDULER, ChunkClient, ChunkLink  # noqa: E402
from kvstrata.torch_identity import Identity  # noqa: E402
from kvstrata_vllm import source as source_module  # noqa: E402
from kvstrata_vllm.source import ChunkSource  # noqa: E402
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key  # noqa: E402
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec  # noqa: E402

from chunk_peer import PATIENCE, ROW, Peer  # noqa: E402

HIT, MISS, RETRY, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY, LookupResult.HIT_PENDING
KEYS = [make_offload_key(bytes([number]) * 32, 0) for number in range(1, 9)]
MODEL, OTHER = Identity("m" * 64, None), Identity("o" * 64, None)
WORKERS, AHEAD = 2, 8


def until(true: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, "it never is"
        time.sleep(0.001)


@pytest.fixture
def peer(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Peer]:
    monkeypatch.setattr(chunks, "SILENT_SECONDS", PATIENCE)  # but where a test is of it
    made = Peer(tmp_path)
    yield made
    made.close()


@pytest.fixture
def source(peer: Peer) -> Iterator[ChunkSource]:
    """Behind its first epoch: its space is told, and no credits have come."""
    thread = threading.Thread(target=lambda: (peer.accept(), peer.welcome()))
    thread.start()
    made = ChunkSource(ChunkClient(ChunkLink(peer.path, role=SCHEDULER, row_bytes=ROW, engine="e", client_name="t")),
                       WORKERS)
    thread.join()
    made.serve({"some": "layout"}, {0: MODEL, 1: MODEL}, AHEAD)
    made.spaces = [peer.space()]  # type: ignore[attr-defined]
    assert peer.numbers(5) == [AHEAD]
    yield made
    made.client.close(detach=False)


def request(source: ChunkSource, name: str, keys: list[bytes] = KEYS[:4]) -> ReqContext:
    context = ReqContext(req_id=name)
    for number, key in enumerate(keys):
        context.set_offload_key_position(key, 256 * (number + 1))
    source.on_new_request(context)
    return context


def answered(source: ChunkSource, peer: Peer, context: ReqContext, ids: list[int]) -> int:
    """The lease of what is asked for when a request arrives, with this answer."""
    source.prefetch(context)
    ask = peer.ask()
    peer.held(ask, ids)
    until(lambda: not source.waits(context.req_id))
    return ask.lease


def load_of(source: ChunkSource, context: ReqContext, keys: list[bytes]) -> SimpleNamespace:
    return SimpleNamespace(req_id=context.req_id, src_spec=source.prepare_load(keys, context))


def store(source: ChunkSource, context: ReqContext, keys: list[bytes], job: int) -> list[int]:
    """Prepared, and ordered as a job; the chunks."""
    source.begins(context.req_id)
    output = source.prepare_store(keys, context)
    ids = output.store_spec.block_ids.tolist()
    if ids:
        source.scheduled([context.req_id], {}, {job: SimpleNamespace(dst_spec=CPULoadStoreSpec(ids))})
    return ids


def give_credits(source: ChunkSource, peer: Peer, ids: list[int]) -> None:
    peer.credits(ids)
    until(lambda: source.client.available == len(ids))


def all_report(source: ChunkSource, *jobs: int, failed: tuple[int, ...] = ()) -> None:
    for job in jobs:
        for _ in range(WORKERS):
            source.reported({job: 1}, failed)


def test_a_request_is_asked_about_once_and_answered_from_that(source: ChunkSource, peer: Peer):
    context = request(source, "a")
    source.prefetch(context)
    ask = peer.ask()
    assert ask.keys == [(key[:32], 0) for key in KEYS[:4]]
    assert source.waits("a") and source.lookup(KEYS[0], context) is RETRY
    peer.held(ask, [5, 6, COMING, ABSENT])
    until(lambda: not source.waits("a"))
    assert [source.lookup(key, context) for key in KEYS[:4]] == [HIT, HIT, PENDING, MISS]
    peer.arrived(ask.lease, {2: 9})
    until(lambda: source.lookup(KEYS[2], context) is HIT)
    assert source.prepare_load(KEYS[:3], context).block_ids.tolist() == [5, 6, 9]
    assert peer.nothing()


def test_requests_that_arrive_together_are_asked_about_in_turns(source: ChunkSource, peer: Peer,
                                                                monkeypatch: pytest.MonkeyPatch):
    """A step is not held up by all that wait."""
    monkeypatch.setattr(source_module, "_ASKED_A_STEP", 6)
    contexts = {name: request(source, name) for name in "abc"}
    for context in contexts.values():
        source.prefetch(context)
    peer.held(peer.ask(), [5] * 4)
    peer.held(peer.ask(), [6] * 4)
    assert peer.nothing() and not source.can_ask
    assert not source.waits("a") and source.waits("c")
    source.scheduled({"a": 1}, {}, {})
    assert peer.numbers(4) and source.can_ask
    assert not source.waits("c") and source.lookup(KEYS[0], contexts["c"]) is RETRY
    assert len(peer.ask().keys) == 4 and source.waits("c")


def test_keys_that_come_later_are_asked_under_the_same_lease(source: ChunkSource, peer: Peer):
    context = request(source, "a")
    lease = answered(source, peer, context, [5, 6, 7, ABSENT])
    context.set_offload_key_position(KEYS[4], 1280)
    assert source.lookup(KEYS[4], context) is RETRY
    more = peer.ask()
    assert (more.lease, more.first, more.keys) == (lease, 4, [(KEYS[4][:32], 0)])
    peer.held(more, [8])
    until(lambda: source.lookup(KEYS[4], context) is HIT)


@pytest.mark.parametrize("failed", [(), (1,)])
def test_a_lease_is_held_until_all_workers_have_loaded(source: ChunkSource, peer: Peer, failed: tuple[int, ...]):
    context = request(source, "a")
    lease = answered(source, peer, context, [5, 6, 7, ABSENT])
    source.scheduled([], {1: load_of(source, context, KEYS[:3])}, {})
    source.reported({1: 1}, failed)
    source.on_request_finished(context)
    source.client.want(3)
    assert peer.numbers(5) == [3]  # and no release before
    source.reported({1: 1}, ())
    assert peer.numbers(4) == [lease] and not source.has_pending_work()


def test_a_lease_goes_when_a_request_is_scheduled_without_a_load_or_ends(source: ChunkSource, peer: Peer):
    first, second = request(source, "a"), request(source, "b")
    leases = [answered(source, peer, context, [5, ABSENT, ABSENT, ABSENT]) for context in (first, second)]
    source.scheduled(["a"], {}, {})
    assert peer.numbers(4) == [leases[0]]
    source.on_request_finished(second)
    assert peer.numbers(4) == [leases[1]]


def test_what_is_on_the_way_is_looked_up_when_something_has_come(source: ChunkSource, peer: Peer,
                                                                 monkeypatch: pytest.MonkeyPatch):
    """Not in each step; and when it is asked for again, the answer counts."""
    context = request(source, "r")
    lease = answered(source, peer, context, [10, COMING, COMING, ABSENT])
    assert [source.lookup(key, context) for key in KEYS[:4]] == [HIT, PENDING, PENDING, MISS]
    source.put_off("r", 0)
    source.scheduled([], {}, {})
    assert source.waits("r", 0) and not source.waits("r", 256)  # vLLM has found more in its own cache
    peer.arrived(lease, {1: 11})
    until(lambda: not source.waits("r", 0))
    assert source.lookup(KEYS[1], context) == HIT
    source.put_off("r", 0)
    monkeypatch.setattr(source_module, "_ASK_AGAIN", 0.0)
    source.scheduled([], {}, {})
    assert source.waits("r", 0)
    peer.held(peer.ask(), [20, 21, 22, 23])
    until(lambda: source.scheduled([], {}, {}) or not source.waits("r", 0))
    assert source.lookup(KEYS[3], context) == HIT


def test_what_was_not_there_is_asked_for_again(source: ChunkSource, peer: Peer, monkeypatch: pytest.MonkeyPatch):
    """A request waits; what it has is held until the other lease has all."""
    context = request(source, "a")
    lease = answered(source, peer, context, [5, 6, ABSENT, ABSENT])
    source.scheduled([], {}, {})
    assert source.lookup(KEYS[2], context) is MISS and peer.nothing()
    monkeypatch.setattr(source_module, "_ASK_AGAIN", 0.0)
    source.scheduled([], {}, {})
    assert source.lookup(KEYS[2], context) is MISS
    ask = peer.ask()
    assert ask.lease != lease and len(ask.keys) == 4
    monkeypatch.setattr(source_module, "_ASK_AGAIN", PATIENCE)
    peer.held(ask, [5, 6, 7, ABSENT])
    memo = source._memos["a"]
    until(lambda: memo.again is not None and memo.again.answered)
    assert source.lookup(KEYS[2], context) is MISS  # in the step that has begun nothing changes
    source.scheduled([], {}, {})
    assert source.lookup(KEYS[2], context) is HIT
    assert peer.numbers(4) == [lease]


@pytest.mark.parametrize("later", [True, False])
def test_what_is_known_to_be_there_is_not_stored(source: ChunkSource, peer: Peer, later: bool):
    """later: than the step in which it is scheduled first."""
    context = request(source, "a")
    answered(source, peer, context, [5, COMING, ABSENT, ABSENT])
    give_credits(source, peer, [20, 21, 22, 23])
    source.begins("a")
    if later:
        source.scheduled(["a"], {}, {})
        peer.numbers(4)
    output = source.prepare_store(KEYS[:4], context)
    assert output.keys_to_store == KEYS[2:4] and output.store_spec.block_ids.tolist() == [20, 21]
    other = request(source, "b")
    source.begins("b")
    assert source.prepare_store(KEYS[2:5], other).keys_to_store == [KEYS[4]]  # the others are under way


def test_a_store_is_shown_when_all_workers_have_it(source: ChunkSource, peer: Peer):
    context = request(source, "a")
    give_credits(source, peer, [20, 21, 22, 23])
    assert store(source, context, KEYS[:2], 1) == [20, 21]
    source.reported({1: 1}, ())
    assert source.has_pending_work() and peer.nothing()
    source.reported({1: 1}, ())
    assert peer.stored() == [(KEYS[0][:32], 0, 20), (KEYS[1][:32], 0, 21)]
    assert not source.has_pending_work()


def test_a_store_that_failed_anywhere_is_not(source: ChunkSource, peer: Peer):
    context = request(source, "a")
    give_credits(source, peer, [20, 21])
    assert store(source, context, KEYS[:2], 1) == [20, 21]
    source.reported({1: 1}, (1,))
    source.reported({1: 1}, ())
    assert peer.numbers(7) == [20, 21]


def test_too_few_credits_store_the_first_tokens_of_all_groups(source: ChunkSource, peer: Peer):
    """In the order of the offer, which goes by groups."""
    context = ReqContext(req_id="a")
    offered = [make_offload_key(bytes([number]) * 32, group) for group in range(2) for number in (1, 2, 3)]
    for key in offered:
        context.set_offload_key_position(key, key[0] * 256)
    source.on_new_request(context)
    give_credits(source, peer, [20, 21, 22])
    source.begins("a")
    output = source.prepare_store(offered, context)
    assert output.keys_to_store == [offered[0], offered[1], offered[3]]
    assert output.store_spec.block_ids.tolist() == [20, 21, 22]
    assert peer.numbers(5) == [3]  # what is owed still counts


def test_a_reset_gives_back_what_is_written_when_nobody_writes_it(source: ChunkSource, peer: Peer):
    """Neither before, nor as anything that is found; leases of loads go then, too."""
    context, loads = request(source, "a"), request(source, "b")
    lease = answered(source, peer, loads, [5, 6, 7, 8])
    give_credits(source, peer, [20, 21, 22, 23])
    source.scheduled([], {2: load_of(source, loads, KEYS[:4])}, {})
    assert store(source, context, KEYS[4:6], 1) == [20, 21]
    assert source.reset(used_blocks=0)
    source.spaces.append(peer.space())
    assert source.has_pending_work() and peer.nothing()
    all_report(source, 1, 2)
    assert peer.numbers(7) == [20, 21] and peer.numbers(4) == [lease]
    assert len({*source.spaces}) == 2


def test_behind_a_reset_requests_of_before_are_not_stored(source: ChunkSource, peer: Peer):
    """But for those that begin again."""
    context = request(source, "a")
    give_credits(source, peer, [20, 21, 22, 23])
    source.begins("a")
    assert source.reset(used_blocks=0)
    assert source.prepare_store(KEYS[:2], context).keys_to_store == []
    assert store(source, context, KEYS[:2], 1) == [20, 21]


def test_a_reset_of_which_vllm_keeps_something_says_so(source: ChunkSource, peer: Peer,
                                                       caplog: pytest.LogCaptureFixture):
    context = request(source, "a")
    give_credits(source, peer, [20, 21])
    assert not source.reset(used_blocks=3)
    assert "3 blocks are in use" in caplog.text
    assert store(source, context, KEYS[:2], 1) == []
    assert source.reset(used_blocks=0) and store(source, context, KEYS[:2], 1) == [20, 21]


@pytest.mark.parametrize("since_reset", [True, False])
def test_a_model_that_changes(source: ChunkSource, peer: Peer, since_reset: bool):
    """since_reset: all that was computed since the reset is of the new one, and goes on as that. Else nothing is stored
    until there is a reset. What the old one had is not found in either case."""
    held, stores = request(source, "a"), request(source, "b")
    lease = answered(source, peer, held, [5, 6, 7, 8])
    give_credits(source, peer, [20, 21, 22])
    assert store(source, stores, KEYS[4:5], 1) == [20]
    source.follow({0: OTHER}, since_reset)
    assert peer.numbers(4) == [lease] and peer.space() not in source.spaces
    assert source.lookup(KEYS[0], held) is RETRY  # asked anew
    assert peer.ask().keys[0] == (KEYS[0][:32], 0)
    all_report(source, 1)
    assert peer.stored() == [(KEYS[4][:32], 0, 20)] if since_reset else peer.numbers(7) == [20]
    assert store(source, request(source, "c"), KEYS[6:8], 2) == ([21, 22] if since_reset else [])
    source.follow({0: OTHER}, since_reset)  # said again
    assert source._number == (1 if since_reset else 2)


def test_a_model_that_comes_back_finds_its_chunks(source: ChunkSource, peer: Peer):
    source.follow({0: OTHER, 1: OTHER}, True)
    source.follow({0: MODEL, 1: MODEL}, True)
    assert peer.space() not in source.spaces and peer.space() in source.spaces


def test_what_cannot_be_known_is_private(source: ChunkSource, peer: Peer, caplog: pytest.LogCaptureFixture):
    give_credits(source, peer, [20, 21])
    source.follow({1: Identity(MODEL.digest, "a hook is on it")}, True)
    peer.space()
    context = request(source, "a")
    source.prefetch(context)
    assert source.lookup(KEYS[0], context) is MISS and store(source, context, KEYS[:2], 1) == []
    assert "a hook is on it" in caplog.text and peer.nothing()


def test_a_load_that_failed_is_computed(source: ChunkSource, peer: Peer):
    context = request(source, "a")
    answered(source, peer, context, [5, 6, 7, 8])
    source.scheduled([], {1: load_of(source, context, KEYS[:4])}, {})
    source.failed(["a", "of nobody"])
    assert source.lookup(KEYS[0], context) is MISS


def test_what_is_not_held_is_no_chunk(source: ChunkSource, peer: Peer):
    context = request(source, "a")
    answered(source, peer, context, [5, COMING, ABSENT, 8])
    assert source.prepare_load(KEYS[:5], context).block_ids.tolist() == [5, -1, -1, 8, -1]


def test_while_the_daemon_is_silent(source: ChunkSource, peer: Peer, monkeypatch: pytest.MonkeyPatch):
    """What is held is a hit, all else is not; nothing is asked or stored. Then all is as before."""
    monkeypatch.setattr(chunks, "short_of_processors", lambda: False)
    holds, late, new = request(source, "a"), request(source, "b"), request(source, "c")
    answered(source, peer, holds, [5, COMING, ABSENT, ABSENT])
    give_credits(source, peer, [20, 21])
    monkeypatch.setattr(chunks, "SILENT_SECONDS", 0.02)
    source.prefetch(late)
    ask = peer.ask()
    until(lambda: source.client.silent)
    assert not source.waits("b") and source.lookup(KEYS[0], late) is MISS
    assert [source.lookup(key, holds) for key in KEYS[:3]] == [HIT, MISS, MISS]
    source.prefetch(new)
    assert source.lookup(KEYS[0], new) is MISS and store(source, new, KEYS[:2], 1) == []
    peer.held(ask, [5, 6, 7, 8])
    until(lambda: not source.client.silent)
    assert source.lookup(KEYS[3], late) is HIT and store(source, new, KEYS[:2], 1) == [20, 21]


def test_when_the_daemon_has_ended(source: ChunkSource, peer: Peer):
    """A load of what it held goes on: the memory stays. Nothing else is asked, nothing raises."""
    context, other = request(source, "a"), request(source, "b")
    answered(source, peer, context, [5, COMING, ABSENT, ABSENT])
    peer.link.close()
    until(lambda: source.client.gone)
    assert [source.lookup(key, context) for key in KEYS[:3]] == [HIT, MISS, MISS]
    source.scheduled([], {1: load_of(source, context, KEYS[:1])}, {})
    all_report(source, 1)
    assert source.lookup(KEYS[0], other) is MISS and store(source, other, KEYS[:2], 1) == []
    source.reset(used_blocks=0)
    source.shutdown()


@pytest.mark.parametrize("under_way", [True, False])
def test_an_engine_that_ends_says_whether_nobody_copies(source: ChunkSource, peer: Peer, under_way: bool):
    give_credits(source, peer, [20, 21])
    store(source, request(source, "a"), KEYS[:2], 1)
    if not under_way:
        all_report(source, 1)
        peer.stored()
    source.shutdown()
    assert under_way or peer.take(8)
    assert peer.link.recv(1) == b""


def test_a_reset_before_the_workers_are_known(peer: Peer):
    thread = threading.Thread(target=lambda: (peer.accept(), peer.welcome()))
    thread.start()
    link = ChunkLink(peer.path, role=SCHEDULER, row_bytes=ROW, engine="e", client_name="t")
    made: Any = ChunkSource(ChunkClient(link), 1)
    thread.join()
    context = request(made, "a")
    made.prefetch(context)
    assert made.lookup(KEYS[0], context) is MISS and made.reset(0)
    assert store(made, context, KEYS[:1], 1) == [] and peer.nothing()
    made.shutdown()
