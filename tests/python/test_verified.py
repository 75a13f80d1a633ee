# SPDX-License-Identifier: Apache-2.0
"""Held positions that an engine computed anew and compared, both transports: metrics, the event, and what becomes of the
sequence after a mismatch."""

from __future__ import annotations

import http.client
import json
import pathlib
import re
import subprocess
from collections.abc import Iterator

import numpy as np
import pytest
from toy import Toy

import kvstrata
from kvstrata.daemon import Daemon, find_daemon

N = 80


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon("--set", "http.listen=127.0.0.1:0") as started:
        yield started


def counts(daemon: Daemon) -> dict[str, int]:
    """Counts of both results, from /metrics."""
    log = pathlib.Path(daemon.log).read_text()
    [port] = re.findall(r"event=http .*listen=\S*127\.0\.0\.1:(\d+)", log)
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=30)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    return {result: int(n) for result, n in
            re.findall(r'^kvstrata_verified_hits_total\{result="(\w+)"\} (\d+)$', text, re.MULTILINE)}


def events(daemon: Daemon, name: str) -> list[dict]:
    command = [find_daemon().removesuffix("d"), "--socket", daemon.socket, "events", "-o", "json"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [event for event in json.loads(lines)["events"] if event["event"] == name]


def test_a_mismatch_is_told_counted_and_found_by_nobody(daemon: Daemon, session: kvstrata.Session,
                                                        random: np.random.Generator):
    toy, before = Toy(random, N + 32), counts(daemon)
    with session.open(toy.register(session), "full", toy.ids[:N + 1]) as first:
        toy.feed(session, first, 0, N)
    with session.open(toy.register(session), "full", toy.ids[:N + 1]) as sequence:
        assert sequence.held == N
        sequence.report_verified(0, 16, True)
        sequence.report_verified(48, 16, False)
        toy.feed(session, sequence, N, N + 32)
        assert session.lookup(toy.register(session), toy.ids).held == N, "what is computed on it is nobody's"
        assert sequence.tokens == N + 32
        handle = sequence.handle
    after = counts(daemon)
    assert {result: after[result] - before[result] for result in after} == {"equal": 1, "mismatch": 1}
    [event] = [e for e in events(daemon, "hit_mismatch") if str(e["fields"]["sequence"]) == str(handle)]
    assert (event["level"], int(event["fields"]["first"]), int(event["fields"]["tokens"])) == ("error", 48, 16)


def test_only_of_a_sequence_of_the_session(session: kvstrata.Session, random: np.random.Generator):
    toy = Toy(random, N)
    sequence = session.open(toy.register(session), "full", toy.ids)
    handle = sequence.handle
    sequence.close()
    with pytest.raises(kvstrata.NotFound):
        session._lib.check(session._lib.kvs_report_verified(session.handle, handle, 0, 16, 1))
    with session.open(toy.register(session), "full", toy.ids) as sequence, pytest.raises(kvstrata.InvalidArgument):
        session._lib.check(session._lib.kvs_report_verified(session.handle, sequence.handle, 0, 16, 2))
