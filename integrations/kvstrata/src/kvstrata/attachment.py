# SPDX-License-Identifier: Apache-2.0
"""An adapter's session and its model in it, attached anew once the daemon has gone.

A daemon that ended while nobody asked it anything leaves a session behind that looks as ever. Whoever begins something
on it (a look-up, an open) asks by `ask`: it finds that out, and asks the daemon that is there now. What had a sequence
is not asked again: that one is gone. Threads: any.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any, TypeVar

from .errors import KvstrataError, Unavailable
from .session import Model, Session

_Result = TypeVar("_Result")

# Why a request ends of which nothing was wrong: what the daemon had of it went with the daemon.
_ENDED = ("DAEMON_GONE", "SEQUENCE_LOST")


def ended_by(error: KvstrataError) -> str:
    """What whoever sent a request is told when it ends with this error: where the request itself is fine, to send it
    again."""
    if error.reason in _ENDED:
        return f"kvstratad ended or was restarted; send the request again ({error})"
    return f"kvstratad: {error}"


class Attachment:
    """register: makes the model in a new session; what it raises is what `now` and `ask` raise. A session is closed
    when the last call in it is over and it is collected, or by whoever let go of it."""

    def __init__(self, socket: str | None, client_name: str, register: Callable[[Session], Model]) -> None:
        self._socket, self._client_name, self._register = socket, client_name, register
        self._lock = Lock()  # guards what follows
        self._attached: tuple[Session, Model] | None = None

    def now(self) -> tuple[Session, Model]:
        """Attaches if there is no session. Unavailable: there is no daemon; DeadlineExceeded: one that does not answer
        within an attach's time."""
        with self._lock:
            if self._attached is None:
                session = Session(self._socket, client_name=self._client_name)
                self._attached = session, self._register(session)
            return self._attached

    def is_now(self, session: Session) -> bool:
        """Whether it is the one of `now`; what was opened in another is gone, or was let go."""
        attached = self._attached
        return attached is not None and attached[0] is session

    def ask(self, run: Callable[..., _Result], *args: Any) -> _Result:
        """run(session, model, *args). Where its daemon is gone, once more in a new session: run opens what it needs."""
        session, model = self.now()
        try:
            return run(session, model, *args)
        except Unavailable as error:
            if error.reason != "DAEMON_GONE":
                raise
            self.let_go(session)
        return run(*self.now(), *args)

    def let_go(self, session: Session | None = None) -> Session | None:
        """The next call attaches anew. session: only if it is still that one. Returns what was let go of."""
        with self._lock:
            if self._attached is None or (session is not None and self._attached[0] is not session):
                return None
            (gone, _), self._attached = self._attached, None
            return gone
