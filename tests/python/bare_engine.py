# SPDX-License-Identifier: Apache-2.0
"""An engine without the client library: the standard library, numpy, and the stubs of kvstrata's protos.

It opens sequences over gRPC, maps their tables and pages by descriptors that it fetches with a token, and
reads and writes rows in place, by docs/shm_layout.md alone. Nothing of the package `kvstrata` but the stubs
is used. As a program it serves one toy prompt and says what it found:

    python bare_engine.py SOCKET
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import sys
import time
from typing import NamedTuple

import grpc
import numpy as np
from kvstrata.v1 import compute_pb2, compute_pb2_grpc, control_pb2, control_pb2_grpc

MAGIC = 0x4B565331
REFUSED, ARENA, REDEEM, TABLES = 3, 4, 6, 7
SHARED, SEALED, ABSENT = 1, 2, 4
SLOTS, SLOT_BYTES = 4096, 64  # in the table segment
SECONDS = 10  # that anything is waited for


class Geometry(NamedTuple):
    layers: int
    heads: int
    kv_heads: int
    dim: int
    page_tokens: int

    def message(self) -> control_pb2.Geometry:
        return control_pb2.Geometry(layers=self.layers, query_heads=self.heads, kv_heads=self.kv_heads,
                                    head_dim=self.dim, page_tokens=self.page_tokens, dtype=control_pb2.DTYPE_BF16)


class Entry(NamedTuple):
    """Where a page lies."""
    arena: int
    flags: int
    tier: int
    offset: int


class Table(NamedTuple):
    at: int  # in the table segment
    version: int
    pages: list[Entry]


class Arena(NamedTuple):
    memory: mmap.mmap
    writable: bool


class Refused(Exception):
    """The daemon's answer at the attach socket: reason and message."""

    def __init__(self, packet: bytes) -> None:
        text = lambda field: field.split(b"\0", 1)[0].decode()
        self.reason, message = text(packet[8:56]), text(packet[56:512])
        super().__init__(f"{self.reason}: {message}")


def redeem_packet(token: bytes, version: int) -> bytes:
    return struct.pack("<4I16s", REDEEM, MAGIC, version, 0, token)


