# SPDX-License-Identifier: Apache-2.0
"""An adapter's session over restarts of the daemon."""

from __future__ import annotations

import pathlib
import signal

import kvstrata
import pytest
from kvstrata.attachment import Attachment, ended_by
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


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
def test_ask_is_on_the_daemon_that_is_there(socket: str, by: signal.Signals):
    attachment = Attachment(socket, "pytest", register)
    with Daemon(socket=socket) as daemon:
        first, _ = attachment.now()
        assert attachment.ask(lambda session, model: session.lookup(model, IDS, "full").held) == 0
        end(daemon, by)
    with Daemon(socket=socket):
        sequence = attachment.ask(lambda session, model, ids: session.open(model, "full", ids), IDS)
        assert attachment.is_now(sequence.session) and not attachment.is_now(first)
        assert sequence.tokens == 0


def test_without_a_daemon_it_says_so(socket: str):
    attachment = Attachment(socket, "pytest", register)
    with Daemon(socket=socket):
        attachment.now()
    with pytest.raises(kvstrata.Unavailable, match="DAEMON_UNREACHABLE.*KVSTRATA_SOCKET, or `socket`"):
        attachment.ask(lambda session, model: session.lookup(model, IDS, "full"))


def test_asks_at_most_twice(socket: str):
    asked: list[kvstrata.Session] = []

    def ask(session: kvstrata.Session, model: kvstrata.Model) -> None:
        asked.append(session)
        raise kvstrata.Unavailable("as if", "DAEMON_GONE")

    with Daemon(socket=socket), pytest.raises(kvstrata.Unavailable, match="DAEMON_GONE"):
        Attachment(socket, "pytest", register).ask(ask)
    assert len(asked) == 2 and asked[0] is not asked[1]


def test_other_errors_keep_the_session(socket: str):
    attachment = Attachment(socket, "pytest", register)
    with Daemon(socket=socket):
        session, _ = attachment.now()
        with pytest.raises(kvstrata.InvalidArgument):
            attachment.ask(lambda session, model: session.open(model, "no plan{", IDS))
        assert attachment.now()[0] is session


def test_lets_go_of_the_one_that_is_named(socket: str):
    attachment = Attachment(socket, "pytest", register)
    with Daemon(socket=socket):
        old, _ = attachment.now()
        assert attachment.let_go(old) is old
        new, _ = attachment.now()
        assert attachment.let_go(old) is None and attachment.now()[0] is new


@pytest.mark.parametrize("error", [kvstrata.Unavailable("no answer", "DAEMON_GONE"),
                                   kvstrata.NotFound("it has no pages", "SEQUENCE_LOST")])
def test_a_request_that_the_daemon_ended_may_be_sent_again(error: kvstrata.KvstrataError):
    assert ended_by(error) == f"kvstratad ended or was restarted; send the request again ({error})"


def test_a_request_that_cannot_be_served_is_told_why():
    error = kvstrata.ResourceExhausted("4096 tokens; 512 fit", "POOL_EXHAUSTED")
    assert ended_by(error) == "kvstratad: POOL_EXHAUSTED: 4096 tokens; 512 fit"
