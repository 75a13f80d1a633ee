# SPDX-License-Identifier: Apache-2.0
"""The status page of http.listen: what it answers to whom, and what a browser shows of it.

KVS_SCREENSHOTS=FOLDER keeps the pictures that docs/operations.md shows.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import os
import pathlib
import re
import time
from collections.abc import Iterator

import pytest
from browser import Browser, find_chromium
from chunk_client import ChunkClient, key, recalled
from conftest import PROMPT, Engine

from kvstrata.daemon import Daemon

DEADLINE_S = 30
browses = pytest.mark.skipif(find_chromium() is None, reason="SKIPPED: no chromium; apt-get install chromium")


def address(daemon: Daemon) -> str:
    line = next(line for line in daemon.said().splitlines() if "event=http " in line)
    return line.split("listen=")[1].split()[0].strip('"')


def get(daemon: Daemon, path: str, **headers: str) -> tuple[http.client.HTTPResponse, str]:
    connection = http.client.HTTPConnection(address(daemon), timeout=DEADLINE_S)
    connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    return answer, answer.read().decode()


def data(daemon: Daemon, query: str = "") -> dict:
    answer, text = get(daemon, "/status.json" + query)
    assert answer.status == 200 and answer.getheader("Content-Type") == "application/json"
    return json.loads(text)


def eventually(ask, good):
    end = time.monotonic() + DEADLINE_S
    while not good(value := ask()):
        assert time.monotonic() < end, value
    return value


# ---- what is answered ----

def test_the_page_runs_its_own_script_alone(daemon: Daemon):
    answer, page = get(daemon, "/")
    assert answer.status == 200 and answer.getheader("Content-Type").startswith("text/html")
    policy = answer.getheader("Content-Security-Policy")
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy and "http" not in policy
    for tag in ("script", "style"):
        [text] = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert not re.search(r"https?://|innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", page)
    assert answer.getheader("X-Content-Type-Options") == "nosniff"


@pytest.mark.parametrize("path", ["/", "/status.json", "/audit.json"])
def test_pages_of_others_get_nothing(daemon: Daemon, path: str):
    for status, headers in ((421, {"Host": "evil.example"}), (421, {"Host": "127.0.0.1.evil.example:80"}),
                            (403, {"Sec_Fetch_Site": "cross-site"}), (403, {"Sec_Fetch_Site": "same-site"})):
        answer, text = get(daemon, path, **headers)
        assert answer.status == status and "{" not in text and "<" not in text, (headers, text)
    for host in ("localhost", "localhost:1234", "127.0.0.1:9465", "[::1]:9465"):
        assert get(daemon, path, Host=host)[0].status in (200, 202, 429), host


def test_only_get_and_head(daemon: Daemon):
    connection = http.client.HTTPConnection(address(daemon), timeout=DEADLINE_S)
    connection.request("POST", "/audit.json")
    assert connection.getresponse().status == 405


def test_differences_of_two_answers_are_what_was_selected(daemon: Daemon, engine: Engine):
    first = eventually(lambda: data(daemon), lambda answer: answer["live"])
    then = eventually(lambda: data(daemon), lambda answer: answer["taken_us"] > first["taken_us"] and answer["live"])
    before = {s["sequence"]: s for s in first["live"]["sequences"]}
    now = {s["sequence"]: s for s in then["live"]["sequences"]}
    assert set(now) == set(engine.sequences.values())
    window = engine.sequences["window"]
    assert now[window]["steps"] > before[window]["steps"]
    assert now[window]["client"] == "live" and now[window]["plan"] == "window"
    grown = [b - a for a, b in zip(before[window]["counts"], now[window]["counts"])]
    assert grown[0] > 0 and not any(grown[2:PROMPT // 16 - 10]), grown
    assert then["counters"]["decode_steps"] > first["counters"]["decode_steps"]


def test_nothing_is_looked_up_for_nobody(daemon: Daemon, engine: Engine):
    """The first answer after a while has no sequences: they were not looked up before it."""
    assert data(daemon)["live"] is None
    eventually(lambda: data(daemon), lambda answer: answer["live"])


def test_events_go_on_behind_a_number(daemon: Daemon):
    events = data(daemon)["events"]
    assert "http" in [event["event"] for event in events]
    assert data(daemon, f"?after={events[-1]['number']}")["events"] == []
    assert len(data(daemon, f"?after={events[-2]['number']}")["events"]) == 1


def test_an_audit_is_made_once_and_not_again_at_once(daemon: Daemon, engine: Engine):
    assert data(daemon)["audit"] is None
    answer, _ = get(daemon, "/audit.json")
    assert answer.status == 202
    answer, text = get(daemon, "/audit.json")
    assert answer.status == 429 and 0 < json.loads(text)["wait_seconds"] <= 10
    audit = eventually(lambda: data(daemon), lambda answer: answer["audit"])["audit"]
    assert audit["clean"] and audit["findings"] == [] and audit["sequences"] == 2


# ---- what a browser shows ----

@pytest.fixture
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


def keep(browser: Browser, name: str) -> None:
    if folder := os.environ.get("KVS_SCREENSHOTS"):
        browser.wait_for(f"{PAINTED}.every(rows => rows >= 30)")  # which fills the picture
        browser.screenshot(pathlib.Path(folder) / name)


PAINTED = """[...document.querySelectorAll('canvas')].map(map => {
  const {data} = map.getContext('2d').getImageData(0, 0, map.width, map.height);
  const rows = [];
  for (let y = 0; y < map.height; ++y) {
    let cells = 0;
    for (let x = 0; x < map.width; ++x) cells += data[4 * (y * map.width + x) + 3] > 0;
    rows.push(cells);
  }
  return rows.filter(cells => cells > 0).length;
})"""


@browses
def test_the_page_shows_what_happens(daemon: Daemon, engine: Engine, browser: Browser):
    browser.open(f"http://{address(daemon)}/")
    browser.wait_for("document.getElementById('state').textContent === 'serving'")
    for sequence in engine.sequences.values():
        browser.wait_for(f"document.querySelector('[data-sequence=\"{sequence}\"]') !== null")
    browser.wait_for("/decode steps [1-9]/.test(document.getElementById('rates').textContent)")
    browser.wait_for(f"{PAINTED}.every(rows => rows >= 8)")
    browser.wait_for("document.getElementById('events').textContent.includes('client=live')")
    browser.value("document.getElementById('ask').click()")
    browser.wait_for("document.getElementById('audit').textContent.includes('the books balance')")
    keep(browser, "status_page.png")
    assert browser.console == []
    assert {url.split("?")[0].rsplit("/", 1)[0] for url in browser.requested} == {f"http://{address(daemon)}"}


@pytest.fixture
def sharing(tmp_path: pathlib.Path) -> Iterator[Daemon]:
    """A daemon with a remote tier whose server is not there: port 1 is nobody's."""
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text("0123456789abcdef" * 4)
    with Daemon("--set", "http.listen=127.0.0.1:0", "--set", "remote.redis=127.0.0.1:1",
                "--set", f"remote.secret_file={secret}") as started:
        yield started


