# SPDX-License-Identifier: Apache-2.0
"""The way to the daemon: one session, with deadlines that a generate() can bear.

A daemon that is gone is noticed at once, and the next call attaches to the one that is there then. One that is stopped
or hangs answers nothing: a call waits for TIMEOUT_MS (GPU_TIMEOUT_MS where it may wait for what a GPU still computes),
and then nobody asks it for SILENT_SECONDS. Calls that may take longer than that in a daemon that works are repeated while
it answers a ping (`patient`). Threads: any.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import TypeVar

import torch
from kvstrata.errors import error_of

import kvstrata

TIMEOUT_MS, GPU_TIMEOUT_MS = 1000, 5000
SILENT_SECONDS = 5.0
# One call may take so long, over its repetitions: a prefix may come from a slow disk.
PATIENCE_SECONDS = 60.0

_T = TypeVar("_T")


class Link:
    """session: the last one. device: where it takes tensors, a GPU's if the daemon has pages there."""

    def __init__(self, socket: str | None, device: torch.device) -> None:
        self._socket, self._model_device = socket, device
        self._session: kvstrata.Session | None = None
        self._silent_until = 0.0
        self.device = torch.device("cpu")

    @property
    def session(self) -> kvstrata.Session | None:
        return self._session

    def reach(self) -> kvstrata.Session:
        """A session with a daemon that answers, anew if the last one is gone. Unavailable: there is none;
        DeadlineExceeded: it does not answer, or did not a moment ago."""
        if (wait := self._silent_until - monotonic()) > 0:
            raise error_of(4, "DEADLINE", f"kvstratad did not answer; it is asked again in {wait:.0f} s")
        try:
            if self._session is not None:
                try:
                    self._session.ping()
                    return self._session
                except kvstrata.Unavailable:
                    self._session.close()
                    self._session = None
            self._session, self.device = _attached(self._socket, self._model_device)
            return self._session
        except kvstrata.DeadlineExceeded:
            self.note_silence()
            raise

    def note_silence(self) -> None:
        """It did not answer: nobody asks for a while."""
        self._silent_until = monotonic() + SILENT_SECONDS

    def patient(self, call: Callable[[], _T]) -> _T:
        """The call's result, which is repeated after a deadline as long as the daemon answers a ping. For calls that may
        be made twice."""
        until = monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return call()
            except kvstrata.DeadlineExceeded:
                if self._session is None or monotonic() > until:
                    raise
                self._session.ping()  # DeadlineExceeded: it does not answer at all

    def aside(self, closes: list[Callable[[], None]]) -> None:
        """Makes calls that end something of a daemon that does not answer, on a thread of its own, until it does."""
        threading.Thread(target=_until_done, args=(closes,), name="kvstrata-close", daemon=True).start()

    def close(self) -> None:
        if self._session is not None:
            self._session.close()


def _attached(socket: str | None, device: torch.device) -> tuple[kvstrata.Session, torch.device]:
    """A session for a model on `device`, and where it takes tensors: there, if the daemon has pages on that GPU, else
    in host memory."""
    name = "transformers"
    if device.type == "cuda":
        uuid = str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")
        try:
            return kvstrata.attach(socket, client_name=name, timeout_ms=GPU_TIMEOUT_MS, device_uuid=f"GPU-{uuid}"), device
        except kvstrata.NotFound as error:
            if error.reason != "DEVICE_UNKNOWN":
                raise
    return kvstrata.attach(socket, client_name=name, timeout_ms=TIMEOUT_MS), torch.device("cpu")


def _until_done(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        while True:
            try:
                call()
            except kvstrata.DeadlineExceeded:
                continue  # that took its time
            except kvstrata.KvstrataError:
                pass  # the session's end closes it
            break
