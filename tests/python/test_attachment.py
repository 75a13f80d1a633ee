# SPDX-License-Identifier: Apache-2.0
"""An adapter's session over restarts of the daemon."""

from __future__ import annotations

import os
import pathlib
import signal
import threading
from concurrent.futures import Future
from typing import Any

import kvstrata
import pytest
from kvstrata import attachment
from kvstrata.attachment import PATIENCE, Attachment, Closer, Patience, ended_by
from kvstrata.daemon import Daemon

IDS = list(range(40))


def register(session: kvstrata.Session) -> kvstrata.Model:
    return session.register_model("m", "d", layers=1, query_heads=2, kv_heads=1, head_dim=64)


@pytest.fixture
def socket(tmp_path: pathlib.Path) -> str:
    return str(tmp_path / "kvstratad.sock")


def end(daemon: Daemon, by: signal.Signals) -> None:
    daemon.process.send_signal(by)
    daemon.process.wait()


def hang(daemon: Daemon) -> None:
    """Until SIGCONT it answers nothing."""
    daemon.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, daemon.process.pid, os.WSTOPPED | os.WNOWAIT)


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
def test_ask_is_on_the_daemon_that_is_there(socket: str, by: signal.Signals):
    attached = Attachment(socket, "pytest", register)
    with Daemon(socket=socket) as daemon:
        first, _ = attached.now()
        assert attached.ask(lambda session, model: session.lookup(model, IDS, "full").held) == 0
        end(daemon, by)
    with Daemon(socket=socket):
        sequence = attached.ask(lambda session, model, ids: session.open(model, "full", ids), IDS)
        assert attached.is_now(sequence.session) and not attached.is_now(first)
        assert sequence.tokens == 0


def test_without_a_daemon_it_says_so(socket: str):
    attached = Attachment(socket, "pytest", register)
    with Daemon(socket=socket):
        attached.now()
    with pytest.raises(kvstrata.Unavailable, match="DAEMON_UNREACHABLE.*KVSTRATA_SOCKET, or `socket`"):
        attached.ask(lambda session, model: session.lookup(model, IDS, "full"))


def test_asks_at_most_twice(socket: str):
    asked: list[kvstrata.Session] = []

    def ask(session: kvstrata.Session, model: kvstrata.Model) -> None:
        asked.append(session)
        raise kvstrata.Unavailable("as if", "DAEMON_GONE")

    with Daemon(socket=socket), pytest.raises(kvstrata.Unavailable, match="DAEMON_GONE"):
        Attachment(socket, "pytest", register).ask(ask)
    assert len(asked) == 2 and asked[0] is not asked[1]


def test_other_errors_keep_the_session(socket: str):
    attached = Attachment(socket, "pytest", register)
    with Daemon(socket=socket):
        session, _ = attached.now()
        with pytest.raises(kvstrata.InvalidArgument):
            attached.ask(lambda session, model: session.open(model, "no plan{", IDS))
        assert attached.now()[0] is session


def test_lets_go_of_the_one_that_is_named(socket: str):
    attached = Attachment(socket, "pytest", register)
    with Daemon(socket=socket):
        old, _ = attached.now()
        assert attached.let_go(old)
        new, _ = attached.now()
        assert not attached.let_go(old) and attached.now()[0] is new


@pytest.mark.parametrize("error", [kvstrata.Unavailable("no answer", "DAEMON_GONE"),
                                   kvstrata.NotFound("it has no pages", "SEQUENCE_LOST")])
def test_a_request_that_the_daemon_ended_may_be_sent_again(error: kvstrata.KvstrataError):
    assert ended_by(error) == f"kvstratad ended or was restarted; send the request again ({error})"


@pytest.mark.parametrize("error", [kvstrata.DeadlineExceeded("no answer", "DEADLINE"),
                                   kvstrata.Unavailable("no answer", "DAEMON_AWAY")])