def mapped(fd: int, size: int, writable: bool) -> mmap.mmap:
    """The mapping has a descriptor of its own; this one is closed."""
    try:
        return mmap.mmap(fd, size, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
    finally:
        os.close(fd)


class Memory:
    """A session's tables and arenas, mapped. Every wait ends after SECONDS."""

    def __init__(self, path: str, token: bytes, version: int) -> None:
        self.arenas: dict[int, Arena] = {}
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connection.settimeout(SECONDS)
        self.connection.connect(path + ".attach")
        with contextlib.suppress(ConnectionError):  # refused unheard: why is read next
            self.connection.send(redeem_packet(token, version))
        packet, fds = self._receive()
        kind, layout, self.session, _, size, arenas, _ = struct.unpack_from("<IIQQQII", packet)
        assert (kind, layout, len(fds)) == (TABLES, version, 1)
        self.tables = mapped(fds[0], size, False)
        for _ in range(arenas):
            self._take_arena()

    def close(self) -> None:
        self.connection.close()

    def _receive(self) -> tuple[bytes, list[int]]:
        try:
            packet, fds, _, _ = socket.recv_fds(self.connection, 1024, 4)
        except ConnectionResetError:  # said once, of a token that was not read; the refusal comes behind it
            packet, fds, _, _ = socket.recv_fds(self.connection, 1024, 4)
        if not packet:
            raise ConnectionError("the session has ended")
        if struct.unpack_from("<I", packet)[0] == REFUSED:
            raise Refused(packet)
        return packet, fds

    def _take_arena(self) -> None:
        packet, (fd,) = self._receive()
        kind, number, size, _, writable, memory, _ = struct.unpack("<IIQ4H", packet)
        assert (kind, memory) == (ARENA, 0), "an arena of a GPU is mapped by its driver"
        self.arenas[number] = Arena(mapped(fd, size, bool(writable)), bool(writable))

    def arena(self, number: int) -> Arena:
        """Its descriptor was sent before a table named it; then it waits in the socket."""
        while number not in self.arenas:
            self._take_arena()
        return self.arenas[number]

    def table(self, slot: int, sequence: int) -> Table:
        at, owner = struct.unpack_from("<QQ", self.tables, SLOTS + SLOT_BYTES * slot)
        if at == 0 or owner != sequence:
            raise LookupError(f"sequence {sequence} has no table")
        version, owner, _, _, _, pages = struct.unpack_from("<QQQIII", self.tables, at)
        assert owner == sequence
        entries = struct.iter_unpack("<IHHQ", self.tables[at + 56:at + 56 + 16 * pages])
        return Table(at, version, [Entry(*entry) for entry in entries])

    def is_current(self, slot: int, sequence: int, table: Table) -> bool:
        """Whether all that was read of the table's pages since is what it named."""
        now = struct.unpack_from("<QQ", self.tables, SLOTS + SLOT_BYTES * slot)
        return now == (table.at, sequence) and struct.unpack_from("<Q", self.tables, table.at)[0] == table.version

    def page(self, entry: Entry, geometry: Geometry) -> np.ndarray:
        """[layers][keys, values][kv heads][page_tokens][dim], uint16 patterns of bf16; writable where the arena is."""
        g = geometry
        shape, memory = (g.layers, 2, g.kv_heads, g.page_tokens, g.dim), self.arena(entry.arena).memory
        return np.frombuffer(memory, np.uint16, int(np.prod(shape)), entry.offset).reshape(shape)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Takes values that bf16 holds exactly."""
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)


class Sequence(NamedTuple):
    number: int
    slot: int
    held: int


class BareEngine:
    """A session over gRPC. `memory` is mapped when `map` was called."""

    def __init__(self, path: str, geometry: Geometry, name: str = "bare") -> None:
        self.path, self.geometry = path, geometry
        self.channel = grpc.insecure_channel(f"unix:{path}", options=[("grpc.default_authority", "localhost")])
        self.control = control_pb2_grpc.ControlStub(self.channel)
        self.compute = compute_pb2_grpc.ComputeStub(self.channel)
        self.stream = self.control.OpenSession(control_pb2.OpenSessionRequest(client_name=name))
        self.session = next(self.stream).session
        self.memory: Memory | None = None

    def __enter__(self) -> BareEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self.channel.close()

    def end(self) -> None:
        self.control.CloseSession(control_pb2.CloseSessionRequest(session=self.session), timeout=SECONDS)

    def token(self, writable: bool = False, lifetime_ms: int = 0) -> control_pb2.IssueAttachTokenResponse:
        return self.control.IssueAttachToken(control_pb2.IssueAttachTokenRequest(
            session=self.session, writable=writable, lifetime_ms=lifetime_ms), timeout=SECONDS)

    def map(self, writable: bool = False) -> Memory:
        issued = self.token(writable)
        self.memory = Memory(self.path, issued.token, issued.layout_version)
        return self.memory

    def register(self, digest: str) -> int:
        return self.control.RegisterModel(control_pb2.RegisterModelRequest(
            session=self.session, name="toy", digest=digest, geometry=self.geometry.message()), timeout=SECONDS).model

    def open(self, model: int, plan: str, tokens: np.ndarray) -> Sequence:
        opened = self.control.OpenSequence(control_pb2.OpenSequenceRequest(
            session=self.session, model=model, plan=plan, tokens=tokens), timeout=SECONDS)
        return Sequence(opened.sequence, opened.slot, opened.held_tokens)

    def prefill_done(self, sequence: Sequence) -> None:
        self.compute.PrefillDone(compute_pb2.PrefillDoneRequest(session=self.session, sequence=sequence.number),
                                 timeout=SECONDS)

    # ---- a step ----
    def begin(self, sequence: Sequence, tokens: np.ndarray) -> int:
        return self.compute.StepBegin(compute_pb2.StepBeginRequest(session=self.session, members=[
            compute_pb2.StepMember(sequence=sequence.number, tokens=tokens)]), timeout=SECONDS).step

    def end_step(self, step: int, abort: bool = False) -> None:
        self.compute.StepEnd(compute_pb2.StepEndRequest(session=self.session, step=step, abort=abort), timeout=SECONDS)

    def append(self, step: int, layer: int, k: np.ndarray, v: np.ndarray) -> None:
        """k, v [tokens][kv heads][dim] fp32, sent"""
        self.compute.Append(compute_pb2.AppendRequest(session=self.session, step=step, layer=layer, k=self._tensor(k),
                                                      v=self._tensor(v)), timeout=SECONDS)

    def append_in_place(self, step: int, layer: int = -1) -> None:
        self.compute.Append(compute_pb2.AppendRequest(session=self.session, step=step, layer=layer, in_place=True),
                            timeout=SECONDS)

    def write(self, sequence: Sequence, first: int, k: np.ndarray, v: np.ndarray) -> None:
        """k, v [layers][tokens][kv heads][dim] fp32, into the pages of positions from `first` on. Inside a step."""
        table, size = self.memory.table(sequence.slot, sequence.number), self.geometry.page_tokens
        for t in range(k.shape[1]):
            entry = table.pages[(first + t) // size]
            assert entry.flags & (SHARED | SEALED | ABSENT) == 0, "StepBegin made it private"
            page, slot = self.memory.page(entry, self.geometry), (first + t) % size
            page[:, 0, :, slot], page[:, 1, :, slot] = to_bf16(k[:, t]), to_bf16(v[:, t])

    def select(self, step: int, layer: int, q: np.ndarray) -> list[list[int]]:
        """The positions that the plan's selector chose for q [1][heads][dim], of each group of heads."""
        answer = self.compute.Select(compute_pb2.SelectRequest(session=self.session, step=step, layer=layer,
                                                               q=self._tensor(q)), timeout=SECONDS)
        return [list(group.tokens) for group in answer.members[0].groups]

    def daemon_attends(self, step: int, layer: int, q: np.ndarray) -> np.ndarray:
        answer = self.compute.Attend(compute_pb2.AttendRequest(session=self.session, step=step, layer=layer,
                                                               q=self._tensor(q)), timeout=SECONDS)
        return np.frombuffer(answer.out.inline, np.float32).reshape(q.shape)

    def attends(self, sequence: Sequence, layer: int, q: np.ndarray, groups: list[list[int]]) -> np.ndarray:
        """Attention of one token, q [heads][dim], over those positions of each group of heads; read in place.
        Inside a step, where what is mapped stays."""
        out = np.empty_like(q)
        k, v = self.rows(self.memory.table(sequence.slot, sequence.number), layer, max(map(max, groups)) + 1)
        for head in range(self.geometry.heads):
            chosen = groups[head * len(groups) // self.geometry.heads]
            kv_head = head * self.geometry.kv_heads // self.geometry.heads
            scores = k[chosen, kv_head] @ q[head] / np.sqrt(self.geometry.dim)
            weights = np.exp(scores - scores.max())
            out[head] = weights @ v[chosen, kv_head] / weights.sum()
        return out

    def rows(self, table: Table, layer: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of the first `tokens` positions, each [tokens][kv heads][dim] fp32."""
        pages = [self.memory.page(entry, self.geometry)[layer] for entry in
                 table.pages[:-(-tokens // self.geometry.page_tokens)]]
        both = from_bf16(np.concatenate(pages, axis=2))[:, :, :tokens]
        return both[0].swapaxes(0, 1), both[1].swapaxes(0, 1)

    def read_outside(self, sequence: Sequence, layer: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """The same outside of any step: read again while the table changed meanwhile."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            table = self.memory.table(sequence.slot, sequence.number)
            rows = self.rows(table, layer, tokens)
            if self.memory.is_current(sequence.slot, sequence.number, table):
                return rows
        raise TimeoutError("the table changes all the time")

    def _tensor(self, x: np.ndarray) -> compute_pb2.TensorRef:
        return compute_pb2.TensorRef(dtype=control_pb2.DTYPE_F32, tokens=x.shape[0], heads=x.shape[1],
                                     head_dim=x.shape[2], inline=np.ascontiguousarray(x, np.float32).tobytes())


def main(path: str) -> None:
    g = Geometry(2, 4, 2, 64, 16)
    rng, n = np.random.default_rng(1), 100
    make = lambda heads: from_bf16(to_bf16(rng.standard_normal((g.layers, n, heads, g.dim)).astype(np.float32)))
    k, v, q = make(g.kv_heads), make(g.kv_heads), make(g.heads)
    ids = rng.integers(0, 1 << 30, n)
    worst = 0.0
    with BareEngine(path, g) as engine:
        engine.map(writable=True)
        sequence = engine.open(engine.register("bare"), "full", ids)
        step = engine.begin(sequence, ids)
        engine.write(sequence, 0, k, v)
        engine.append_in_place(step)
        for layer in range(g.layers):
            own = engine.attends(sequence, layer, q[layer, n - 1], [list(range(n))])
            worst = max(worst, float(np.abs(own - engine.daemon_attends(step, layer, q[layer])[n - 1]).max()))
        engine.end_step(step)
    with open("/proc/self/maps") as maps:
        linked = "libkvstrata" in maps.read()
    print(f"worst {worst:.1e} library {linked} session {'kvstrata.session' in sys.modules}")


if __name__ == "__main__":
    main(sys.argv[1])
