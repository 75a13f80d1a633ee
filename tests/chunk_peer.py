# SPDX-License-Identifier: Apache-2.0
"""A scripted peer of kvstrata.chunks: the daemon's end of PATH.chunks, which says what a test has it say."""

from __future__ import annotations

import os
import pathlib
import socket
import struct
from typing import NamedTuple

PATIENCE = 30.0  # seconds for a packet that must come
REGION, ROW, EPOCH = 1 << 20, 4096, 7


class Ask(NamedTuple):
    lease: int
    first: int
    keys: list[tuple[bytes, int]]


class Peer:
    """One connection at a time. path: what a client is given as the daemon's socket."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.path = str(folder / "kvstratad.sock")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"{self.path}.chunks")
        self._listener.listen(8)
        self._listener.settimeout(PATIENCE)
        self.region = os.memfd_create("region")
        os.ftruncate(self.region, REGION)
        self.hello = b""

    def accept(self) -> None:
        self.link, _ = self._listener.accept()
        self.link.settimeout(PATIENCE)
        self.hello = self.link.recv(65536)

    def welcome(self) -> None:
        socket.send_fds(self.link, [struct.pack("<IIQQQ", 101, 1, EPOCH, REGION, ROW)], [self.region])

    def refuse(self, code: int, reason: bytes, message: bytes) -> None:
        self.link.send(struct.pack("<Ii48s456s", 102, code, reason, message))
        self.link.close()

    def take(self, kind: int) -> bytes:
        """The next packet, which must be of this kind; what follows its header of 8 bytes."""
        packet = self.link.recv(65536)
        assert packet and struct.unpack_from("<I", packet)[0] == kind, (kind, packet[:64])
        return packet[4:]

    def nothing(self) -> bool:
        """Whether no packet lies there. Call it behind something that the client said last."""
        self.link.setblocking(False)
        try:
            return not self.link.recv(65536, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        finally:
            self.link.settimeout(PATIENCE)

    def ask(self) -> Ask:
        packet = self.take(3)
        lease, first, count = struct.unpack_from("<III", packet)
        return Ask(lease, first, [struct.unpack_from("<32sI", packet, 12 + 36 * at) for at in range(count)])

    def held(self, ask: Ask, ids: list[int]) -> None:
        self.link.send(struct.pack(f"<IIII{len(ids)}i", 103, ask.lease, ask.first, len(ids), *ids))

    def arrived(self, lease: int, chunks: dict[int, int]) -> None:
        pairs = b"".join(struct.pack("<Ii", *pair) for pair in chunks.items())
        self.link.send(struct.pack("<III", 104, lease, len(chunks)) + pairs)

    def credits(self, ids: list[int]) -> None:
        self.link.send(struct.pack(f"<II{len(ids)}i", 105, len(ids), *ids))

    def numbers(self, kind: int) -> list[int]:
        """Numbers in a packet that is a list: of RELEASE, WANT (its count), RETURN."""
        packet = self.take(kind)
        count, = struct.unpack_from("<I", packet)
        return [count] if kind == 5 else list(struct.unpack_from(f"<{count}i", packet, 4))

    def stored(self) -> list[tuple[bytes, int, int]]:
        packet = self.take(6)
        count, = struct.unpack_from("<I", packet)
        return [struct.unpack_from("<32sIi", packet, 4 + 40 * at) for at in range(count)]

    def space(self) -> bytes:
        return self.take(2)[4:]

    def close(self) -> None:
        self._listener.close()
        os.close(self.region)
