# SPDX-License-Identifier: Apache-2.0
"""A program in a pseudo terminal, and what a person in front of it would see."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import termios
import time

import pyte

DEADLINE_S = 30


class Screen:
    def __init__(self, command: list[str], columns: int = 80, rows: int = 24, **env: str) -> None:
        self.screen = pyte.Screen(columns, rows)
        self.stream = pyte.ByteStream(self.screen)
        self.said = b""
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execve(command[0], command, {**os.environ, "TERM": "xterm-256color", **env})
        self.resize(columns, rows)
        self.status: int | None = None

    def resize(self, columns: int, rows: int) -> None:
        self.screen.resize(rows, columns)
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self.fd, keys.encode())

    def read(self, wait_s: float) -> bool:
        """False at the end."""
        ready, _, _ = select.select([self.fd], [], [], wait_s)
        if not ready:
            return True
        try:
            said = os.read(self.fd, 65536)
        except OSError:  # the program ended
            return False
        # pyte does not know alternate screens; its own is all that this one has.
        self.said += said
        self.stream.feed(said)
        return bool(said)

    @property
    def text(self) -> str:
        return "\n".join(self.screen.display)

    def wait_for(self, *words: str, gone: tuple[str, ...] = ()) -> str:
        """What is shown, once all of `words` and none of `gone` are."""
        end = time.monotonic() + DEADLINE_S
        while not all(word in self.text for word in words) or any(word in self.text for word in gone):
            assert time.monotonic() < end, f"wanted {words} and not {gone}:\n{self.text}"
            assert self.read(0.1), f"it ended before {words}:\n{self.text}"
        return self.text

    def wait_until(self, done) -> str:
        end = time.monotonic() + DEADLINE_S
        while not done(self.text):
            assert time.monotonic() < end, self.text
            assert self.read(0.1), f"it ended:\n{self.text}"
        return self.text

    def modes(self) -> int:
        """The terminal's local modes."""
        return termios.tcgetattr(self.fd)[3]

    def wait_end(self) -> int:
        """The status that waitpid gives."""
        end = time.monotonic() + DEADLINE_S
        while self.read(0.1):
            if self.status is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid != 0:
                    self.status = status
                    break
            assert time.monotonic() < end, f"it does not end:\n{self.text}"
        if self.status is None:
            _, self.status = os.waitpid(self.pid, 0)
        while select.select([self.fd], [], [], 0)[0] and self.read(0):
            pass
        return self.status

    def close(self) -> None:
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.fd)
