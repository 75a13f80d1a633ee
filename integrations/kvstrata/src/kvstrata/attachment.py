# SPDX-License-Identifier: Apache-2.0
"""An adapter's session and its model in it, attached anew once the daemon has gone or has not answered in time.

A daemon that ended while nobody asked it anything leaves a session behind that looks as ever. Whoever begins something
on it (a look-up, an open) asks by `ask`: it finds that out, and asks the daemon that is there now. What had a sequence
is not asked again: that one is gone.

A daemon that hangs must not hold up an engine. So every call in the session waits for a budget at most. After the first
one that waited in vain the daemon is taken for absent: calls raise DAEMON_AWAY at once, and a thread beside asks it
until it answers. Sequences and sessions are closed on a thread beside, too. On a machine that is short of processors
whoever is to answer may not have been given one: there a call is made again, AGAIN times, before that. Threads: any.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from threading import Condition, Lock, Thread
from typing import Any, Protocol, TypeVar

from .errors import DeadlineExceeded, KvstrataError, Unavailable, error_of
from .session import Model, Sequence, Session

_Result = TypeVar("_Result")

CALL_MS = 5000  # what a call waits that holds up nobody
ENGINE_MS = 15  # what a call on an engine's thread waits
AGAIN = 15
_SECOND_MS = 1000
_SHORT_OF_CPUS = 60.0  # percent of the last 10 s in which some process waited for a processor
_ATTACH_MS = 250  # what it waits for an attach, where the last session's daemon has ended
PATIENCE = 0.002  # seconds that a step waits for answers from beside; one from memory takes half a millisecond
_RENEWAL = 0.02
START_SECONDS = 5.0  # an engine that starts waits so long
# Seconds between attaches to a daemon that does not answer; the last again and again.
_PAUSES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)

# Why a request ends of which nothing was wrong: what the daemon had of it went with the daemon.
_ENDED = ("DAEMON_GONE", "SEQUENCE_LOST")
_SILENT = ("DAEMON_AWAY", "DEADLINE")


def ended_by(error: KvstrataError) -> str:
    """What whoever sent a request is told when it ends with this error: where the request itself is fine, to send it
    again."""
    if error.reason in _ENDED:
        return f"kvstratad ended or was restarted; send the request again ({error})"
    if error.reason in _SILENT:
        return f"kvstratad did not answer in time; send the request again ({error})"
    return f"kvstratad: {error}"


def short_of_processors() -> bool:
    """Whether this machine is, by the kernel's pressure stall information, else by its load."""
    try:
        with open("/proc/pressure/cpu") as file:
            return float(file.readline().split("avg10=")[1].split()[0]) > _SHORT_OF_CPUS
    except (OSError, IndexError, ValueError):
        return os.getloadavg()[0] > 4 * (os.cpu_count() or 1)


def insist(call: Callable[[], _Result], budget_ms: int) -> _Result:
    """call(); where it waited in vain on a machine that is short of processors, again. It must be one that may be made
    twice. budget_ms: of its session; one that waited for seconds has waited long enough."""
    for _ in range(AGAIN if budget_ms < _SECOND_MS else 0):
        try:
            return call()
        except DeadlineExceeded:
            if not short_of_processors():
                raise
    return call()


class Patience:
    """What an engine's step waits for answers from beside, however many requests ask: PATIENCE in all."""

    def __init__(self) -> None:
        self._left, self._renewed = PATIENCE, time.monotonic()

    def renew(self) -> None:
        """The next step begins. Where nothing is scheduled there are no steps, and it is renewed after a while."""
        self._left, self._renewed = PATIENCE, time.monotonic()

    def wait(self, asked: Future[Any]) -> bool:
        """Waits for what is left; whether there is an answer."""
        begin = time.monotonic()
        if begin - self._renewed > _RENEWAL:
            self.renew()
        done, _ = wait([asked], self._left)
        self._left = max(0.0, self._left - (time.monotonic() - begin))
        return bool(done)


