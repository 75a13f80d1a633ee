# SPDX-License-Identifier: Apache-2.0
"""A session without the library maps its pages and tables by descriptors: bare_engine.py against the daemon."""

from __future__ import annotations

import mmap
import os
import pathlib
import socket
import struct
import subprocess
import sys
import time

import bare_engine
import grpc
import numpy as np
import pytest
from bare_engine import BareEngine, Geometry, Memory, Refused, redeem_packet
from toy import DIM, HEADS, KV_HEADS, LAYERS, Toy

import kvstrata
from kvstrata.daemon import Daemon
from kvstrata.grpc import Client, translate

GEOMETRY = Geometry(LAYERS, HEADS, KV_HEADS, DIM, 16)
N = 200
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
NOBODY = 65534


@pytest.fixture
def toy(random: np.random.Generator) -> Toy:
    return Toy(random, N)


@pytest.fixture
def engine(daemon: Daemon):
    with BareEngine(daemon.socket, GEOMETRY) as opened:
        yield opened


def open_toy(engine: BareEngine, toy: Toy, plan: str) -> bare_engine.Sequence:
    return engine.open(engine.register(toy.digest), plan, toy.ids[:N - 1])


def refused(path: str, packet: bytes) -> str:
    """The reason; nothing but it comes."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
        s.settimeout(bare_engine.SECONDS)
        s.connect(path + ".attach")
        s.send(packet)
        answer, fds, _, _ = socket.recv_fds(s, 1024, 4)
        assert struct.unpack_from("<I", answer)[0] == bare_engine.REFUSED
        assert not fds and s.recv(1024) == b""
        return Refused(answer).reason


def reason_of(error: pytest.ExceptionInfo) -> str:
    return translate(error.value).reason


def test_what_was_sent_is_read_in_place(engine: BareEngine, toy: Toy):
    """Rows come by gRPC, and are attended where they lie; the tokens are those that the plan selects."""
    memory = engine.map()
    sequence = open_toy(engine, toy, "quest{budget = 32, n_sink = 4, n_recent = 16, min_tokens = 0}")
    for first, end in ((0, 150), (150, N - 1), (N - 1, N)):
        step = engine.begin(sequence, toy.ids[first:end])
        for layer in range(LAYERS):
            engine.append(step, layer, toy.k[layer, first:end], toy.v[layer, first:end])
            q = toy.q[layer, first:end]
            if end - first == 1:
                groups = engine.select(step, layer, q)
                assert 32 <= len(groups[0]) < N
                own = engine.attends(sequence, layer, q[0], groups)
                np.testing.assert_allclose(own, engine.daemon_attends(step, layer, q)[0], **CLOSE)
        engine.end_step(step)
        if end == N - 1:
            engine.prefill_done(sequence)
    for layer in range(LAYERS):
        k, v = engine.read_outside(sequence, layer, N)
        np.testing.assert_array_equal(k, toy.k[layer])
        np.testing.assert_array_equal(v, toy.v[layer])
    assert not any(arena.writable for arena in memory.arenas.values())


@pytest.mark.parametrize("plan", ["full", "quest{budget = 32, n_sink = 4, n_recent = 16, min_tokens = 0}"])
def test_rows_are_written_in_place(daemon: Daemon, engine: BareEngine, toy: Toy, plan: str):
    engine.map(writable=True)
    sequence = open_toy(engine, toy, plan)
    for first, end in ((0, 150), (150, N - 1), (N - 1, N)):
        step = engine.begin(sequence, toy.ids[first:end])
        engine.write(sequence, first, toy.k[:, first:end], toy.v[:, first:end])
        engine.append_in_place(step)
        for layer in range(LAYERS):
            q = toy.q[layer, first:end]
            one = plan != "full" and end - first == 1
            groups = engine.select(step, layer, q) if one else [list(range(end))]
            own = engine.attends(sequence, layer, q[-1], groups)
            np.testing.assert_allclose(own, engine.daemon_attends(step, layer, q)[-1], **CLOSE)
        engine.end_step(step)
        if end == N - 1:
            engine.prefill_done(sequence)
    # Committed as any other rows: a linked engine of the user finds them.
    with kvstrata.attach(daemon.socket) as session:
        with session.open(toy.register(session), "full", toy.ids) as held:
            assert held.held == (N - 1) // 16 * 16
            out = toy.feed(session, held, held.held, N)
            for layer in range(LAYERS):
                np.testing.assert_allclose(out[layer][-1], toy.expected(layer, N - 1)[0], **CLOSE)


def test_an_aborted_step_leaves_nothing(engine: BareEngine, toy: Toy):
    engine.map(writable=True)
    sequence = open_toy(engine, toy, "full")
    for abort in (True, False):
        step = engine.begin(sequence, toy.ids[:20])
        engine.write(sequence, 0, -toy.k[:, :20] if abort else toy.k[:, :20], toy.v[:, :20])
        engine.append_in_place(step, 0)
        engine.append_in_place(step, 1)
        engine.end_step(step, abort)
    np.testing.assert_array_equal(engine.read_outside(sequence, 1, 20)[0], toy.k[1, :20])


def test_arenas_and_tables_that_come_later(daemon: Daemon, engine: BareEngine, toy: Toy):
    """Pages move while they are mapped: the table says so, and the new arena's descriptor is in the socket."""
    memory = engine.map()
    assert not memory.arenas
    sequence = open_toy(engine, toy, "full")
    step = engine.begin(sequence, toy.ids)
    for layer in range(LAYERS):
        engine.append(step, layer, toy.k[layer], toy.v[layer])
    engine.end_step(step)
    before = memory.table(sequence.slot, sequence.number)
    np.testing.assert_array_equal(engine.read_outside(sequence, 0, N)[0], toy.k[0])
    known = set(memory.arenas)
    with Client(daemon.socket) as client:
        assert client.demote(sequence.number).pages == N // 16
    assert not memory.is_current(sequence.slot, sequence.number, before)
    np.testing.assert_array_equal(engine.read_outside(sequence, 1, N)[0], toy.k[1])
    after = memory.table(sequence.slot, sequence.number)
    assert {entry.tier for entry in after.pages[:N // 16]} == {1} and set(memory.arenas) > known


def test_a_bare_process(daemon: Daemon, tmp_path: pathlib.Path):
    """As a program of its own that has nothing of the package but the stubs."""
    stubs = tmp_path / "kvstrata"
    stubs.mkdir()
    (stubs / "v1").symlink_to(pathlib.Path(kvstrata.__file__).parent / "v1")
    ran = subprocess.run([sys.executable, bare_engine.__file__, daemon.socket], capture_output=True, text=True,
                         timeout=120, check=False, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert ran.returncode == 0, ran.stderr
    worst, library, session = ran.stdout.split()[1::2]
    assert (library, session) == ("False", "False") and float(worst) < 1e-4


def test_tokens_are_refused_by_name(daemon: Daemon, engine: BareEngine):
    issued = engine.token()
    packet = redeem_packet(issued.token, issued.layout_version)
    assert refused(daemon.socket, redeem_packet(os.urandom(16), issued.layout_version)) == "TOKEN_UNKNOWN"
    assert refused(daemon.socket, redeem_packet(issued.token, 77)) == "VERSION_MISMATCH"
    assert refused(daemon.socket, packet[:-1]) == "REDEEM_MALFORMED"
    assert refused(daemon.socket, packet + b"\0") == "REDEEM_MALFORMED"
    assert refused(daemon.socket, os.urandom(3)) == "HELLO_MALFORMED"
    Memory(daemon.socket, issued.token, issued.layout_version).close()
    assert refused(daemon.socket, packet) == "TOKEN_USED"
    brief = engine.token(lifetime_ms=1)
    until = time.monotonic() + 0.001
    while time.monotonic() < until:
        pass
    assert refused(daemon.socket, redeem_packet(brief.token, brief.layout_version)) == "TOKEN_EXPIRED"
    with pytest.raises(grpc.RpcError) as error:
        engine.token(lifetime_ms=60001)
    assert reason_of(error) == "TOKEN_LIFETIME"


def test_a_session_that_has_ended(daemon: Daemon):
    engine = BareEngine(daemon.socket, GEOMETRY)
    memory, late = engine.map(), engine.token()
    engine.end()
    with pytest.raises(ConnectionError):
        memory.arena(1)
    assert refused(daemon.socket, redeem_packet(late.token, late.layout_version)) == "SESSION_UNKNOWN"
    with pytest.raises(grpc.RpcError) as error:
        engine.token()
    assert reason_of(error) == "SESSION_UNKNOWN"
    engine.channel.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_another_user_learns_nothing(engine: BareEngine, daemon: Daemon):
    issued = engine.token()
    path = daemon.socket + ".attach"
    os.chmod(os.path.dirname(path), 0o755)
    os.chmod(path, 0o666)
    program = ("import socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.settimeout(10); "
               "s.connect(sys.argv[1]); s.send(bytes.fromhex(sys.argv[2])); p, f, _, _ = socket.recv_fds(s, 1024, 4); "
               "print(p.hex(), len(f))")
    say = lambda token: subprocess.run(
        ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "/usr/bin/python3", "-c", program, path,
         redeem_packet(token, issued.layout_version).hex()],
        cwd="/", capture_output=True, text=True, timeout=60, check=True).stdout.split()
    answer, fds = say(issued.token)
    assert Refused(bytes.fromhex(answer)).reason == "TOKEN_UNKNOWN" and fds == "0"
    assert say(os.urandom(16)) == [answer, fds]
    Memory(daemon.socket, issued.token, issued.layout_version).close()  # it is still good for its owner


def test_silent_peers_hold_up_nobody(daemon: Daemon, engine: BareEngine, toy: Toy):
    silent = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(8)]
    for s in silent:
        s.connect(daemon.socket + ".attach")
    unread = engine.token()
    silent[0].send(redeem_packet(unread.token, unread.layout_version))
    sequence = open_toy(engine, toy, "full")
    engine.map(writable=True)
    step = engine.begin(sequence, toy.ids[:20])
    engine.write(sequence, 0, toy.k[:, :20], toy.v[:, :20])
    engine.append_in_place(step)
    engine.end_step(step)
    with kvstrata.attach(daemon.socket) as session:
        assert session.open(toy.register(session), "full", toy.ids).held == 16
    for s in silent:
        s.close()


def test_what_was_not_given_is_not_written(engine: BareEngine, toy: Toy):
    sequence = open_toy(engine, toy, "full")
    step = engine.begin(sequence, toy.ids[:20])
    with pytest.raises(grpc.RpcError) as error:
        engine.append_in_place(step)
    assert reason_of(error) == "NOT_WRITABLE"
    memory = engine.map()
    packet = engine.token()
    memory.close()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
        s.connect(engine.path + ".attach")
        s.send(redeem_packet(packet.token, packet.layout_version))
        for _ in range(2):  # the tables, an arena
            _, (fd,), _, _ = socket.recv_fds(s, 1024, 4)
            with pytest.raises(PermissionError):
                mmap.mmap(fd, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            with pytest.raises(OSError, match="Invalid|permitted"):
                os.ftruncate(fd, 0)
            os.close(fd)
    engine.end_step(step, abort=True)