def test_the_remote_tier_is_told_of(daemon: Daemon, sharing: Daemon):
    assert data(daemon)["remote"] is None
    remote = eventually(lambda: data(sharing)["remote"], lambda remote: remote["illness"])
    assert remote["engine"] == "redis" and remote["read"] == remote["written"] == remote["failed"] == 0, remote


@browses
def test_the_page_shows_the_remote_tier(sharing: Daemon, browser: Browser):
    browser.open(f"http://{address(sharing)}/")
    browser.wait_for("/read 0 values, written 0/.test(document.querySelector('.box.remote')?.textContent)")
    browser.wait_for("document.querySelector('.box.remote .bad') !== null")
    assert browser.console == []


@browses
def test_the_page_shows_engines_chunks(daemon: Daemon, browser: Browser):
    """What is stored while the page is open, as a rate; before an engine comes there is nothing."""
    browser.open(f"http://{address(daemon)}/")
    browser.wait_for("last !== null")
    assert browser.value("document.querySelector('.box.chunks')") is None
    row, stored = 1 << 16, 0
    with ChunkClient(daemon.socket, row) as client:
        browser.wait_for("/engines 1/.test(document.querySelector('.box.chunks')?.textContent)")
        end = time.monotonic() + DEADLINE_S
        while not browser.value("/stored [1-9]/.test(document.querySelector('.box.chunks').textContent)"):
            assert time.monotonic() < end
            client.store({key(stored): bytes(row)})
            stored += 1
        assert client.held(1, [key(0)])[0] >= 0
        browser.wait_for("/pinned 64.0 KiB/.test(document.querySelector('.box.chunks').textContent)")
        assert data(daemon)["chunks"]["hits"] == 1 and data(daemon)["chunks"]["stored"] == stored
    assert browser.console == []


