# SPDX-License-Identifier: Apache-2.0
"""A redis-server of one's own on loopback, of no cluster, that keeps nothing on disk; and commands for it."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator

DEADLINE_S = 60


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Redis:
    def __init__(self, port: int) -> None:
        self.port, self.address = port, f"127.0.0.1:{port}"
        self.pid = 0

    def ask(self, *words: bytes) -> bytes:
        """What it answers, as far as it came at once; for commands with short answers."""
        request = b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)
        with socket.create_connection(("127.0.0.1", self.port), DEADLINE_S) as s:
            s.sendall(request)
            return s.recv(65536)

    def get(self, name: bytes) -> bytes:
        """A value, whole."""
        with socket.create_connection(("127.0.0.1", self.port), DEADLINE_S) as s, s.makefile("rb") as answer:
            s.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(name), name))
            size = int(answer.readline()[1:])
            assert size >= 0, f"redis-server has no {name!r}"
            return answer.read(size)


@contextlib.contextmanager
def redis_server() -> Iterator[Redis]:
    redis = Redis(free_port())
    # Debian's redis-tools has the server's program under another name.
    program = shutil.which("redis-server") or shutil.which("redis-check-rdb")
    with subprocess.Popen(["redis-server", "--port", str(redis.port), "--bind", "127.0.0.1", "--save", "", "--appendonly",
                           "no"], executable=program, stdout=subprocess.DEVNULL) as server:
        redis.pid = server.pid
        try:
            end = time.monotonic() + DEADLINE_S
            while True:
                with contextlib.suppress(OSError):
                    redis.ask(b"PING")
                    break
                assert time.monotonic() < end, f"redis-server does not listen on {redis.port}"
            yield redis
        finally:
            server.kill()
