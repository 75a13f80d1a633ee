# SPDX-License-Identifier: Apache-2.0
"""A clean end writes what engines have computed: a real daemon gets SIGTERM while chunks and pages wait for a disk that
has much to do, or for a redis-server that is stopped (SIGSTOP)."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import chunk_client
import numpy as np
import operated
import pytest
from chunk_client import ChunkClient, key
from redis_server import Redis, redis_server
from toy import Toy

import kvstrata
from kvstrata.daemon import Daemon

ROW = 4096
AT_ONCE = 1024  # keys of a packet


def values_of(count: int) -> dict[bytes, bytes]:
    return {key(n): n.to_bytes(8, "little") * (ROW // 8) for n in range(count)}


def store(client: ChunkClient, values: dict[bytes, bytes]) -> None:
    items = list(values.items())
    for at in range(0, len(items), AT_ONCE):
        client.store(dict(items[at:at + AT_ONCE]))


def holds(daemon: Daemon, values: dict[bytes, bytes]) -> None:
    items = list(values.items())
    with ChunkClient(daemon.socket, ROW) as client:
        for lease, at in enumerate(range(0, len(items), AT_ONCE)):
            part = dict(items[at:at + AT_ONCE])
            ids = client.held(lease, list(part))
            assert [client.read(number) for number in ids if number >= 0] == list(part.values())
            client.release(lease)


def log_of(daemon: Daemon) -> list[dict[str, object]]:
    with open(daemon.log) as log:
        return [json.loads(line) for line in log if line.startswith("{")]


def events(daemon: Daemon, name: str) -> list[dict[str, object]]:
    return [line for line in log_of(daemon) if line["event"] == name]


def await_event(daemon: Daemon, name: str) -> dict[str, object]:
    end = time.monotonic() + chunk_client.SECONDS
    while not (found := events(daemon, name)):
        assert daemon.process.poll() is None and time.monotonic() < end, daemon.said()
    return found[0]


def end(daemon: Daemon) -> None:
    """Cleanly."""
    assert daemon.process.wait(chunk_client.SECONDS) == 0, daemon.said()
    assert len(events(daemon, "stopped")) == 1


def settings(*more: str) -> list[str]:
    return [word for setting in ("log.format=json", "chunks.bytes=128MiB", "pool.device_bytes=64MiB",
                                 "pool.host_bytes=64MiB", *more) for word in ("--set", setting)]


def on_disk(folder: pathlib.Path) -> list[str]:
    return settings(f"disk.path={folder}/disk", "disk.budget_bytes=512MiB", "disk.segment_bytes=16MiB")


def test_chunks_that_wait_for_the_disk(tmp_path: pathlib.Path):
    """So many that they take the disk a while; nobody waits for any of them."""
    values = values_of(24 * AT_ONCE)
    with Daemon(*on_disk(tmp_path)) as first, ChunkClient(first.socket, ROW) as client:
        store(client, values)
        first.process.send_signal(signal.SIGTERM)
        end(first)
        (told,) = events(first, "stop_writes")
        assert 0 < told["chunks"] <= len(values) and told["bytes"] == told["chunks"] * ROW, told
        assert not events(first, "stop_dropped")
    with Daemon(*on_disk(tmp_path)) as second:
        holds(second, values)


def test_pages_that_wait_for_the_disk(tmp_path: pathlib.Path):
    tokens, patience = 8192, ["--set", "disk.load_timeout=60s"]
    toy = Toy(np.random.default_rng(7), tokens)
    with Daemon(*on_disk(tmp_path), *patience) as first, kvstrata.attach(first.socket) as session:
        model = toy.register(session)
        with session.open(model, "full", toy.ids) as sequence:
            toy.feed(session, sequence, 0, tokens)
            with session.open(model, "full", toy.ids) as other:
                assert other.held >= tokens - 16  # the daemon has heard of all
                first.process.send_signal(signal.SIGTERM)
                end(first)
        assert not events(first, "stop_dropped")
    with Daemon(*on_disk(tmp_path), *patience) as second, kvstrata.attach(second.socket) as session:
        with session.open(toy.register(session), "full", toy.ids) as sequence:
            assert sequence.held >= tokens - 16


@pytest.fixture
def redis() -> Iterator[Redis]:
    with redis_server() as server:
        yield server


@contextmanager
def silent(redis: Redis, folder: pathlib.Path, *more: str) -> Iterator[tuple[Daemon, dict[bytes, bytes]]]:
    """A daemon whose remote tier says nothing more, and chunks that wait for it."""
    values = values_of(64)
    with Daemon(*remote(redis, folder, *more)) as daemon:
        with ChunkClient(daemon.socket, ROW) as client:
            client.store({key(1 << 20): bytes(ROW)})
            program = operated.Program(daemon.socket)
            while json.loads(program.run("tier", "ls", "-o", "json"))["rooms"][0]["written"] == 0:
                pass
            os.kill(redis.pid, signal.SIGSTOP)
            client.store(values)
            client.held(1, list(values))
            daemon.process.send_signal(signal.SIGTERM)
            yield daemon, values


def remote(redis: Redis, folder: pathlib.Path, *more: str) -> list[str]:
    secret = folder / "secret"
    if not secret.exists():
        secret.touch(mode=0o600)
        secret.write_text(os.urandom(32).hex() + "\n")
    return settings(f"remote.redis={redis.address}", f"remote.secret_file={secret}", "remote.write=all", *more)


def test_a_tier_that_is_slow(redis: Redis, tmp_path: pathlib.Path):
    with silent(redis, tmp_path) as (daemon, values):
        told = await_event(daemon, "stop_writes")
        assert (told["chunks"], told["bytes"]) == (64, 64 * ROW), told
        os.kill(redis.pid, signal.SIGCONT)
        end(daemon)
        assert not events(daemon, "stop_dropped")
    with Daemon(*remote(redis, tmp_path)) as second:
        holds(second, values)


def test_a_tier_that_hangs(redis: Redis, tmp_path: pathlib.Path):
    with silent(redis, tmp_path, "shutdown.timeout=400ms", "shutdown.write_timeout=10m") as (daemon, _):
        end(daemon)
        (told,) = events(daemon, "stop_dropped")
        assert (told["chunks"], told["bytes"], told["level"]) == (64, 64 * ROW, "warning"), told
        assert told["why"] == "no tier took anything for shutdown.timeout"


def test_another_signal_ends_it(redis: Redis, tmp_path: pathlib.Path):
    with silent(redis, tmp_path, "shutdown.timeout=5s", "shutdown.write_timeout=10m") as (daemon, _):
        await_event(daemon, "stop_writes")
        daemon.process.send_signal(signal.SIGTERM)
        end(daemon)
        (told,) = events(daemon, "stop_dropped")
        assert (told["chunks"], told["why"]) == (64, "another signal to end came"), told


def test_no_time_to_write(redis: Redis, tmp_path: pathlib.Path):
    with silent(redis, tmp_path, "shutdown.write_timeout=0") as (daemon, _):
        end(daemon)
        assert not events(daemon, "stop_writes")
        (told,) = events(daemon, "stop_dropped")
        assert (told["chunks"], told["why"]) == (64, "shutdown.write_timeout was over"), told
