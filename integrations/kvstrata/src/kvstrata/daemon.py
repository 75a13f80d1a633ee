# SPDX-License-Identifier: Apache-2.0
"""A private kvstratad: started on a socket of its own, waited for, stopped.

    with Daemon() as daemon:
        session = kvstrata.attach(daemon.socket)

The binary is KVSTRATAD, build/bin/kvstratad of a source tree around this package, or PATH's.
"""

from __future__ import annotations

import os
import pathlib
import select
import shutil
import signal
import subprocess
import tempfile

from .errors import error_of

_READY_SECONDS = 30
_STOP_SECONDS = 30  # it writes for shutdown.write_timeout


def default_socket() -> str:
    """Where kvstratad listens when nobody says otherwise; the library's rule."""
    if path := os.environ.get("KVSTRATA_SOCKET"):
        return path
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return f"{runtime}/kvstrata/kvstratad.sock"
    if os.geteuid() == 0:
        return "/run/kvstrata/kvstratad.sock"
    return f"/tmp/kvstrata-{os.geteuid()}/kvstratad.sock"


def find_daemon() -> str:
    if given := os.environ.get("KVSTRATAD"):
        return given
    for parent in pathlib.Path(__file__).resolve().parents:
        path = parent / "build" / "bin" / "kvstratad"
        if path.exists():
            return str(path)
    if path := shutil.which("kvstratad"):
        return path
    raise error_of(5, "DAEMON_MISSING", "kvstratad was not found; build it (make build), put it on PATH, "
                   "or set KVSTRATAD")


def _dies_with_us() -> list[str]:
    """A prefix that has the kernel stop the daemon should we be killed; util-linux's, where it is there."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "TERM", "--"] if setpriv else []


class Daemon:
    """Owns the process and its folder; both are gone after stop(), or when the starting thread ends.

    socket: its path; None: in the folder.
    """

    def __init__(self, *arguments: str, binary: str | None = None, socket: str | None = None,
                 environment: dict[str, str] | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvstrata-")
        self.socket = socket or os.path.join(self._folder.name, "kvstratad.sock")
        self.log = os.path.join(self._folder.name, "log")
        ready, ready_write = os.pipe()
        command = [*_dies_with_us(), binary or find_daemon(), "--socket", self.socket,
                   "--ready-fd", str(ready_write), *arguments]
        try:
            with open(self.log, "wb") as log:
                self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                                                pass_fds=[ready_write],
                                                env={**os.environ, **(environment or {})})
        except OSError as error:
            os.close(ready)
            self._folder.cleanup()
            raise error_of(14, "DAEMON_FAILED", f"{command[0]} cannot be started: {error}") from error
        finally:
            os.close(ready_write)
        self._wait_ready(ready)

    def _wait_ready(self, ready: int) -> None:
        try:
            seen, _, _ = select.select([ready], [], [], _READY_SECONDS)
            if seen and os.read(ready, 1):
                return
        finally:
            os.close(ready)
        why = "was not ready in time" if self.process.poll() is None else "ended at once"
        said = self.said()
        self.stop()
        raise error_of(14, "DAEMON_FAILED", f"kvstratad {why}; it said:\n{said}")

    def said(self) -> str:
        """The end of its log."""
        with open(self.log, errors="replace") as log:
            return log.read()[-4000:]

    def stop(self) -> int | None:
        """SIGTERM, then SIGKILL after a while. The exit code; None when it was stopped before."""
        if not os.path.isdir(self._folder.name):
            return None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._folder.cleanup()
        return self.process.returncode

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