LOST = recalled((3, 1, 1.0, 1.0, 0.0), (17, 3, 0.5, 0.25, 0.125), plan=b"quest{budget = 9}", model=b"llama")


def test_what_plans_lose_in_engines_is_told(daemon: Daemon):
    with ChunkClient(daemon.socket, 1 << 16, engine="e", role=1, space=None) as worker:
        worker.send(LOST)
        end = time.monotonic() + DEADLINE_S
        while not (engines := data(daemon)["engines"]):
            assert time.monotonic() < end
        assert engines == [{"engine": "e", "plan": "quest{budget = 9}", "model_name": "llama", "samples": 4,
                            "recall": 0.625, "worst_layer": 17, "worst_recall": 0.5}]
        metrics = get(daemon, "/metrics")[1].splitlines()
        assert 'kvstrata_engine_recall_samples_total{plan="quest"} 4' in metrics
        assert 'kvstrata_engine_recall_ratio{plan="quest"} 0.625' in metrics
    while data(daemon)["engines"]:
        assert time.monotonic() < end
    assert 'kvstrata_engine_recall_samples_total{plan="quest"} 4' in get(daemon, "/metrics")[1].splitlines()


@browses
def test_the_page_shows_what_plans_lose_in_engines(daemon: Daemon, browser: Browser):
    browser.open(f"http://{address(daemon)}/")
    name = "<b>e</b>"
    with ChunkClient(daemon.socket, 1 << 16, engine=name, role=1, space=None) as worker:
        worker.send(LOST)
        browser.wait_for("/worst layer 17/.test(document.querySelector('.box.chunks')?.textContent)")
        shown = browser.value("document.querySelector('.box.chunks').lastChild.textContent")
        assert shown == f"{name}: quest{{budget = 9}}, recall 0.6250, worst layer 17: 0.5000, samples 4, llama"
    browser.wait_for("!/worst layer/.test(document.querySelector('.box.chunks').textContent)")
    assert browser.console == []


@browses
def test_names_are_text(daemon: Daemon, browser: Browser):
    name = "<img src=x onerror=alert(1)><script>document.title='stolen'</script>"
    engine = Engine(daemon.socket, "linked", name[:60])
    try:
        browser.open(f"http://{address(daemon)}/")
        browser.wait_for("[...document.querySelectorAll('.name')].some(cell => cell.textContent.includes('<img src=x'))")
        assert browser.value("document.querySelectorAll('img').length") == 0
        assert browser.value("document.title") == "kvstratad"
        assert browser.console == []
    finally:
        engine.stop()


@browses
def test_a_daemon_that_goes_is_said(browser: Browser):
    with Daemon("--set", "http.listen=127.0.0.1:0") as daemon:
        browser.open(f"http://{address(daemon)}/")
        browser.wait_for("document.getElementById('state').textContent === 'serving'")
        daemon.process.kill()
        browser.wait_for("document.getElementById('state').textContent.startsWith('AWAY')")


@browses
def test_an_open_page_costs_an_idle_daemon_little(daemon: Daemon, browser: Browser):
    """CPU time of the daemon over ten looks with the page open: below 1 % of a core."""
    engine = Engine(daemon.socket, "linked")  # its sequences are there, and nobody decodes
    try:
        browser.open(f"http://{address(daemon)}/")
        browser.wait_for("document.querySelectorAll('canvas').length === 2")

        def looked() -> tuple[int, float]:
            with open(f"/proc/{daemon.process.pid}/stat", encoding="ascii") as stat:
                fields = stat.read().rsplit(")", 1)[1].split()
            return browser.value("last.taken_us"), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        begin, used = looked()
        browser.wait_for(f"last.taken_us >= {begin + 20_000_000}")
        end, used_then = looked()
        part = (used_then - used) / ((end - begin) / 1e6)
        print(f"{100 * part:.2f} % of a core")
        assert part < 0.01
    finally:
        engine.stop()
