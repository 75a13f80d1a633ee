# SPDX-License-Identifier: Apache-2.0
"""The daemon's end of the agent's socket (docs/mooncake.md, "Messages"), for tests and the benchmark."""
import mmap
import os
import pathlib
import socket
import struct
import subprocess
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
AGENT = ROOT / "integrations/mooncake_agent/agent.py"
FAKE = ROOT / "tests/fakes/mooncake_site"
EXIST, GET, PUT, REMOVE = range(1, 5)
MISS, TOO_SMALL, LATE = -704, -600, -1_000_001
PATIENCE_S = 60


class AgentLink:
    """An agent and its memory; killed at the end of `with`."""

    def __init__(self, python, master="127.0.0.1:50051", memory_bytes=64 << 20, env=None, arguments=()):
        self.memory_fd = os.memfd_create("agent")
        os.ftruncate(self.memory_fd, memory_bytes)
        self.memory = mmap.mmap(self.memory_fd, memory_bytes)
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(PATIENCE_S)
        command = [python, "-B", AGENT, "--socket", theirs.fileno(), "--memory", self.memory_fd,
                   "--bytes", memory_bytes, "--master", master, *arguments]
        self.process = subprocess.Popen([str(word) for word in command], stdin=subprocess.DEVNULL,
                                        pass_fds=(theirs.fileno(), self.memory_fd), env=env)
        theirs.close()
        self.calls = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.socket.close()

    def ready(self):
        """Whether it says so; False: it ended."""
        return self.socket.recv(16) == struct.pack("<IIQ", 0, 0, 1)

    def send(self, kind, entries, deadline_s=PATIENCE_S):
        """Entries: (name, offset, bytes). The call's number."""
        self.calls += 1
        deadline = time.monotonic_ns() + int(deadline_s * 1e9)
        parts = [struct.pack("<QQ64s", offset, size, name.encode()) for name, offset, size in entries]
        self.socket.send(struct.pack("<IIQQ", kind, len(entries), self.calls, deadline) + b"".join(parts))
        return self.calls

    def answer(self):
        """Number and results of the next answer."""
        message = self.socket.recv(16 + 8 * 512)
        _, count, call = struct.unpack_from("<IIQ", message)
        return call, list(struct.unpack_from(f"<{count}q", message, 16))

    def call(self, kind, entries):
        number = self.send(kind, entries)
        answered, results = self.answer()
        assert answered == number
        return results
