# SPDX-License-Identifier: Apache-2.0
"""Engine chunks over PATH.chunks of a real daemon: bytes that one connection stores another reads."""

from __future__ import annotations

import multiprocessing
import json
import os
import pathlib
import random
import signal
import struct
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import chunk_client
import operated
import pytest
from chunk_client import COMING, NOT_THERE, ChunkClient, Refused, hello, key

import kvstrata.chunks
from kvstrata.daemon import Daemon

MIB = 1 << 20
ROW = MIB // 4
ROWS = 64 * MIB // ROW


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon("--set", "chunks.bytes=64MiB") as started:
        yield started
        assert started.process.poll() is None, f"kvstratad died:\n{started.said()}"


def row(seed: int, row_bytes: int = ROW) -> bytes:
    return random.Random(seed).randbytes(row_bytes)


def test_what_one_connection_stores_another_reads(daemon: Daemon):
    with ChunkClient(daemon.socket, ROW) as one, ChunkClient(daemon.socket, ROW, engine="other") as other:
        assert one.region_bytes == 64 * MIB and one.epoch == other.epoch
        assert one.ask(1, [key(1), key(2)]) == [NOT_THERE, NOT_THERE]
        one.store({key(1): row(1), key(2): row(2)})
        ids = one.held(2, [key(1), key(2)])
        assert min(ids) >= 0 and ids[0] != ids[1]
        assert other.held(7, [key(2), key(3), key(1)]) == [ids[1], NOT_THERE, ids[0]]
        assert [other.read(number) for number in ids] == [row(1), row(2)]


def test_a_key_is_of_its_space_and_group(daemon: Daemon):
    with ChunkClient(daemon.socket, ROW) as client:
        client.store({key(1, group=3): row(1)})
        assert client.held(1, [key(1, group=3)])[0] >= 0
        assert client.ask(2, [key(1, group=2)]) == [NOT_THERE]
        client.space(bytes(31) + b"\1")
        assert client.ask(3, [key(1, group=3)]) == [NOT_THERE]
        client.space(bytes(32))
        assert client.ask(4, [key(1, group=3)])[0] >= 0


def test_stored_and_asked_at_once_arrives(daemon: Daemon):
    """The sums of many chunks take longer than the question."""
    with ChunkClient(daemon.socket, ROW) as client:
        values = {key(n): row(n) for n in range(32)}
        client.store(values)
        ids = client.ask(5, list(values))
        assert COMING in ids or min(ids) >= 0
        while COMING in ids:
            lease, came = client.arrived()
            assert lease == 5
            for index, number in came.items():
                ids[index] = number
        assert [client.read(number) for number in ids] == list(values.values())


def test_the_older_bytes_of_a_key_count(daemon: Daemon):
    with ChunkClient(daemon.socket, ROW) as client:
        client.store({key(1): row(1)})
        (first,) = client.held(1, [key(1)])
        client.store({key(1): row(2)})
        assert client.held(2, [key(1)]) == [first]
        assert client.read(first) == row(1)


def test_leased_chunks_stay_and_others_make_room(daemon: Daemon):
    with ChunkClient(daemon.socket, ROW) as client:
        client.store({key(1): row(1)})
        (leased,) = client.held(1, [key(1)])
        for n in range(2, 3 * ROWS, 16):
            values = {key(m): row(m) for m in range(n, n + 16)}
            client.store(values)
            assert min(client.held(2, list(values))) >= 0
            client.release(2)
        assert client.ask(3, [key(1), key(2)]) == [leased, NOT_THERE]
        assert client.read(leased) == row(1)


