# SPDX-License-Identifier: Apache-2.0
"""Engine chunks as an operator sees them: status, top, /status.json, lists, events, checks."""

from __future__ import annotations

import contextlib
import json
import pathlib
import re
import time
from collections.abc import Iterator
from typing import Any

import chunk_client
import pytest
from chunk_client import ChunkClient, key
from cli_schema import check
from operated import Program

from kvstrata.chunks import WORKER, ChunkLink, LayerRecall
from kvstrata.daemon import Daemon

MIB = 1 << 20
ROW = MIB // 4
ROWS = 64 * MIB // ROW


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon("--set", "chunks.bytes=64MiB") as started:
        yield started
        assert started.process.poll() is None, f"kvstratad died:\n{started.said()}"


def document(daemon: Daemon, *words: str) -> dict[str, Any]:
    return json.loads(Program(daemon.socket).run(*words, "-o", "json"))


def fill(client: ChunkClient, first: int, count: int) -> None:
    """Stores so many chunks; when the last one is shown, all are."""
    for at in range(first, first + count, ROWS // 8):
        client.store({key(n): bytes(client.row_bytes) for n in range(at, min(at + ROWS // 8, first + count))})
    client.held(1, [key(first + count - 1)])
    client.release(1)


def test_status_and_top_show_the_room(daemon: Daemon):
    cli = Program(daemon.socket)
    assert "CHUNKS-OF" not in cli.run("status")
    assert document(daemon, "top", "--once", "-d", "10ms")["chunks"] is None
    with ChunkClient(daemon.socket, ROW) as client:
        fill(client, 0, 20)
        leased = client.held(2, [key(n) for n in range(12)] + [key(99)])
        assert min(leased[:12]) >= 0
        headers, row = [line.split() for line in cli.run("status").splitlines() if "uid:" in line or "CHUNKS" in line]
        shown = dict(zip(headers, row[:1] + [" ".join(row[1:3]), " ".join(row[3:5]), " ".join(row[5:7])] + row[7:]))
        assert shown["CAPACITY"] == "64.0 MiB" and shown["USED"] == "5.0 MiB" and shown["LEASED"] == "3.0 MiB"
        assert (shown["SHOWN"], shown["ENGINES"], shown["RESTING"]) == ("20", "1", "0")
        assert int(shown["HITS"]) + int(shown["MISSES"]) >= 13 and shown["STORED"] == "20"
        frame = document(daemon, "top", "--once", "-d", "10ms")
        check("top", frame)
        assert frame["chunks"]["shown"] == 20 and frame["chunks"]["leased_bytes"] == 12 * ROW
        assert [tier["used_bytes"] for tier in frame["tiers"] if tier["tier"] == "chunks"] == [20 * ROW]
        lines = cli.run("top", "--once", "-d", "10ms", "--ascii").splitlines()
        at = next(n for n, line in enumerate(lines) if line.startswith("chunks "))
        assert "leased 3.0 MiB  engines 1" in lines[at] and lines[at + 1].split()[0] == "hits", lines


@contextlib.contextmanager
def telling(daemon: Daemon, name: str, *layers: LayerRecall, plan: str = "quest{budget = 2048}") -> Iterator[ChunkLink]:
    """A worker whose engine has told this."""
    with ChunkLink(daemon.socket, role=WORKER, row_bytes=ROW, engine=name, client_name="test") as link:
        assert link.recalled(plan, "llama", layers)
        end = time.monotonic() + chunk_client.SECONDS
        while name.replace("\x1b", "?") not in Program(daemon.socket).names("audit", "--engine"):
            assert time.monotonic() < end
        yield link


def test_what_plans_lose_in_engines(daemon: Daemon):
    cli = Program(daemon.socket)
    check("audit --engine", document(daemon, "audit", "--engine"))
    assert cli.run("audit", "--engine", "-o", "csv").splitlines()[1:] == []
    first = [LayerRecall(0, 2, 1.0, 1.0, 0.0), LayerRecall(17, 2, 0.5, 0.25, 0.125)]
    with telling(daemon, "dp0", *first), telling(daemon, "d p1\x1b", LayerRecall(1, 1, 0.75, 0.75, 0.5), plan="bits"):
        names = ["d p1?", "dp0"]
        assert cli.names("audit", "--engine") == names == cli.run("__names", "engines").splitlines()
        _, other, row = [line.split("  ") for line in cli.run("audit", "--engine").splitlines()]
        assert other[0] == "d p1?" and [word.strip() for word in row if word] == [
            "dp0", "quest{budget = 2048}", "llama", "4", "0.2500", "0.7500", "0.2500", "0.0625", "17", "0.5000"]
        lines = cli.run("audit", "--engine", "dp0").splitlines()
        assert lines[0] == "engine dp0, plan quest{budget = 2048}, model llama"
        assert [line.split() for line in lines[3:]] == [
            ["LAYER", "SAMPLES", "MISSED", "RECALL", "LEAST", "ERROR"],
            ["0", "2", "0.0000", "1.0000", "1.0000", "0"], ["17", "2", "0.5000", "0.5000", "0.2500", "0.125"],
            ["all", "4", "0.2500", "0.7500", "0.2500", "0.0625"]]
        assert cli.run("audit", "--engine=d p1?", "-o", "csv").splitlines()[1].split(",")[:2] == ["1", "1"]
        both, one = document(daemon, "audit", "--engine"), document(daemon, "audit", "--engine", "dp0")
        check("audit --engine", both)
        check("audit --engine", one)
        assert both["engines"][1] == one["engines"][0] and one["engines"][0]["worst"]["layer"] == 17
        cli.run("audit", "--engine", "dp1", codes=(5,))
        cli.run("audit", "--engine", "dp0", "--recall", "3", codes=(2,))
        frame = document(daemon, "top", "--once", "-d", "10ms")
        check("top", frame)
        assert frame["engines"][1] == {"engine": "dp0", "plan": "quest{budget = 2048}", "model_name": "llama", "samples": 4,
                                       "recall": 0.75, "worst_layer": 17, "worst_recall": 0.5}
        assert ("       dp0  recall 0.7500  worst layer 17: 0.5000  quest{budget = 2048}  samples 4  llama"
                in cli.run("top", "--once", "-d", "10ms", "--ascii").splitlines())
    end = time.monotonic() + chunk_client.SECONDS
    while cli.names("audit", "--engine"):
        assert time.monotonic() < end, "engines that are gone are shown"


def test_evictions_are_one_event_a_burst(daemon: Daemon):
    with ChunkClient(daemon.socket, ROW) as client:
        fill(client, 0, 2 * ROWS)
        end = time.monotonic() + chunk_client.SECONDS
        evicted = []
        while sum(int(event["fields"]["chunks"]) for event in evicted) < ROWS:
            assert time.monotonic() < end, evicted
            events = document(daemon, "events")["events"]
            evicted = [event for event in events if event["event"] == "evicted"]
        assert len(evicted) <= 3 and sum(int(event["fields"]["chunks"]) for event in evicted) == ROWS, evicted
        assert document(daemon, "status")["chunk_rooms"][0]["evicted"] == ROWS


def lists(daemon: Daemon, *words: str) -> list[dict[str, Any]]:
    return document(daemon, "value", "ls", "--limit", "0", *words)["values"]


def test_lists_have_memory_and_disk_each_chunk_once(tmp_path: pathlib.Path):
    """Chunks that memory has, then those that went from it to the disk alone. Keys are hashes."""
    disk = [f"disk.path={tmp_path}/disk", "disk.budget_bytes=512MiB", "disk.segment_bytes=16MiB"]
    cli_words = [word for setting in ["chunks.bytes=16MiB", *disk] for word in ("--set", setting)]
    rows = 16 * MIB // ROW
    with Daemon(*cli_words) as daemon, ChunkClient(daemon.socket, ROW) as client:
        for n in range(0, 2 * rows, 8):
            client.store({key(m): bytes([m]) * ROW for m in range(n, n + 8)})
            client.held(1, [key(m) for m in range(n, n + 8)])
            client.release(1)
        end = time.monotonic() + chunk_client.SECONDS
        while len(lists(daemon, "--tier", "disk")) < 2 * rows:
            assert time.monotonic() < end
        values = lists(daemon)
        assert len(values) == len({value["key"] for value in values}) == 2 * rows
        assert {value["kind"] for value in values} == {"chunk"} and {value["bytes"] for value in values} == {ROW}
        held = [value for value in values if "host" in value["tiers"]]
        assert len(held) == rows and all(value["tiers"] == ["host", "disk"] for value in held)
        assert lists(daemon, "--tier", "host") == held
        assert all(re.fullmatch("chunk/[0-9a-f]{64}", value["key"]) for value in values)
        # One at a time, every list goes on where the one before ended.
        parts, after = [], "0"
        while not parts or after != "0":
            part = document(daemon, "value", "ls", "--limit", "5", "--after", after)
            parts += [value["key"] for value in part["values"]]
            after = part["next"]
        assert sorted(parts) == sorted(value["key"] for value in values)
        verdicts = document(daemon, "value", "verify", *[value["key"] for value in values[:3] + values[-3:]])["values"]
        assert {verdict["verdict"] for verdict in verdicts} == {"sound"}


def test_a_chunk_of_memory_alone_is_listed_fetched_and_unchecked(daemon: Daemon, tmp_path: pathlib.Path):
    assert lists(daemon) == []
    with ChunkClient(daemon.socket, ROW) as client:
        client.store({key(1): b"abcd" * (ROW // 4)})
        client.held(1, [key(1)])
        (value,) = lists(daemon)
        assert value["kind"] == "chunk" and value["tiers"] == ["host"] and value["bytes"] == ROW
        fetched = document(daemon, "value", "get", value["key"][:12], "--out", f"{tmp_path}/chunk")
        assert fetched["tier"] == "host" and (tmp_path / "chunk").read_bytes() == b"abcd" * (ROW // 4)
        assert document(daemon, "value", "verify", value["key"])["values"][0]["verdict"] == "unchecked"
        missing = Program(daemon.socket).run("value", "verify", "chunk/" + 64 * "0", "-o", "json", codes=(1,))
        assert json.loads(missing)["values"][0]["verdict"] == "gone"
