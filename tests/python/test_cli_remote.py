# SPDX-License-Identifier: Apache-2.0
"""The verbs that take a remote tier: what they print of a real daemon and a real redis-server is valid."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import pty
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator

import numpy as np
import pytest
from cli_schema import check
from operated import DEADLINE_S, Program
from toy import Toy

import kvstrata
from kvstrata.daemon import Daemon

SEED = 20261127
TOKENS, LAYERS, HEADS, KV_HEADS, DIM = 640, 2, 4, 2, 64
MODEL = "shared"


@contextlib.contextmanager
def redis_server(folder: pathlib.Path) -> Iterator[str]:
    """Its address. Debian's redis-tools has the server's program under another name."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    program = shutil.which("redis-server") or shutil.which("redis-check-rdb")
    server = subprocess.Popen(["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder],
                              executable=program, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert time.monotonic() < deadline, f"redis-server does not listen on {port}"
            time.sleep(0.01)
        yield f"127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Program, pathlib.Path]]:
    """The program of a daemon that has put a prompt into its remote tier, and that prompt's file."""
    print(f"seed {SEED}")
    folder = tmp_path_factory.mktemp("shared")
    secret = folder / "secret"
    secret.touch(mode=0o600)
    secret.write_text(os.urandom(32).hex() + "\n")
    toy = Toy(np.random.default_rng(SEED), TOKENS)
    with redis_server(folder) as address, Daemon(
            "--set", f"remote.redis={address}", "--set", f"remote.secret_file={secret}", "--set", "remote.write=all",
            "--set", "remote.deadline=60s", "--set", "remote.deadline_most=60s",
            "--set", f"remote.tenants.uid:{os.geteuid()}.name=search") as daemon:
        with kvstrata.attach(daemon.socket) as session:
            model = session.register_model(MODEL, toy.digest, layers=LAYERS, query_heads=HEADS, kv_heads=KV_HEADS,
                                           head_dim=DIM, page_tokens=16)
            with session.open(model, "full") as sequence:
                toy.feed(session, sequence, 0, TOKENS)
                sequence.prefill_done()
                program = Program(daemon.socket)
                deadline = time.monotonic() + DEADLINE_S
                while (remote := json.loads(program.run("tier", "ls", "-o", "json"))["remotes"][0])["written"] < TOKENS // 16:
                    assert time.monotonic() < deadline, remote
                prompt = folder / "prompt.ids"
                prompt.write_text(" ".join(map(str, toy.ids)))
                yield program, prompt


def test_probe_then_purge(shared: tuple[Program, pathlib.Path]) -> None:
    program, prompt = shared
    servers = json.loads(program.run("tier", "probe", "-o", "json"))
    check("tier probe", servers)
    assert [server["reason"] for server in servers["servers"]] == [""]
    held = json.loads(program.run("tier", "probe", MODEL, str(prompt), "-o", "json"))
    check("tier probe", held)
    assert held["held"] == held["values"] == TOKENS // 16
    purged = json.loads(program.run("tier", "purge", MODEL, str(prompt), "--yes", "-o", "json"))
    check("tier purge", purged)
    assert purged == {"values": TOKENS // 16, "held": TOKENS // 16, "failed": 0, "reason": "", "why": ""}
    assert json.loads(program.run("tier", "probe", MODEL, str(prompt), "-o", "json"))["held"] == 0
    again = subprocess.run([program.path, "tier", "purge", MODEL, str(prompt), "--yes"], env=program.environment,
                           capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert again.returncode == 0 and "the servers had nothing of this prompt" in again.stderr, again


def test_purge_asks_of_what_it_deletes(shared: tuple[Program, pathlib.Path]) -> None:
    """On a terminal, where nobody says yes."""
    program, prompt = shared
    terminal, theirs = pty.openpty()
    try:
        os.write(terminal, b"n\n")
        done = subprocess.run([program.path, "tier", "purge", MODEL, str(prompt), "--tenant", "uid:7"], stdin=theirs,
                              env=program.environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    finally:
        os.close(theirs)
        os.close(terminal)
    assert done.returncode == 1 and done.stdout == "", done
    for words in (str(prompt), f"{TOKENS} tokens", MODEL, "uid:7", "Memory and disks of nodes keep"):
        assert words in done.stderr, done.stderr


def test_a_users_name_in_the_cluster_is_shown(shared: tuple[Program, pathlib.Path]) -> None:
    program, _ = shared
    for verb, rows in ((["session", "ls"], "sessions"), (["quota", "ls"], "users")):
        document = json.loads(program.run(*verb, "-o", "json"))
        check(" ".join(verb), document)
        assert "cluster:search" in {row["cluster_tenant"] for row in document[rows]}, document
        assert "cluster:search" in program.run(*verb, "-o", "wide")


def test_the_secrets_fingerprint_is_shown(shared: tuple[Program, pathlib.Path]) -> None:
    program, _ = shared
    fingerprint = json.loads(program.run("tier", "ls", "-o", "json"))["remotes"][0]["secret_fingerprint"]
    assert re.fullmatch("[0-9a-f]{8}", fingerprint), fingerprint
    for verb in ("status", "tier ls"):
        assert fingerprint in program.run(*verb.split(), "-o", "wide")
    assert "OVER-RATE" in program.run("tier", "ls", "-o", "wide")


@pytest.mark.parametrize("tenant", ["search", "cluster:", "uid:x"])
def test_a_tenant_of_no_form_is_refused(shared: tuple[Program, pathlib.Path], tenant: str) -> None:
    program, prompt = shared
    for verb in (["tier", "probe"], ["tier", "purge", "--yes"]):
        done = subprocess.run([program.path, *verb, MODEL, str(prompt), "--tenant", tenant, "-o", "json"],
                              env=program.environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        assert done.returncode == 2
        assert json.loads(done.stderr)["error"]["reason"] == "REMOTE_PROMPT"


def test_tables(shared: tuple[Program, pathlib.Path]) -> None:
    program, prompt = shared
    assert program.run("tier", "probe").splitlines()[0].split() == [
        "SERVER", "ROLE", "ROUND-TRIP", "LEFT-ALONE", "VALUES", "HELD", "WHY"]
    assert "HELD-TOKENS" in program.run("tier", "probe", MODEL, str(prompt))


def test_tier_ls_lists_it_in_every_form(shared: tuple[Program, pathlib.Path]) -> None:
    program, _ = shared
    remote = json.loads(program.run("tier", "ls", "-o", "json"))["remotes"][0]
    assert program.names("tier", "ls") == [remote["servers"]]
    headers, values = (line.split(",") for line in program.run("tier", "ls", "-o", "csv").splitlines())
    row = dict(zip(headers, values, strict=True))
    assert row["SERVERS"] == remote["servers"] and int(row["WRITTEN"]) == remote["written"]
    assert row["SHARDS"] == "1" and row["ILLNESS"] == ""
    header, server = (line.split(",") for line in program.run("tier", "probe", "-o", "csv").splitlines())
    probed = dict(zip(header, server, strict=True))
    assert int(probed["ROUND-TRIP"]) > 0 and probed["LEFT-ALONE"] == "false", probed


def test_lists_fit_a_line_beside_the_names_of_many_servers(tmp_path: pathlib.Path) -> None:
    """None of which answers: what ails them is what an operator looks for."""
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text(os.urandom(32).hex() + "\n")
    servers = ",".join(f"127.0.0.{i}:1" for i in range(2, 11))
    with Daemon("--set", f"remote.redis={servers}", "--set", f"remote.secret_file={secret}") as daemon:
        program = Program(daemon.socket)
        deadline = time.monotonic() + DEADLINE_S
        while not (remote := json.loads(program.run("tier", "ls", "-o", "json"))["remotes"][0])["illness"]:
            assert time.monotonic() < deadline, remote
        for verb, wanted in ((["tier", "ls"], {"SERVERS", "SHARDS", "UNWRITTEN", "ILLNESS"}),
                             (["status"], {"REMOTE", "SHARDS", "LEFT-ALONE", "ILLNESS"})):
            lines = program.run(*verb, COLUMNS="80").splitlines()
            assert max(map(len, lines)) <= 80, lines
            header = next(line for line in lines if wanted <= set(line.split()))
            row = lines[lines.index(header) + 1]
            assert row.startswith("127.0.0") and "no server answers: " in row, row
            assert servers in program.run(*verb, "-o", "wide")
        probed = program.run("tier", "probe", codes=(1,), COLUMNS="80").splitlines()
        assert max(map(len, probed)) <= 80 and "cannot connect: " in probed[1], probed


def test_top_has_a_line_of_it(shared: tuple[Program, pathlib.Path]) -> None:
    program, _ = shared
    frame = program.run("top", "--once", "-d", "10ms", COLUMNS="80").splitlines()
    line = next(line for line in frame if line.startswith("remote"))
    assert all(word in line for word in ("found", "read", "missed", "/s")) and len(line) <= 80, line
    document = json.loads(program.run("top", "--once", "-d", "10ms", "-o", "json"))
    check("top", document)
    assert document["tiers"][-1]["tier"] == "remote"


def test_purge_wants_a_yes(shared: tuple[Program, pathlib.Path]) -> None:
    program, prompt = shared
    done = subprocess.run([program.path, "tier", "purge", MODEL, str(prompt), "-o", "json"], env=program.environment,
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 2
    assert json.loads(done.stderr)["error"]["reason"] == "CONFIRMATION_MISSING"