def test_a_request_that_the_daemon_kept_waiting_may_be_sent_again(error: kvstrata.KvstrataError):
    assert ended_by(error) == f"kvstratad did not answer in time; send the request again ({error})"


def test_a_request_that_cannot_be_served_is_told_why():
    error = kvstrata.ResourceExhausted("4096 tokens; 512 fit", "POOL_EXHAUSTED")
    assert ended_by(error) == "kvstratad: POOL_EXHAUSTED: 4096 tokens; 512 fit"


# A daemon that does not answer

BUDGET_MS = 50


@pytest.fixture(autouse=True)
def plenty(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are processors enough, however busy the machine that tests run on."""
    monkeypatch.setattr(attachment, "short_of_processors", lambda: False)


@pytest.mark.parametrize("short", [False, True])
def test_a_call_is_made_again_where_processors_are_short(monkeypatch: pytest.MonkeyPatch, short: bool):
    calls: list[int] = []

    def late() -> str:
        calls.append(len(calls))
        if len(calls) < 4:
            raise kvstrata.DeadlineExceeded("no answer", "DEADLINE")
        return "done"

    monkeypatch.setattr(attachment, "short_of_processors", lambda: short)
    if short:
        assert attachment.insist(late, BUDGET_MS) == "done" and len(calls) == 4
        calls.clear()
        monkeypatch.setattr(attachment, "AGAIN", 2)
        with pytest.raises(kvstrata.DeadlineExceeded):
            attachment.insist(late, BUDGET_MS)
    else:
        with pytest.raises(kvstrata.DeadlineExceeded):
            attachment.insist(late, BUDGET_MS)
        assert len(calls) == 1


class Asked:
    """A look-up that counts how often it is asked for."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, session: kvstrata.Session, model: kvstrata.Model) -> int:
        self.times += 1
        return session.lookup(model, IDS, "full").held


def opened(session: kvstrata.Session, model: kvstrata.Model) -> kvstrata.Sequence:
    return session.open(model, "full", IDS)


def test_nobody_waits_again_for_a_daemon_that_hangs(socket: str):
    attached, asked = Attachment(socket, "pytest", register, BUDGET_MS), Asked()
    with Daemon(socket=socket) as daemon:
        session, _ = attached.start()
        hang(daemon)
        with pytest.raises(kvstrata.DeadlineExceeded):
            attached.ask(asked)
        assert not attached.is_now(session)
        for _ in range(3):
            with pytest.raises(kvstrata.Unavailable, match="DAEMON_AWAY"):
                attached.ask(asked)
        assert asked.times == 1
        daemon.process.send_signal(signal.SIGCONT)
        attached.start()  # the thread beside has got through
        assert attached.ask(asked) == 0 and asked.times == 2


def test_an_attach_waits_for_the_budget_once(socket: str):
    attached = Attachment(socket, "pytest", register, BUDGET_MS)
    with Daemon(socket=socket) as daemon:
        hang(daemon)
        for _ in range(3):
            with pytest.raises(kvstrata.Unavailable, match="DAEMON_AWAY"):
                attached.now()
        assert len([t for t in threading.enumerate() if t.name == "kvstrata-attach"]) == 1
        daemon.process.send_signal(signal.SIGCONT)
        attached.start()


def test_a_daemon_that_was_away_and_has_ended_is_said_to_be_gone(socket: str):
    attached = Attachment(socket, "pytest", register, BUDGET_MS)
    with Daemon(socket=socket) as daemon:
        attached.start()
        hang(daemon)
        with pytest.raises(kvstrata.DeadlineExceeded):
            attached.ask(Asked())
        end(daemon, signal.SIGKILL)
    with pytest.raises(kvstrata.Unavailable, match="DAEMON_UNREACHABLE"):
        attached.start()
    with Daemon(socket=socket):
        assert attached.ask(Asked()) == 0


def test_a_close_raises_nothing_and_waits_for_nobody(socket: str):
    """One that is not answered is found out by the next call, which does not wait."""
    attached, asked = Attachment(socket, "pytest", register, BUDGET_MS), Asked()
    with Daemon(socket=socket) as daemon:
        attached.start()
        sequence = attached.ask(opened)
        hang(daemon)
        attached.close([sequence])
        attached.settle()
        with pytest.raises(kvstrata.Unavailable, match="DAEMON_AWAY"):
            attached.ask(asked)
        assert asked.times == 0
        daemon.process.send_signal(signal.SIGCONT)
        attached.start()
        assert attached.ask(asked) == 0


def test_settled_is_closed(socket: str):
    """Under a limit of one sequence a second one can be opened behind the first."""
    attached = Attachment(socket, "pytest", register)
    with Daemon("--set", "limits.sequences=1", socket=socket):
        for _ in range(20):
            sequence = attached.ask(opened)
            attached.close([sequence])
            del sequence
            attached.settle()


def test_what_was_registered_before_a_change_is_not_attached(socket: str):
    """let_go while an attach is under way: it registers again."""
    seen: list[int] = []
    meanwhile: list[Any] = []

    def changing(session: kvstrata.Session) -> kvstrata.Model:
        seen.append(len(seen))
        if len(seen) == 1:
            meanwhile.append(attached.let_go())
        return register(session)

    attached = Attachment(socket, "pytest", changing)
    with Daemon(socket=socket):
        attached.now()
    assert seen == [0, 1] and meanwhile == [False]


def test_what_register_raises_is_raised(socket: str):
    def refuse(session: kvstrata.Session) -> kvstrata.Model:
        raise ValueError("not this one")

    with Daemon(socket=socket), pytest.raises(ValueError, match="not this one"):
        Attachment(socket, "pytest", refuse).now()


class Noted:
    """Closes when it may, and notes that it did."""

    def __init__(self, order: list[str], name: str, error: kvstrata.KvstrataError | None = None) -> None:
        self.order, self.name, self.error = order, name, error
        self.may = threading.Event()

    def close(self) -> None:
        assert self.may.wait(60)
        self.order.append(self.name)
        if self.error:
            raise self.error


def test_closes_in_order_and_tells_of_errors():
    order: list[str] = []
    failed: list[tuple[Any, kvstrata.KvstrataError]] = []
    closer = Closer(lambda closeable, error: failed.append((closeable, error)), BUDGET_MS)
    error = kvstrata.DeadlineExceeded("no answer", "DEADLINE")
    a, b, c = Noted(order, "a"), Noted(order, "b", error), Noted(order, "c")
    closer.close(a, b)
    closer.close(c)
    assert not closer.settle(0) and order == []
    for noted in (c, b, a):
        noted.may.set()
    assert closer.settle(60) and order == ["a", "b", "c"] and failed == [(b, error)]
    again = Noted(order, "d")
    again.may.set()
    closer.close(again)
    assert closer.settle(60) and order[-1] == "d"


class Clock:
    """A machine on which every wait lasts until its end, and nothing else takes time."""

    def __init__(self) -> None:
        self.now, self.waits = 1000.0, 0.0

    def monotonic(self) -> float:
        return self.now

    def wait(self, futures: list[Future[Any]], seconds: float) -> tuple[set[Any], set[Any]]:
        self.now, self.waits = self.now + seconds, self.waits + seconds
        return set(), set(futures)


@pytest.mark.parametrize("asking", [1, 8, 64])
def test_a_step_waits_for_answers_once(monkeypatch: pytest.MonkeyPatch, asking: int):
    """However many requests ask."""
    clock = Clock()
    monkeypatch.setattr(attachment, "wait", clock.wait)
    monkeypatch.setattr(attachment, "time", clock)
    patience = Patience()
    for _ in range(3):
        patience.renew()
        clock.waits = 0.0
        assert not any(patience.wait(Future()) for _ in range(asking))
        assert 0 < clock.waits <= PATIENCE * 1.001
