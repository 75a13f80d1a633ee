# SPDX-License-Identifier: Apache-2.0
"""A NaN that is in a remote tier already, from a daemon that did not look, is a miss; and none is put there. Keys and
bytes are made here once more, of docs/remote_format.md alone."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from operated import DEADLINE_S, Program
from redis_server import Redis, redis_server
from toy import DIM, HEADS, KV_HEADS, LAYERS, Toy

import kvstrata
from kvstrata.daemon import Daemon

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "reference"))
from remote_format import HEADER, Tenant  # noqa: E402

PAGE, PAGES = 16, 4
N = PAGE * PAGES
TENANT = b"kvstrata"  # the default of remote.tenant
ROWS = struct.pack("<q", 2)  # every row was finite when it became a page
NAN = np.uint16(0x7FC0)  # in bf16


@dataclass
class Cluster:
    folder: pathlib.Path
    redis: Redis

    @property
    def secret(self) -> pathlib.Path:
        return self.folder / "secret"

    @contextlib.contextmanager
    def node(self) -> Iterator[Daemon]:
        settings = (f"remote.redis={self.redis.address}", f"remote.secret_file={self.secret}", "remote.write=all",
                    "remote.min_tokens=1", "remote.deadline=60s", "remote.deadline_most=60s")
        with Daemon(*(word for setting in settings for word in ("--set", setting))) as daemon:
            yield daemon

    def put(self, name: str, value: bytes) -> None:
        assert self.redis.ask(b"SET", name.encode(), value) == b"+OK\r\n"


@pytest.fixture
def cluster(tmp_path: pathlib.Path) -> Iterator[Cluster]:
    with redis_server() as redis:
        made = Cluster(tmp_path, redis)
        made.secret.touch(mode=0o600)
        made.secret.write_text(os.urandom(32).hex() + "\n")
        yield made


@pytest.fixture
def toy(random: np.random.Generator) -> Toy:
    return Toy(random, N + 1)


def register(session: kvstrata.Session, toy: Toy) -> kvstrata.Model:
    return session.register_model("toy", toy.digest, layers=LAYERS, query_heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM,
                                  page_tokens=PAGE, dtype=kvstrata.DType.BF16)


def remote_of(daemon: Daemon) -> dict[str, int]:
    return json.loads(Program(daemon.socket).run("tier", "ls", "-o", "json"))["remotes"][0]


def await_written(daemon: Daemon, pages: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while (remote := remote_of(daemon))["written"] < pages or remote["waiting"]:
        assert time.monotonic() < deadline, remote
        time.sleep(0.01)


def keys_of(toy: Toy, rows: bytes | None) -> list[bytes]:
    """Keys of the toy's pages. rows: None, as daemons made them that did not look at rows."""
    field = lambda tag, data: struct.pack("<BQ", tag, len(data)) + data
    numbers = lambda *some: struct.pack(f"<{len(some)}q", *some)
    begin = (field(1, f"uid:{os.geteuid()}".encode()) + field(2, toy.digest.encode()) + field(3, b"")
             + field(4, numbers(LAYERS, HEADS, KV_HEADS, DIM, PAGE, 0)) + field(5, numbers(int(kvstrata.DType.BF16)))
             + field(6, b"") + field(7, numbers(0, 1)) + (field(16, rows) if rows else b""))
    keys = [bytes(32)]
    for page in toy.ids[:N].reshape(PAGES, PAGE):
        keys.append(hashlib.sha256(begin + field(8, keys[-1]) + field(9, page.astype("<i4").tobytes())).digest())
    return keys[1:]


def computed(daemon: Daemon, toy: Toy) -> int:
    """What is held of the prompt; the rest is computed, and what is new is written."""
    with kvstrata.attach(daemon.socket) as session, session.open(register(session, toy), "full", toy.ids) as sequence:
        toy.feed(session, sequence, sequence.held, N + 1)
        sequence.prefill_done()
        return sequence.held


def values_of(cluster: Cluster, tenant: Tenant, keys: list[bytes]) -> list[bytes]:
    """Bytes of the pages under these keys, which have one place, their first."""
    got = [cluster.redis.get(tenant.name(key, keys[0]).encode()) for key in keys]
    return [tenant.read(key, [len(found) - HEADER], [found], int(time.time()))[0] for key, found in zip(keys, got)]


@pytest.mark.parametrize("rows", [None, ROWS], ids=["a daemon that did not look", "one that did"])
def test_what_others_put(cluster: Cluster, toy: Toy, rows: bytes | None):
    """Pages with a NaN under older keys are a miss. Under keys of now they would be hits: such a daemon has looked."""
    tenant = Tenant(cluster.secret.read_text().strip().encode(), TENANT)
    with cluster.node() as daemon:
        assert computed(daemon, toy) == 0
        await_written(daemon, PAGES)
    values = values_of(cluster, tenant, keys_of(toy, ROWS))
    assert cluster.redis.ask(b"FLUSHALL") == b"+OK\r\n"
    keys = keys_of(toy, rows)
    for key, value in zip(keys, values):
        spoilt = np.frombuffer(value, np.uint16).copy()
        spoilt[5] = NAN
        [stripe] = tenant.write(key, [spoilt.tobytes()], int(time.time()))
        cluster.put(tenant.name(key, keys[0]), stripe)
    with cluster.node() as daemon:
        assert computed(daemon, toy) == (N if rows else 0)
        remote = remote_of(daemon)
        assert (remote["searched"], remote["found"]) == (PAGES, PAGES if rows else 0)


def test_none_is_put(cluster: Cluster, toy: Toy):
    """An append of it is refused, so pages before it are all that others find."""
    toy.v[1, 3 * PAGE + 2, 0, 7] = np.nan
    with cluster.node() as daemon:
        with kvstrata.attach(daemon.socket) as session, session.open(register(session, toy), "full", toy.ids) as sequence:
            toy.feed(session, sequence, 0, 2 * PAGE)
            with pytest.raises(kvstrata.InvalidArgument, match="TENSOR_NOT_FINITE"):
                toy.feed(session, sequence, 2 * PAGE, N + 1)
        await_written(daemon, 2)
    assert cluster.redis.ask(b"DBSIZE") == b":2\r\n"
    with cluster.node() as daemon, kvstrata.attach(daemon.socket) as session:
        with session.open(register(session, toy), "full", toy.ids) as sequence:
            assert sequence.held == 2 * PAGE
