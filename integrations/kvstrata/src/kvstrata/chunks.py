# SPDX-License-Identifier: Apache-2.0
"""The daemon's room of engine chunks (docs/design.md, "Engine chunks"), over its socket PATH.chunks.

    with ChunkLink(socket, role=WORKER, row_bytes=1 << 22, engine="e1", client_name="vllm worker") as link:
        memory = link.map()                       # chunk i of this row size lies at i * row_bytes
    client = ChunkClient(ChunkLink(socket, role=SCHEDULER, ...))
    client.space(digest)                          # whose keys the later calls name
    lease = client.ask([(block_hash, group), ...])
    lease.ids[0]                                  # None: not answered yet; ABSENT, COMING, or a chunk that is held
    client.release([lease])
    client.want(64); client.credits(8)            # ids to write to
    client.stored([((block_hash, group), id)])

A chunk is a row of bytes that a scheduler names by 32 bytes and a group. What `ask` says is held stays where it is
until the lease is released; a credit is written by its owner alone, until it is stored or given back. An engine is all
links of one user and one `engine`.

Nothing of a ChunkClient waits for the daemon. Calls send at once, and `receive` takes what has come; a thread beside does
both where the socket is full or nobody calls. (It does not do all of it: an engine that computes in Python lets another
thread run every 5 ms only, and an exchange takes several such turns.) Where an answer is late by SILENT_SECONDS the
client is `silent` until the daemon says something; where the daemon has ended it is `gone` for good. Threads: a
ChunkClient is called from one; leases and credits are filled in by that one or its own.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
import selectors
import socket as sockets
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from .attachment import AGAIN, short_of_processors
from .daemon import default_socket
from .errors import Unavailable, error_of

__all__ = ["ABSENT", "COMING", "SCHEDULER", "WORKER", "ChunkClient", "ChunkLink", "Key", "LayerRecall", "Lease",
           "Welcome", "chunk_socket"]

SCHEDULER, WORKER = 0, 1
ABSENT, COMING = -1, -2
SILENT_SECONDS = 0.05
START_SECONDS = 5.0  # an engine that starts waits so long for a welcome
MAX_KEYS = 1024      # in a packet
_END_SECONDS = 1.0

_MAGIC, _VERSION, _PACKET_BYTES = 0x4B56434B, 1, 65536
_HELLO, _SPACE, _ASK, _RELEASE, _WANT, _STORED, _RETURN, _DETACH, _RECALLED = range(1, 10)
_WELCOME, _REFUSED, _HELD, _ARRIVED, _CREDITS, _RECALL = range(101, 107)
_HELLO_FORM = struct.Struct("<IIIIQ64s64s")
_WELCOME_FORM = struct.Struct("<IIQQQ")
_REFUSED_FORM = struct.Struct("<Ii48s456s")
_RECALLED_FORM, _LAYER_FORM = struct.Struct("<II128s120s"), struct.Struct("<IIfff")
_COUNTED, _HEADER = struct.Struct("<II"), struct.Struct("<IIII")
_KEY_FORM, _STORED_FORM, _ARRIVAL = struct.Struct("<32sI"), struct.Struct("<32sIi"), struct.Struct("<Ii")

_MOST_ERROR = 3e38  # that an fp32 holds

_log = logging.getLogger("kvstrata")

Key = tuple[bytes, int]
"""32 bytes (shorter ones are filled up with zeros) and the group."""


class LayerRecall(NamedTuple):
    """What a plan lost in a layer. samples: heads that were measured; recall, error: their means; least: least recall."""

    layer: int
    samples: int
    recall: float
    least: float
    error: float


class Welcome(NamedTuple):
    """daemon_epoch: names this life of the daemon. region_bytes, row_bytes: of the region and of a chunk."""

    daemon_epoch: int
    region_bytes: int
    row_bytes: int


def chunk_socket(path: str | os.PathLike[str] | None) -> str:
    """Where the daemon of socket `path` (None: KVSTRATA_SOCKET, else the default) speaks of chunks."""
    return f"{os.fspath(path) if path else default_socket()}.chunks"


class ChunkLink:
    """A connection that the daemon has welcomed. row_bytes: a multiple of 4096. engine, client_name: at most 63 bytes.

    Errors: Unavailable: no daemon, or it does not answer within START_SECONDS; whatever the daemon refuses with. Costs
    a round trip."""

    def __init__(self, socket: str | os.PathLike[str] | None, *, role: int, row_bytes: int, engine: str,
                 client_name: str) -> None:
        self.path = chunk_socket(socket)
        self.socket = sockets.socket(sockets.AF_UNIX, sockets.SOCK_SEQPACKET)
        self._descriptor = -1
        try:
            self.welcome = self._attach(_HELLO_FORM.pack(_HELLO, _MAGIC, _VERSION, role, row_bytes, engine.encode(),
                                                         client_name.encode()))
        except BaseException:
            self.close()
            raise

    def _attach(self, hello: bytes) -> Welcome:
        self.socket.settimeout(START_SECONDS)
        try:
            self.socket.connect(self.path)
            self.socket.send(hello)
            packet, descriptors, _, _ = sockets.recv_fds(self.socket, _PACKET_BYTES, 1)
        except TimeoutError:
            raise _unreachable(f"kvstratad does not answer at {self.path} within {START_SECONDS:g} s; see whether it runs "
                               "(kvstrata health), and its log") from None
        except OSError as error:
            raise _unreachable(f"no kvstratad speaks of chunks at {self.path} ({error.strerror}); start kvstratad, or name "
                               "a running one's: KVSTRATA_SOCKET, or `socket`") from None
        self._descriptor = descriptors[0] if descriptors else -1
        if len(packet) == _REFUSED_FORM.size:
            raise _refusal(packet)
        if len(packet) != _WELCOME_FORM.size or not descriptors:
            raise _unreachable(f"what listens at {self.path} is no kvstratad of this version; it answered with "
                               f"{len(packet)} bytes: install the same version of both")
        kind, version, epoch, region, row = _WELCOME_FORM.unpack(packet)
        if (kind, version) != (_WELCOME, _VERSION):
            raise _unreachable(f"kvstratad at {self.path} speaks version {version} of chunks, this client {_VERSION}: "
                               "install the same version of both")
        self.socket.setblocking(False)
        return Welcome(epoch, region, row)

    def map(self) -> mmap.mmap:
        """The region, read and written by all of the user's engines. It stays mapped, whatever becomes of the link."""
        region = mmap.mmap(self._descriptor, self.welcome.region_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with contextlib.suppress(OSError):  # advice, where the kernel has huge pages of shared memory
            region.madvise(mmap.MADV_HUGEPAGE)
        return region

    def recalled(self, plan: str, model: str, layers: Sequence[LayerRecall]) -> bool:
        """Tells what `plan` has lost since the call before, for `kvstrata audit --engine`; a worker's alone. plan, model:
        cut to 127 and 119 bytes. layers: at most 1024, whose numbers are below that, of at most 2^20 samples each; those
        without samples, or with numbers that are not finite, are left out. False: the daemon is gone, or has not read
        what was told before, and these are lost. Waits for nothing, and raises for neither. One thread at a time. Costs
        a system call."""
        rows = [_LAYER_FORM.pack(row.layer, row.samples, min(max(row.recall, 0.0), 1.0), min(max(row.least, 0.0), 1.0),
                                 min(row.error, _MOST_ERROR))
                for row in layers if row.samples and math.isfinite(row.recall + row.least + row.error)]
        if not rows:
            return True
        head = _RECALLED_FORM.pack(_RECALLED, len(rows), _text(plan, 128), _text(model, 120))
        try:
            self.socket.send(head + b"".join(rows))
        except OSError:
            return False
        return True

    def detach(self) -> None:
        """Says that nobody of this process copies any more, and closes."""
        try:
            self.socket.settimeout(_END_SECONDS)
            self.socket.send(_COUNTED.pack(_DETACH, 0))
        except OSError:
            pass  # the daemon has ended, or will see that the process does
        self.close()

    def close(self) -> None:
        self.socket.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> ChunkLink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _text(text: str, size: int) -> bytes:
    """In so many bytes, one of them a NUL."""
    return text.encode()[:size - 1].decode(errors="ignore").encode()


def _unreachable(message: str) -> Exception:
    return error_of(14, "DAEMON_UNREACHABLE", message)


def _refusal(packet: bytes) -> Exception:
    _, code, reason, message = _REFUSED_FORM.unpack(packet)
    return error_of(code, *(text.split(b"\0")[0].decode(errors="replace") for text in (reason, message)))


class Lease:
    """What was asked under one lease. ids: by key, in the order of the asks: None until answered, ABSENT, COMING until
    it has arrived, else a chunk that is held until the lease is released. asked_at: of the first ask,
    time.monotonic()."""

    __slots__ = ("asked_at", "ids", "missing", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.ids: list[int | None] = []
        self.missing = 0  # answers that have not come
        self.asked_at = time.monotonic()

    @property
    def answered(self) -> bool:
        return self.missing == 0


class ChunkClient:
    """A scheduler's link, and the thread that serves it beside.

    silent: the daemon owes an answer for SILENT_SECONDS (of a machine that is short of processors AGAIN times that).
    gone: why there is no daemon any more, "" while there is one. owed: credits that were wanted and have not come."""

    def __init__(self, link: ChunkLink) -> None:
        self.welcome = link.welcome
        self.silent, self.gone = False, ""
        self.owed = 0
        self._link = link
        self._lock = threading.RLock()  # guards what follows, and the socket
        self._outbox: deque[tuple[bytes, tuple[int, int] | None]] = deque()  # packets, each with the ask that it is
        self._unanswered: dict[tuple[int, int], float] = {}  # (lease, first): since when
        self._leases: dict[int, Lease] = {}
        self._credits: deque[int] = deque()
        self._given_back = 0  # credits that were recalled
        self._next_lease = 0
        self._closing = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kvstrata-chunks", daemon=True)
        self._thread.start()

    # Called by the engine; none waits

    def receive(self) -> None:
        """Takes what the daemon has said since: answers, arrivals, credits. Costs a system call."""
        with self._lock:
            self._attempt(self._receive)

    def space(self, name: bytes) -> None:
        """Keys of later calls belong to the space of these 32 bytes. Leases and credits stay."""
        self._send(_COUNTED.pack(_SPACE, 0) + name)

    def ask(self, keys: Sequence[Key], lease: Lease | None = None) -> Lease:
        """Whether these are held. lease: one that they are to be added to; None: a new one. Credits that were recalled
        are wanted again: who asks is about to store."""
        with self._lock:
            again, self._given_back = self._given_back, 0
            if again:
                self.want(again)
            if lease is None:
                self._next_lease += 1
                lease = self._leases[self._next_lease] = Lease(self._next_lease)
            begin = len(lease.ids)
            if self.gone:
                lease.ids += [ABSENT] * len(keys)
                return lease
            lease.ids += [None] * len(keys)
            lease.missing += len(keys)
            for at in range(0, len(keys), MAX_KEYS):
                part = keys[at:at + MAX_KEYS]
                packet = _HEADER.pack(_ASK, lease.number, begin + at, len(part))
                packet += b"".join(_KEY_FORM.pack(*key) for key in part)
                self._send(packet, (lease.number, begin + at))
        self._poke()  # the thread sees to it that an answer comes in time
        return lease

    def release(self, leases: Iterable[Lease]) -> None:
        """What they hold may go. Their answers are of no use any more."""
        numbers = [lease.number for lease in leases]
        with self._lock:
            for number in numbers:
                self._leases.pop(number, None)
        self._send_list(_RELEASE, [struct.pack("<I", number) for number in numbers])

    def want(self, count: int) -> None:
        """So many more credits are wanted."""
        with self._lock:
            self.owed += count
            self._send(_COUNTED.pack(_WANT, count))

    @property
    def available(self) -> int:
        """Credits that `credits` has."""
        return len(self._credits)

    def credits(self, count: int) -> list[int]:
        """At most so many ids, to be written by this engine."""
        with self._lock:
            return [self._credits.popleft() for _ in range(min(count, len(self._credits)))]

    def stored(self, chunks: Iterable[tuple[Key, int]]) -> None:
        """These credits have all bytes of these keys."""
        self._send_list(_STORED, [_STORED_FORM.pack(*key, number) for key, number in chunks])

    def give_back(self, ids: Iterable[int]) -> None:
        """Credits that nobody writes any more."""
        self._send_list(_RETURN, [struct.pack("<i", number) for number in ids])

    def close(self, detach: bool) -> None:
        """Ends the thread and the link once what was said is sent, or _END_SECONDS are over. detach: nobody of this
        engine copies any more, so that its leases and credits are free at once."""
        with self._lock:
            if detach:
                self._send(_COUNTED.pack(_DETACH, 0))
            self._closing = True
        self._poke()
        self._thread.join(_END_SECONDS)

    def _send_list(self, kind: int, items: list[bytes]) -> None:
        for at in range(0, len(items), MAX_KEYS):
            part = items[at:at + MAX_KEYS]
            self._send(_COUNTED.pack(kind, len(part)) + b"".join(part))

    def _send(self, packet: bytes, ask: tuple[int, int] | None = None) -> None:
        with self._lock:
            if self.gone:
                return
            self._outbox.append((packet, ask))
            if self._attempt(self._flush):
                self._poke()

    def _poke(self) -> None:
        os.eventfd_write(self._wake, 1)

    # On either thread, under the lock

    def _attempt(self, exchange: Callable[[], bool]) -> bool:
        """What `exchange` answers. Where it fails the daemon is gone, and nobody may wait for answers any more."""
        try:
            return not self.gone and exchange()
        except Exception as error:  # noqa: BLE001; whatever it is
            if self.gone:
                return False
            _log.error("kvstratad is gone (%s): the engine goes on without a tier, and takes the daemon that runs at its "
                       "next start", error)
            self._end(str(error))
            return False

    def _end(self, reason: str) -> None:
        self.gone = reason
        for lease in self._leases.values():
            lease.ids[:] = [ABSENT if number in (None, COMING) else number for number in lease.ids]
            lease.missing = 0
        self._outbox.clear()
        self._unanswered.clear()
        self._credits.clear()
        self._link.close()
        self._poke()

    # The thread

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            selector.register(self._link.socket, selectors.EVENT_READ)
            while self._turn(selector):
                pass

    def _turn(self, selector: selectors.BaseSelector) -> bool:
        """Sends and receives what there is, and waits for more; whether there is to be another turn."""
        with self._lock:
            blocked = self._attempt(self._flush)
            if self._closing and not self._outbox and not self.gone:
                self._end("the engine has closed it")
            if self.gone:
                return False
            since = max(min(self._unanswered.values()), self._heard) if self._unanswered else None
            late = None if since is None or self.silent else max(0.0, since + self._patience() - time.monotonic())
            selector.modify(self._link.socket, selectors.EVENT_READ | (selectors.EVENT_WRITE if blocked else 0))
        ready = [key.fileobj for key, _ in selector.select(late)]
        if self._wake in ready:
            os.eventfd_read(self._wake)
        with self._lock:
            if not self._attempt(self._receive) and not ready and since is not None and not self.silent:
                self._late()
        return True

    def _patience(self) -> float:
        return SILENT_SECONDS * self._times

    _times = 1  # SILENT_SECONDS that are waited
    _heard = 0.0  # when something came last

    def _late(self) -> None:
        """Nothing has come for a while. Where processors are short, the daemon may not have been given one."""
        if not self._unanswered:
            return
        since = max(min(self._unanswered.values()), self._heard)
        if time.monotonic() < since + self._patience():
            return
        if self._times < AGAIN and short_of_processors():
            self._times += 1
            return
        self._times, self.silent = 1, True
        _log.warning("kvstratad has not answered for %.0f ms: nothing is looked up or stored until it does",
                     1000 * (time.monotonic() - since))

    def _flush(self) -> bool:
        """Sends; whether the socket takes no more for now."""
        while self._outbox:
            packet, ask = self._outbox[0]
            if ask is not None:
                self._unanswered.setdefault(ask, time.monotonic())
            try:
                self._link.socket.send(packet)
            except BlockingIOError:
                return True
            self._outbox.popleft()
        return False

    def _receive(self) -> bool:
        """All that has come; whether something has."""
        some = False
        while True:
            try:
                packet = self._link.socket.recv(_PACKET_BYTES)
            except BlockingIOError:
                break
            if not packet:
                raise Unavailable("the connection has ended")
            some, self._times, self._heard = True, 1, time.monotonic()
            self._take(packet)
        if some and self.silent:
            self.silent = False
            _log.warning("kvstratad answers again")
        return some

    def _take(self, packet: bytes) -> None:
        kind, = struct.unpack_from("<I", packet)
        if kind == _HELD:
            _, number, first, count = _HEADER.unpack_from(packet)
            self._held(number, first, struct.unpack_from(f"<{count}i", packet, _HEADER.size))
        elif kind == _ARRIVED:
            _, number, count = struct.unpack_from("<III", packet)
            if (lease := self._leases.get(number)) is not None:
                for at in range(count):
                    index, chunk = _ARRIVAL.unpack_from(packet, 12 + at * _ARRIVAL.size)
                    lease.ids[index] = chunk
        elif kind == _CREDITS:
            _, count = _COUNTED.unpack_from(packet)
            self._credits.extend(struct.unpack_from(f"<{count}i", packet, _COUNTED.size))
            self.owed -= count
        elif kind == _RECALL:  # others have use for credits that wait here
            _, count = _COUNTED.unpack_from(packet)
            ids = self.credits(count)
            self.give_back(ids)
            self._given_back += len(ids)
        elif kind == _REFUSED:
            raise Unavailable(str(_refusal(packet)))
        else:
            raise Unavailable(f"a packet of kind {kind}, which this version does not know")

    def _held(self, number: int, first: int, ids: tuple[int, ...]) -> None:
        self._unanswered.pop((number, first), None)
        if (lease := self._leases.get(number)) is not None:
            lease.ids[first:first + len(ids)] = ids
            lease.missing -= len(ids)
