# SPDX-License-Identifier: Apache-2.0
"""Engine chunks as an operator sees them: status, top, /status.json, lists, events, checks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import chunk_client
import pytest
from chunk_client import ChunkClient, key
from cli_schema import check
from operated import Program

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