class Closeable(Protocol):
    def close(self) -> None: ...


class Closer:
    """Closes in order, on a thread of its own that lives while there is something to close. failed: is told on that
    thread what a close raised. budget_ms: what a close waits for the daemon."""

    def __init__(self, failed: Callable[[Closeable, KvstrataError], None], budget_ms: int) -> None:
        self._failed, self._budget_ms = failed, budget_ms
        self._changed = Condition()  # guards what follows
        self._waiting: deque[Closeable] = deque()
        self._running = False

    def close(self, *closeables: Closeable) -> None:
        """Returns at once. The last references should be these: what is collected elsewhere is closed there."""
        with self._changed:
            self._waiting.extend(closeables)
            if self._waiting and not self._running:
                self._running = True
                Thread(target=self._run, name="kvstrata-close", daemon=True).start()

    def settle(self, seconds: float, unless: Callable[[], bool] = lambda: False) -> bool:
        """Waits until all is closed; whether it is. unless: ends the wait, where a close that failed made it true."""
        with self._changed:
            self._changed.wait_for(lambda: not self._running or unless(), seconds)
            return not self._running

    def _run(self) -> None:
        while (closeable := self._next()) is not None:
            try:
                insist(closeable.close, self._budget_ms)
            except KvstrataError as error:
                self._failed(closeable, error)
                with self._changed:
                    self._changed.notify_all()
            del closeable  # collected on this thread

    def _next(self) -> Closeable | None:
        with self._changed:
            if self._waiting:
                return self._waiting.popleft()
            self._running = False
            self._changed.notify_all()
            return None


class _Dropped:
    """A session that others may still have calls in: it is closed when it is collected."""

    def __init__(self, session: Session) -> None:
        self._session: Session | None = session

    def close(self) -> None:
        self._session = None


@dataclass(eq=False)
class _Attempt:
    """To attach, on a thread of its own, until it has succeeded or there is nothing to attach to. outdated: what is
    registered has changed since it began."""

    attached: tuple[Session, Model] | None = None
    error: Exception | None = None
    outdated: bool = False


