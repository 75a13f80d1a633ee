# SPDX-License-Identifier: Apache-2.0
"""`kvstrata lookup --cluster` of two real daemons and a real redis-server: who has how much of a prompt, and what becomes
of nodes that die, hang, or are none. Announcements are made here once more, of docs/remote_format.md alone."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import pathlib
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from cli_schema import check
from operated import Program
from redis_server import DEADLINE_S, Redis, free_port, redis_server
from toy import Toy

import kvstrata
from kvstrata.daemon import Daemon

SECRET = "0123456789abcdef0123456789abcdef"
PROMPT, PART = 40 * 16 + 5, 24 * 16 + 5
WHOLE, HELD_PART = 40 * 16, 24 * 16


def derive(secret: str, use: str) -> bytes:
    extracted = hmac.digest(b"kvstrata remote tier", secret.encode(), "sha256")
    return hmac.digest(extracted, f"kvstrata kv1 none {use}\0".encode() + b"\1", "sha256")


def announcement(secret: str, seat: int, address: str) -> tuple[bytes, bytes]:
    """Name and bytes; the name is always this cluster's, as whoever watches the servers sees it."""
    place = hmac.digest(derive(SECRET, "place"), b"nodes", "sha256")[:8].hex()
    head = b"KVSNODE1" + struct.pack("<IIQQIHH", 1, 0, 77, int(time.time()), seat, len(address), 5)
    tagged = head + address.encode().ljust(256, b"\0") + b"9.9.9".ljust(56, b"\0")
    return f"kv1:{{{place}}}:node.{seat}".encode(), tagged + hmac.digest(derive(secret, "envelope"), tagged, hashlib.sha256)


class Node:
    """A daemon that announces itself, and a session of it."""

    def __init__(self, stack: contextlib.ExitStack, folder: pathlib.Path, redis: Redis, toy: Toy, *more: str) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.daemon = stack.enter_context(Daemon(
            "--set", f"remote.redis={redis.address}", "--set", f"remote.secret_file={folder}/secret",
            "--set", f"remote.announce={self.address}", "--set", "remote.write=all",
            "--set", "remote.deadline=60s", "--set", "remote.deadline_most=60s", *more))
        self.program = Program(self.daemon.socket)
        self.toy = toy
        self.session = kvstrata.attach(self.daemon.socket)
        self.model = toy.register(self.session)

    def serve(self, tokens: int) -> None:
        """Computes what is not held of so many tokens, and waits until the remote tier has it."""
        sequence = self.session.open(self.model, "full", self.toy.ids[:tokens])
        held = sequence.held
        self.toy.feed(self.session, sequence, held, tokens)
        sequence.prefill_done()
        eventually(lambda: json.loads(self.program.run("tier", "ls", "-o", "json"))["remotes"][0]["waiting"] == 0)

    def lookup(self, folder: pathlib.Path, *words: str) -> dict:
        return json.loads(self.program.run("lookup", "1", str(folder / "prompt.ids"), "--cluster", "-o", "json", *words))


