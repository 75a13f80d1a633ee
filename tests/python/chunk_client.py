# SPDX-License-Identifier: Apache-2.0
"""A client of PATH.chunks for tests: packets by `socket` and `struct` (proto/chunk_messages.h), so that what it says is
exactly what a test means."""

from __future__ import annotations

import array
import mmap
import os
import socket
import struct

MAGIC, VERSION = 0x4B56434B, 1
HELLO, SPACE, ASK, RELEASE, WANT, STORED, RETURN, DETACH, RECALLED = range(1, 10)
WELCOME, REFUSED, HELD, ARRIVED, CREDITS, RECALL = range(101, 107)
NOT_THERE, COMING = -1, -2
SECONDS = 30  # that a packet may take


class Refused(Exception):
    """code, reason and message of a REFUSED."""


def hello(row_bytes: int, *, engine: str = "engine", role: int = 0, version: int = VERSION, magic: int = MAGIC) -> bytes:
    return struct.pack("<IIIIQ64s64s", HELLO, magic, version, role, row_bytes, engine.encode(), b"pytest")


def key(number: int, group: int = 0) -> bytes:
    return struct.pack("<Q24xI", number, group)


def recalled(*layers: tuple[int, int, float, float, float], plan: bytes = b"quest", model: bytes = b"m") -> bytes:
    """layers: layer, samples, recall, least and error."""
    return struct.pack("<II128s120s", RECALLED, len(layers), plan, model) + b"".join(
        struct.pack("<IIfff", *layer) for layer in layers)


class ChunkClient:
    """One connection, welcome when it is made; `region` is the mapping. Raises Refused."""

    def __init__(self, path: str, row_bytes: int, *, engine: str = "engine", role: int = 0,
                 space: bytes | None = bytes(32)) -> None:
        self.row_bytes, self.recalled = row_bytes, 0
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(SECONDS)
        self.socket.connect(path + ".chunks")
        self.send(hello(row_bytes, engine=engine, role=role))
        packet, ancillary, _, _ = self.socket.recvmsg(65536, socket.CMSG_LEN(4))
        if struct.unpack_from("<I", packet)[0] == REFUSED:
            self.socket.close()
            _, code, reason, message = struct.unpack("<Ii48s456s", packet)
            raise Refused(code, reason.rstrip(b"\0").decode(), message.rstrip(b"\0").decode())
        _, self.version, self.epoch, self.region_bytes, row = struct.unpack("<IIQQQ", packet)
        assert row == row_bytes and len(ancillary) == 1
        descriptors = array.array("i", ancillary[0][2])
        self.region = mmap.mmap(descriptors[0], self.region_bytes)
        os.close(descriptors[0])
        if space is not None:
            self.space(space)

    def send(self, packet: bytes) -> None:
        self.socket.send(packet)

    def receive(self) -> tuple[int, bytes]:
        """The type, and what is behind it; (0, b"") at the end. What is recalled is summed up in `recalled`."""
        packet = self.socket.recv(65536)
        if packet[:4] == struct.pack("<I", RECALL):
            self.recalled += struct.unpack_from("<I", packet, 4)[0]
            return self.receive()
        return (struct.unpack_from("<I", packet)[0], packet[4:]) if packet else (0, b"")

    def space(self, space: bytes) -> None:
        self.send(struct.pack("<II32s", SPACE, 0, space))

    def ask(self, lease: int, keys: list[bytes], first: int = 0) -> list[int]:
        self.send(struct.pack("<IIII", ASK, lease, first, len(keys)) + b"".join(keys))
        kind, body = self.receive()
        assert kind == HELD, kind
        head = struct.unpack_from("<III", body)
        assert head == (lease, first, len(keys))
        return list(struct.unpack_from(f"<{len(keys)}i", body, 12))

    def arrived(self) -> tuple[int, dict[int, int]]:
        """The lease, and by index the ids."""
        kind, body = self.receive()
        assert kind == ARRIVED, kind
        lease, count = struct.unpack_from("<II", body)
        return lease, dict(struct.iter_unpack("<Ii", body[8:8 + 8 * count]))

    def held(self, lease: int, keys: list[bytes]) -> list[int]:
        """As ask, with what was coming as it arrived; at most 1024 keys."""
        ids = self.ask(lease, keys)
        while COMING in ids:
            its, came = self.arrived()
            assert its == lease
            for index, number in came.items():
                assert ids[index] == COMING
                ids[index] = number
        return ids

    def release(self, *leases: int) -> None:
        self.send(struct.pack(f"<II{len(leases)}I", RELEASE, len(leases), *leases))

    def want(self, count: int) -> None:
        self.send(struct.pack("<II", WANT, count))

    def credits(self, count: int) -> list[int]:
        """Wants that many and waits until they are there."""
        self.want(count)
        ids: list[int] = []
        while len(ids) < count:
            kind, body = self.receive()
            assert kind == CREDITS, kind
            (n,) = struct.unpack_from("<I", body)
            ids += struct.unpack_from(f"<{n}i", body, 4)
        return ids

    def stored(self, *chunks: tuple[bytes, int]) -> None:
        self.send(struct.pack("<II", STORED, len(chunks)) + b"".join(k + struct.pack("<i", i) for k, i in chunks))

    def give_back(self, *ids: int) -> None:
        self.send(struct.pack(f"<II{len(ids)}i", RETURN, len(ids), *ids))

    def write(self, number: int, data: bytes) -> None:
        assert len(data) == self.row_bytes
        self.region[number * self.row_bytes:(number + 1) * self.row_bytes] = data

    def read(self, number: int) -> bytes:
        return self.region[number * self.row_bytes:(number + 1) * self.row_bytes]

    def store(self, values: dict[bytes, bytes]) -> None:
        ids = self.credits(len(values))
        for number, data in zip(ids, values.values(), strict=True):
            self.write(number, data)
        self.stored(*zip(values, ids, strict=True))

    def detach(self) -> None:
        self.send(struct.pack("<II", DETACH, 0))
        self.close()

    def close(self) -> None:
        self.socket.close()
        self.region.close()

    def __enter__(self) -> ChunkClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