class Attachment:
    """register: makes the model in a new session; what it raises is what `now` and `ask` raise. It runs on a thread
    beside. budget_ms: what a call in the session waits for the daemon."""

    def __init__(self, socket: str | None, client_name: str, register: Callable[[Session], Model],
                 budget_ms: int = CALL_MS) -> None:
        self._socket, self._client_name, self._register = socket, client_name, register
        self.budget_ms = budget_ms
        self._changed = Condition(Lock())  # guards what follows
        self._attached: tuple[Session, Model] | None = None
        self._attempt: _Attempt | None = None
        self._away = False  # it has kept somebody waiting, and has not answered since
        self._closer = Closer(self._close_failed, budget_ms)

    def start(self) -> tuple[Session, Model]:
        """`now` of an engine that starts: waits for START_SECONDS, whatever the budget."""
        until = time.monotonic() + START_SECONDS
        with self._changed:
            attempt = self._attempt_to_attach()
            self._changed.wait_for(lambda: attempt.attached or attempt.error, until - time.monotonic())
            return self._outcome(attempt)

    def now(self) -> tuple[Session, Model]:
        """Attaches if there is no session. Unavailable: there is no daemon, or (DAEMON_AWAY) one that does not
        answer."""
        attached = self._attached
        if attached is not None:
            return attached
        with self._changed:
            attempt = self._attempt_to_attach()
            if not self._away:
                self._changed.wait_for(lambda: attempt.attached or attempt.error,
                                       max(_ATTACH_MS, self.budget_ms) / 1000)
            return self._outcome(attempt)

    def is_now(self, session: Session) -> bool:
        """Whether it is the one of `now`; what was opened in another is gone, or was let go."""
        attached = self._attached
        return attached is not None and attached[0] is session

    def ask(self, run: Callable[..., _Result], *args: Any) -> _Result:
        """run(session, model, *args). Where its daemon is gone, once more in a new session: run opens what it needs.
        DeadlineExceeded, Unavailable: it does not answer, or there is none."""
        asked_before = False
        while True:
            session, model = self.now()
            try:
                return self.insist(lambda: run(session, model, *args))  # noqa: B023; called before the next turn
            except KvstrataError as error:
                self.lost(session, error)
                if asked_before or error.reason != "DAEMON_GONE":
                    raise
            asked_before = True

    def insist(self, call: Callable[[], _Result]) -> _Result:
        """call(), which is one of the session, as `ask` makes it: again where processors are short."""
        return insist(call, self.budget_ms)

    def lost(self, session: Session, error: KvstrataError) -> bool:
        """Whether the session is over by what a call in it raised; then it is let go. If it waited in vain, nobody
        waits again until the daemon has answered."""
        late = isinstance(error, DeadlineExceeded)
        if not late and not isinstance(error, Unavailable):
            return False
        if self.let_go(session) and late:
            with self._changed:
                self._away = True
                self._attempt_to_attach()
        return True

    def let_go(self, session: Session | None = None) -> bool:
        """The next call attaches anew; whether there was something to let go of. session: only if it is still that one.
        It is closed when the last call in it is over and it is collected."""
        with self._changed:
            if self._attempt is not None and session is None:
                self._attempt.outdated = True
            if self._attached is None or (session is not None and self._attached[0] is not session):
                return False
            (gone, _), self._attached = self._attached, None
        self._closer.close(_Dropped(gone))
        return True

    def close(self, closeables: Iterable[Closeable]) -> None:
        """Closes sequences, and sessions that were let go of, beside and in this order. Those of a session that is
        closed cost nothing more."""
        self._closer.close(*closeables)

    def settle(self) -> None:
        """Waits until what was passed to `close` is closed, so that its pages are free: until a close was not answered,
        or for two budgets at most."""
        if (attached := self._attached) is not None:
            self._closer.settle(2 * self.budget_ms / 1000, lambda: not self.is_now(attached[0]))

    # On threads beside

    def _attempt_to_attach(self) -> _Attempt:
        """The one that is under way, or a new one; one that is over where there is a session. The lock is held."""
        if self._attached is not None:
            return _Attempt(self._attached)
        if self._attempt is None:
            self._attempt = _Attempt()
            Thread(target=self._attach, args=(self._attempt,), name="kvstrata-attach", daemon=True).start()
        return self._attempt

    def _outcome(self, attempt: _Attempt) -> tuple[Session, Model]:
        if attempt.attached is not None:
            return attempt.attached
        if isinstance(attempt.error, KvstrataError):  # several callers raise it
            raise error_of(attempt.error.code, attempt.error.reason, attempt.error.message)
        if attempt.error is not None:
            raise attempt.error
        self._away = True
        raise error_of(14, "DAEMON_AWAY", "the daemon does not answer; it is asked again in the background: see "
                       "whether it runs (kvstrata health), and its log")

    def _attach(self, attempt: _Attempt) -> None:
        for pause in itertools.chain(_PAUSES, itertools.repeat(_PAUSES[-1])):
            if self._try(attempt):
                return
            time.sleep(pause)

    def _try(self, attempt: _Attempt) -> bool:
        """Whether the attempt is over."""
        while True:
            attempt.outdated = False
            attached, error = None, None
            try:
                session = Session(self._socket, client_name=self._client_name, timeout_ms=self.budget_ms)
                attached = session, self._register(session)
            except DeadlineExceeded:
                return False
            except Exception as raised:  # noqa: BLE001; the caller of `now` raises it
                error = raised
            with self._changed:
                if attempt.outdated:
                    continue
                self._attached = attempt.attached = attached
                attempt.error, self._attempt, self._away = error, None, False
                self._changed.notify_all()
                return True

    def _close_failed(self, closeable: Closeable, error: KvstrataError) -> None:
        if isinstance(closeable, Sequence):
            self.lost(closeable.session, error)