def test_a_quarter_is_credited_and_half_is_leased(daemon: Daemon):
    with ChunkClient(daemon.socket, ROW) as client:
        keys = [key(n) for n in range(ROWS)]
        for n in range(0, ROWS, ROWS // 4):
            client.store({k: row(0) for k in keys[n:n + ROWS // 4]})
        ids = client.held(1, keys)
        assert sum(number >= 0 for number in ids) == ROWS // 2
        client.want(ROWS)
        _, body = client.receive()
        assert struct.unpack_from("<I", body)[0] == ROWS // 4


def ask_and_wait(path: str, pipe: Connection) -> None:
    client = ChunkClient(path, ROW, engine="killed")
    ids = client.credits(ROWS // 4)
    pipe.send(ids)
    pipe.recv()


def test_kill_frees_credits(daemon: Daemon):
    """All of the region is credited or leased; what a killed process had is given to whoever waits."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=ask_and_wait, args=(daemon.socket, theirs))
    process.start()
    assert ours.poll(chunk_client.SECONDS)
    taken = set(ours.recv())
    others = [ChunkClient(daemon.socket, ROW, engine=str(n)) for n in range(4)]
    for client in others[:3]:
        taken |= set(client.credits(ROWS // 4))
    assert taken == set(range(ROWS))
    others[3].want(ROWS // 4)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    kind, body = others[3].receive()
    assert kind == chunk_client.CREDITS and struct.unpack_from("<I", body)[0] == ROWS // 4
    for client in others:
        client.close()


def test_a_lost_socket_rests_until_detach(daemon: Daemon):
    """A process that lives may still copy: what it had is nobody's until it says DETACH."""
    with ChunkClient(daemon.socket, ROW, engine="lost") as lost, ChunkClient(daemon.socket, ROW) as other:
        had = set(lost.credits(ROWS // 4))
        lost.socket.close()
        chunks = {key(n): row(n) for n in range(ROWS)}
        for n in range(0, ROWS, ROWS // 8):  # over all that is not the lost one's
            other.store(dict(list(chunks.items())[n:n + ROWS // 8]))
            assert not had & set(other.held(1, list(chunks)[n:n + ROWS // 8]))
            other.release(1)
        ChunkClient(daemon.socket, ROW, engine="lost").detach()
        assert set(other.credits(ROWS // 4)) == had


def test_an_idle_engine_gives_credits_back(daemon: Daemon):
    """The adapter's client, idle: a busy engine beside it has all of the room but a 64th. Who asks again has them again."""
    link = kvstrata.chunks.ChunkLink(daemon.socket, role=0, row_bytes=ROW, engine="idle", client_name="idle")
    idle = kvstrata.chunks.ChunkClient(link)
    idle.space(bytes(32))
    end = time.monotonic() + chunk_client.SECONDS

    def awaits(available: int) -> None:
        while idle.available != available:
            assert time.monotonic() < end, (idle.available, idle.gone)

    idle.want(ROWS // 4)
    awaits(ROWS // 4)
    with ChunkClient(daemon.socket, ROW, engine="busy") as busy:
        def store(first: int, count: int) -> None:
            for n in range(first, first + count, 16):
                busy.store({key(m): row(0) for m in range(n, n + 16)})
                busy.held(1, [key(n + 15)])
                busy.release(1)

        store(0, ROWS)
        awaits(ROWS // 64)
        assert room(daemon)["credited_bytes"] == ROWS // 64 * ROW
        store(ROWS, 2 * ROWS)
        assert room(daemon)["shown"] == ROWS - ROWS // 64
        idle.ask([(bytes(32), 0)])
        awaits(ROWS // 4)
        assert busy.recalled == idle.owed == 0 and not idle.gone
    idle.close(detach=True)


def settings(folder: pathlib.Path) -> list[str]:
    return ["--set", "chunks.bytes=64MiB", "--set", f"disk.path={folder}/disk", "--set", "disk.budget_bytes=512MiB",
            "--set", "disk.segment_bytes=16MiB", "--set", "pool.device_bytes=64MiB", "--set", "pool.host_bytes=64MiB"]


def written(daemon: Daemon, count: int) -> None:
    """Waits until so many chunks are on disk."""
    end = time.monotonic() + chunk_client.SECONDS
    while len(list_chunks(daemon)) < count:
        assert time.monotonic() < end, list_chunks(daemon)


def list_chunks(daemon: Daemon) -> list[dict[str, Any]]:
    """Those on disk."""
    listed = operated.Program(daemon.socket).run("value", "ls", "--tier", "disk", "--limit", "0", "-o", "json")
    values = json.loads(listed)["values"]
    assert all(value["key"].startswith("chunk/") == (value["kind"] == "chunk") for value in values)
    return [value for value in values if value["kind"] == "chunk"]


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
def test_a_restarted_daemon_serves_what_its_disk_has(tmp_path: pathlib.Path, by: signal.Signals):
    values = {key(n): row(n) for n in range(ROWS // 2)}
    with Daemon(*settings(tmp_path)) as first, ChunkClient(first.socket, ROW) as client:
        for n in range(0, len(values), ROWS // 4):
            client.store(dict(list(values.items())[n:n + ROWS // 4]))
        written(first, len(values))
        first.process.send_signal(by)
        first.process.wait()
    with Daemon(*settings(tmp_path)) as second, ChunkClient(second.socket, ROW) as client:
        assert client.epoch != 0
        ids = client.held(1, list(values))
        assert min(ids) >= 0
        assert [client.read(number) for number in ids] == list(values.values())


def store_and_end(path: str, pipe: Connection) -> None:
    """In more packets than the daemon reads in one go."""
    client = ChunkClient(path, ROW)
    ids = client.credits(ROWS // 4)
    pipe.send("has them")
    pipe.recv()
    for n, number in enumerate(ids):
        client.write(number, stamped(n))
        client.stored((key(n), number))
    os._exit(0)


def test_what_a_process_stored_before_it_ended_is_there(daemon: Daemon):
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    engine = spawn.Process(target=store_and_end, args=(daemon.socket, theirs))
    with ChunkClient(daemon.socket, ROW, engine="other") as client:
        engine.start()
        ours.recv()
        daemon.process.send_signal(signal.SIGSTOP)
        ours.send("go on")
        engine.join()
        daemon.process.send_signal(signal.SIGCONT)
        assert min(client.held(1, [key(n) for n in range(ROWS // 4)])) >= 0


def test_bytes_that_rot_on_disk_are_a_miss(tmp_path: pathlib.Path):
    values = {key(n): row(n) for n in range(8)}
    with Daemon(*settings(tmp_path)) as first, ChunkClient(first.socket, ROW) as client:
        client.store(values)
        written(first, len(values))
    rotten = 0
    for file in (tmp_path / "disk").rglob("*"):
        if file.is_file():
            data = file.read_bytes()
            for n in (2, 5):
                at = data.find(row(n)[4096:8192])
                if at >= 0:
                    rotten += 1
                    with file.open("r+b") as there:
                        there.seek(at)
                        there.write(bytes([data[at] ^ 1]))
    assert rotten == 2
    with Daemon(*settings(tmp_path)) as second, ChunkClient(second.socket, ROW) as client:
        ids = client.held(1, list(values))
        assert [n for n, number in enumerate(ids) if number == NOT_THERE] == [2, 5]
        assert all(client.read(number) == row(n) for n, number in enumerate(ids) if number >= 0)


def work_until_killed(path: str, pipe: Connection, seed: int) -> None:
    """An engine: a scheduler that stores and holds chunks of a few keys, and a worker of the same process."""
    chance = random.Random(seed)
    scheduler, worker = ChunkClient(path, ROW, engine="killed"), ChunkClient(path, ROW, engine="killed", role=1, space=None)
    pipe.send("there")
    for lease in range(1 << 30):
        numbers = chance.sample(range(ROWS), 8)
        held = dict(zip(numbers, scheduler.held(lease, [key(n) for n in numbers]), strict=True))
        for n, number in held.items():
            assert number < 0 or scheduler.read(number) == stamped(n)
        scheduler.store({key(n): stamped(n) for n, number in held.items() if number < 0})
        if chance.random() < 0.7:
            scheduler.release(lease)
    worker.close()


def stamped(n: int) -> bytes:
    return struct.pack("<Q", n) * (ROW // 8)


def room(daemon: Daemon) -> dict[str, Any]:
    return json.loads(operated.Program(daemon.socket).run("tier", "ls", "-o", "json"))["rooms"][0]


def test_engines_that_are_killed_at_any_moment_leave_right_bytes_and_nothing_else(daemon: Daemon):
    seed = int(os.environ.get("KVS_TEST_SEED", time.time_ns()))
    print(f"KVS_TEST_SEED={seed}")
    chance = random.Random(seed)
    context = multiprocessing.get_context("fork")
    with ChunkClient(daemon.socket, ROW) as other:
        for n in range(50):
            ours, theirs = context.Pipe()
            process = context.Process(target=work_until_killed, args=(daemon.socket, theirs, seed + n))
            process.start()
            assert ours.poll(chunk_client.SECONDS)
            process.join(chance.random() * 0.05)
            assert process.is_alive(), "it found wrong bytes"
            process.kill()
            process.join()
        end = time.monotonic() + chunk_client.SECONDS
        while (now := room(daemon))["engines"] > 1 or now["credited_bytes"] or now["leased_bytes"]:
            assert time.monotonic() < end, now
        assert now["resting"] == 0 and now["stored"] > 50 and now["changed"] == 0
        for n in range(ROWS):
            (number,) = other.held(1, [key(n)])
            assert number < 0 or other.read(number) == stamped(n)
            other.release(1)


def test_daemons_that_are_killed_at_any_moment_leave_right_bytes_on_disk(tmp_path: pathlib.Path):
    seed = int(os.environ.get("KVS_TEST_SEED", time.time_ns()))
    print(f"KVS_TEST_SEED={seed}")
    chance = random.Random(seed)
    found = 0
    for _ in range(10):
        with Daemon(*settings(tmp_path)) as daemon, ChunkClient(daemon.socket, ROW) as client:
            for n in range(ROWS):
                (number,) = client.held(1, [key(n)])
                assert number < 0 or client.read(number) == stamped(n)
                found += number >= 0
                client.release(1)
            end = time.monotonic() + chance.random() * 0.3
            while time.monotonic() < end:
                client.store({key(n): stamped(n) for n in chance.sample(range(ROWS), 8)})
            daemon.process.kill()
            daemon.process.wait()
    assert found > 0


@pytest.mark.parametrize("row_bytes", [0, 4095, 4 * MIB])
def test_rows_are_refused_by_name(daemon: Daemon, row_bytes: int):
    with pytest.raises(Refused, match="CHUNK_ROW.*chunks.bytes") as refused:
        ChunkClient(daemon.socket, row_bytes)
    assert "blocks_per_chunk" in refused.value.args[2] and str(row_bytes) in refused.value.args[2]


def engines(daemon: Daemon) -> list[dict[str, Any]]:
    return json.loads(operated.Program(daemon.socket).run("audit", "--engine", "-o", "json"))["engines"]


def test_what_workers_tell_is_their_engines_until_it_is_gone(daemon: Daemon):
    """Both ranks together; a client's bad packet ends its connection and counts nothing."""
    layer = kvstrata.chunks.LayerRecall

    def worker(rank: int) -> kvstrata.chunks.ChunkLink:
        return kvstrata.chunks.ChunkLink(daemon.socket, role=kvstrata.chunks.WORKER, row_bytes=ROW, engine="e",
                                         client_name=f"rank {rank}")
    with worker(0) as one, worker(1) as two:
        assert one.recalled("quest{budget = 9}", "m", [layer(0, 1, 1.0, 1.0, 0.0), layer(5, 2, 0.5, 0.25, 0.5)])
        assert two.recalled("quest{budget = 9}", "m", [layer(5, 2, 1.0, 1.0, 0.0)])
        end = time.monotonic() + chunk_client.SECONDS
        while not (told := engines(daemon)) or told[0]["all"]["samples"] < 5:
            assert time.monotonic() < end, told
        five = {"layer": 5, "samples": 4, "recall": 0.75, "least": 0.25, "error": 0.25, "missed": 0.25}
        assert told == [{"engine": "e", "plan": "quest{budget = 9}", "model_name": "m",
                         "all": {**five, "layer": -1, "samples": 5, "recall": 0.8, "error": 0.2,
                                 "missed": pytest.approx(0.2)},
                         "worst": five,
                         "layers": [{"layer": 0, "samples": 1, "recall": 1, "least": 1, "error": 0, "missed": 0}, five]}]
        for role, packet in ((1, chunk_client.recalled((5, 1, float("nan"), 1, 0))), (0, chunk_client.recalled((5, 1, 1, 1, 0))),
                             (1, chunk_client.recalled((1024, 1, 1, 1, 0))), (1, chunk_client.recalled())):
            with ChunkClient(daemon.socket, ROW, engine="e", role=role, space=None) as bad:
                bad.send(packet)
                assert bad.receive() == (0, b"")
        assert engines(daemon) == told
        one.detach()
        assert engines(daemon) == told
    end = time.monotonic() + chunk_client.SECONDS
    while engines(daemon):
        assert time.monotonic() < end, "an engine that is gone is shown"


def refusal(path: str, packet: bytes) -> str:
    client = chunk_client.socket.socket(chunk_client.socket.AF_UNIX, chunk_client.socket.SOCK_SEQPACKET)
    client.settimeout(chunk_client.SECONDS)
    client.connect(path + ".chunks")
    client.send(packet)
    answer = client.recv(65536)
    assert client.recv(65536) == b""
    return struct.unpack("<Ii48s456s", answer)[2].rstrip(b"\0").decode()


def test_hello_is_checked(daemon: Daemon):
    assert refusal(daemon.socket, hello(ROW, version=2)) == "VERSION_MISMATCH"
    assert refusal(daemon.socket, hello(ROW, magic=1)) == "HELLO_MALFORMED"
    assert refusal(daemon.socket, hello(ROW, engine="")) == "HELLO_MALFORMED"
    assert refusal(daemon.socket, hello(ROW, role=2)) == "HELLO_MALFORMED"
    assert refusal(daemon.socket, b"?") == "HELLO_MALFORMED"


def test_off_is_said():
    with Daemon("--set", "chunks.bytes=0") as off, pytest.raises(Refused, match="CHUNKS_OFF.*chunks.bytes"):
        ChunkClient(off.socket, ROW)