def eventually(done: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not done():
        assert time.monotonic() < end


def by_address(view: dict) -> dict[str, dict]:
    return {node["address"]: node for node in view["nodes"]}


@pytest.fixture
def cluster(tmp_path: pathlib.Path) -> Iterator[tuple[Redis, Node, Node]]:
    seed = 20261127
    print(f"seed {seed}")
    toy = Toy(np.random.default_rng(seed), PROMPT)
    secret = tmp_path / "secret"
    secret.write_text(SECRET + "\n")
    secret.chmod(0o600)
    (tmp_path / "prompt.ids").write_text(" ".join(map(str, toy.ids)))
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(redis_server())
        a, b = (Node(stack, tmp_path, redis, toy) for _ in range(2))
        eventually(lambda: set(by_address(a.lookup(tmp_path))) == {a.address, b.address})
        yield redis, a, b


def test_each_node_says_what_it_has(cluster: tuple[Redis, Node, Node], tmp_path: pathlib.Path) -> None:
    _, a, b = cluster
    a.serve(PROMPT)
    b.serve(PART)
    for asked, other in ((a, b), (b, a)):
        view = asked.lookup(tmp_path)
        check("lookup --cluster", view)
        assert (view["tokens"], view["page_tokens"], view["remote_tokens"]) == (WHOLE, 16, WHOLE)
        assert (view["remote_error"], view["nodes_error"], view["refused_announcements"]) == ("", "", 0)
        assert [node["address"] for node in view["nodes"]] == [asked.address, other.address]
        assert [node["self"] for node in view["nodes"]] == [True, False]
        for node, held in ((by_address(view)[a.address], WHOLE), (by_address(view)[b.address], HELD_PART)):
            assert node["unreachable"] == "", node
            assert node["held_tokens"] == node["device_tokens"] + node["host_tokens"] + node["disk_tokens"] == held
            assert node["with_remote_tokens"] == WHOLE
    table = a.program.run("lookup", "1", str(tmp_path / "prompt.ids"), "--cluster").splitlines()
    assert table[0].split() == ["NODE", "GPU", "HOST", "DISK", "REMOTE", "AGE", "UNREACHABLE", "WHY"]
    assert table[2].split()[0] == b.address
    assert table[2].split()[4] == str(WHOLE - HELD_PART)


def test_a_tenant_is_named_as_the_cluster_does(cluster: tuple[Redis, Node, Node], tmp_path: pathlib.Path) -> None:
    """User 777 of one node is who runs the other one; the third has users of its own only."""
    redis, stranger, _ = cluster
    prompt = str(tmp_path / "prompt.ids")
    with contextlib.ExitStack() as stack:
        mine = f"remote.tenants.uid:{os.geteuid()}.name=search"
        has = Node(stack, tmp_path, redis, stranger.toy, "--set", mine)
        asked = Node(stack, tmp_path, redis, stranger.toy, "--set", "remote.tenants.uid:777.name=search")
        for node in (has, asked, stranger):
            eventually(lambda node=node: has.address in by_address(node.lookup(tmp_path)))
        has.serve(PROMPT)

        def held(node: Node, tenant: str) -> tuple[int, int, int]:
            """By the node that has it, by the tier; and by the tier as `tier probe` says."""
            view = node.lookup(tmp_path, "--tenant", tenant, "--timeout", "12s")
            probe = json.loads(node.program.run("tier", "probe", "1", prompt, "--tenant", tenant, "-o", "json"))
            return by_address(view)[has.address]["held_tokens"], view["remote_tokens"], probe["held_tokens"]

        all_of_it, nothing = (WHOLE,) * 3, (0,) * 3
        assert held(asked, "uid:777") == all_of_it
        assert held(asked, "cluster:search") == all_of_it
        assert held(stranger, "cluster:search") == all_of_it
        assert held(has, f"uid:{os.geteuid()}") == all_of_it
        assert held(asked, f"uid:{os.geteuid()}") == nothing
        assert held(stranger, "uid:777") == nothing
        purge = ["tier", "purge", "1", prompt, "--yes", "-o", "json", "--tenant"]
        assert json.loads(asked.program.run(*purge, f"uid:{os.geteuid()}"))["held"] == 0
        assert json.loads(asked.program.run(*purge, "uid:777"))["held"] == WHOLE // 16
        assert held(asked, "uid:777") == (WHOLE, 0, 0)


def test_who_died_or_hangs_is_told_of_and_holds_nobody_up(cluster: tuple[Redis, Node, Node], tmp_path: pathlib.Path
                                                          ) -> None:
    _, a, b = cluster
    b.daemon.process.send_signal(signal.SIGSTOP)
    try:
        node = by_address(a.lookup(tmp_path))[b.address]
        assert (node["unreachable"], node["held_tokens"]) == ("DEADLINE", 0)
        node = by_address(a.lookup(tmp_path, "--timeout", "500ms"))[b.address]
        assert node["unreachable"] == "DEADLINE"
    finally:
        b.daemon.process.send_signal(signal.SIGCONT)
    eventually(lambda: by_address(a.lookup(tmp_path))[b.address]["unreachable"] == "")
    b.daemon.process.kill()
    b.daemon.process.wait()
    node = by_address(a.lookup(tmp_path))[b.address]
    assert node["unreachable"] in ("DAEMON_GONE", "DEADLINE"), node
    assert a.lookup(tmp_path)["nodes"][0]["unreachable"] == ""


def test_who_stops_leaves_the_list(cluster: tuple[Redis, Node, Node], tmp_path: pathlib.Path) -> None:
    _, a, b = cluster
    assert b.daemon.stop() == 0
    eventually(lambda: set(by_address(a.lookup(tmp_path))) == {a.address})


def test_what_no_node_wrote_is_left_out(cluster: tuple[Redis, Node, Node], tmp_path: pathlib.Path) -> None:
    redis, a, b = cluster
    name, planted = announcement("another-secret-of-more-than-32-characters", 3, "127.0.0.1:1")
    assert redis.ask(b"SET", name, planted) == b"+OK\r\n"
    name, moved = announcement(SECRET, 4, "127.0.0.1:2")
    assert redis.ask(b"SET", name.replace(b"node.4", b"node.5"), moved) == b"+OK\r\n"
    eventually(lambda: a.lookup(tmp_path)["refused_announcements"] == 2)
    assert set(by_address(a.lookup(tmp_path))) == {a.address, b.address}
    # What this page's bytes say is taken: it is what a node would have written.
    name, sound = announcement(SECRET, 6, "127.0.0.1:1")
    assert redis.ask(b"SET", name, sound) == b"+OK\r\n"
    eventually(lambda: "127.0.0.1:1" in by_address(a.lookup(tmp_path)))
    node = by_address(a.lookup(tmp_path))["127.0.0.1:1"]
    assert (node["release"], node["unreachable"]) == ("9.9.9", "DAEMON_GONE")


def test_who_has_no_secret_is_answered_nothing(cluster: tuple[Redis, Node, Node], tmp_path: pathlib.Path) -> None:
    redis, a, _ = cluster
    # A node of another cluster, to which this one's announcement leads: neither believes the other.
    other = tmp_path / "other"
    other.mkdir()
    (other / "secret").write_text("fedcba9876543210fedcba9876543210\n")
    (other / "secret").chmod(0o600)
    with contextlib.ExitStack() as stack:
        stranger = Node(stack, other, redis, a.toy)
        name, sound = announcement(SECRET, 7, stranger.address)
        assert redis.ask(b"SET", name, sound) == b"+OK\r\n"
        eventually(lambda: stranger.address in by_address(a.lookup(tmp_path)))
        assert by_address(a.lookup(tmp_path))[stranger.address]["unreachable"] == "NODE_MAC"
        assert set(by_address(stranger.lookup(tmp_path))) == {stranger.address}


def test_without_servers_the_asked_node_answers(cluster: tuple[Redis, Node, Node], tmp_path: pathlib.Path) -> None:
    redis, a, _ = cluster
    a.serve(PROMPT)
    redis.ask(b"SHUTDOWN", b"NOSAVE")
    view = a.lookup(tmp_path)
    assert view["nodes"][0]["held_tokens"] == WHOLE
    eventually(lambda: a.lookup(tmp_path)["remote_error"] != "")


def certificates(folder: pathlib.Path) -> list[str]:
    """An authority's, and one for 127.0.0.1 that it signed; as flags."""
    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=DEADLINE_S)

    new = ["req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    openssl(*new, "-x509", "-days", "2", "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.crt")
    openssl(*new, "-subj", "/CN=node", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "node.key", "-out", "node.csr")
    openssl("x509", "-req", "-days", "2", "-copy_extensions", "copy", "-in", "node.csr", "-CA", "ca.crt", "-CAkey",
            "ca.key", "-CAcreateserial", "-out", "node.crt")
    return ["--set", f"remote.tls_ca_file={folder}/ca.crt", "--set", f"remote.tls_cert_file={folder}/node.crt",
            "--set", f"remote.tls_key_file={folder}/node.key"]


def test_nodes_with_certificates_answer_those_with_certificates(cluster: tuple[Redis, Node, Node],
                                                                tmp_path: pathlib.Path) -> None:
    redis, a, _ = cluster
    with contextlib.ExitStack() as stack:
        tls = certificates(tmp_path)
        c, d = (Node(stack, tmp_path, redis, a.toy, *tls) for _ in range(2))
        eventually(lambda: {c.address, d.address} <= set(by_address(c.lookup(tmp_path))))
        nodes = by_address(c.lookup(tmp_path))
        assert nodes[d.address]["unreachable"] == ""
        assert nodes[a.address]["unreachable"] != ""  # it speaks no TLS
        assert by_address(a.lookup(tmp_path))[c.address]["unreachable"] != ""


def test_a_taken_port_is_named_with_the_systems_words(tmp_path: pathlib.Path) -> None:
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "secret").chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(kvstrata.KvstrataError) as error:
            Daemon("--set", "remote.redis=127.0.0.1:1", "--set", f"remote.secret_file={tmp_path}/secret",
                   "--set", f"remote.announce={address}")
    said = str(error.value)
    assert f"remote.announce = '{address}': Address already in use" in said and "REMOTE_ANNOUNCE_IN_USE" in said, said
    assert "event=grpc" not in said, said


def test_beyond_loopback_certificates_are_required(tmp_path: pathlib.Path) -> None:
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "secret").chmod(0o600)
    with pytest.raises(kvstrata.KvstrataError, match="REMOTE_ANNOUNCE.*remote.tls_cert_file"):
        Daemon("--set", "remote.redis=127.0.0.1:1", "--set", f"remote.secret_file={tmp_path}/secret",
               "--set", "remote.announce=0.0.0.0:7500")
