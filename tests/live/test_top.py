# SPDX-License-Identifier: Apache-2.0
"""`kvstrata top` and `-w` against a real daemon whose sequences decode: one frame as text, and a person's keys in a
terminal."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import termios
import time

import pytest
from conftest import PROMPT, Engine
from screen import DEADLINE_S, Screen

from kvstrata.daemon import Daemon


def run(cli: str, daemon: Daemon, *words: str) -> subprocess.CompletedProcess:
    # With Python's own environment: readline, which pytest loads, sets COLUMNS behind its back.
    return subprocess.run([cli, "--socket", daemon.socket, *words], capture_output=True, text=True, timeout=DEADLINE_S,
                          env=dict(os.environ))


@contextlib.contextmanager
def terminal(cli: str, daemon: Daemon, *words: str, **size: int):
    screen = Screen([cli, "--socket", daemon.socket, *words], **size)
    try:
        yield screen
    finally:
        screen.close()


@contextlib.contextmanager
def top(cli: str, daemon: Daemon, *words: str, **size: int):
    with terminal(cli, daemon, "top", "--delay", "300ms", *words, **size) as screen:
        screen.wait_for("TOKENS", "q quit")
        yield screen


def row_of(text: str, sequence: int) -> str | None:
    return next((line for line in text.splitlines() if re.match(rf"[> ] *{sequence} ", line)), None)


# ---- one frame ----

def test_once_is_a_frame_of_text(cli: str, daemon: Daemon, engine: Engine):
    result = run(cli, daemon, "top", "--once", "--delay", "1s", "--ascii")
    assert result.returncode == 0, result.stderr
    assert "\x1b" not in result.stdout and all(len(line) <= 100 for line in result.stdout.splitlines())
    header, rates, *_ = result.stdout.splitlines()
    assert "serving" in header and "sequences 2" in header
    assert float(re.search(r"steps ([\d.]+)/s", rates)[1]) > 0
    for plan, sequence in engine.sequences.items():
        line = row_of(result.stdout, sequence)
        assert line and plan in line and "live" in line, result.stdout
        assert re.search(r"\d %  [.1234]+$", line), line


def test_once_as_json(cli: str, daemon: Daemon, engine: Engine):
    frame = json.loads(run(cli, daemon, "top", "--once", "--delay", "1s", "-o", "json").stdout)
    assert frame["tokens_per_second"] > 0 and frame["steps_per_second"] == frame["tokens_per_second"]
    assert [tier["tier"] for tier in frame["tiers"]] == ["device", "host"]
    rows = {row["sequence"]: row for row in frame["rows"]}
    assert set(rows) == set(engine.sequences.values())
    window = rows[engine.sequences["window"]]
    # It attends 4 + 60 of at least PROMPT tokens: at most 6 of 50 pages.
    assert 0 < window["selected_share"] <= 6 / (PROMPT / 16)
    assert window["selected"][0] > 0 and not any(window["selected"][2:40]), window["selected"]


def test_looking_is_no_event(cli: str, daemon: Daemon, engine: Engine):
    """Nor does it push what happened out of the ring."""
    before = json.loads(run(cli, daemon, "events", "-o", "json").stdout)["events"]
    assert run(cli, daemon, "top", "--once", "--delay", "100ms").returncode == 0
    assert json.loads(run(cli, daemon, "events", "-o", "json").stdout)["events"] == before


def test_a_filter_and_a_missing_daemon(cli: str, daemon: Daemon, engine: Engine):
    frame = json.loads(run(cli, daemon, "top", "-b", "--delay", "100ms", "--filter", "quest", "-o", "json").stdout)
    assert [row["plan"] for row in frame["rows"]] == ["quest"]
    missing = subprocess.run([cli, "--socket", "/nowhere/k.sock", "top", "--once"], capture_output=True, text=True)
    assert missing.returncode == 3 and "DAEMON_UNREACHABLE" in missing.stderr


def test_top_in_a_pipe_says_what_to_do(cli: str, daemon: Daemon):
    result = run(cli, daemon, "top")
    assert result.returncode == 1 and "TERMINAL_NONE" in result.stderr and "--once" in result.stderr


# ---- keys ----

def test_the_table_is_alive_at_80_by_24(cli: str, daemon: Daemon, engine: Engine):
    with top(cli, daemon) as screen:
        screen.wait_until(lambda text: re.search(r"steps [1-9][\d.]*/s", text))
        sequence = engine.sequences["quest"]
        text = screen.wait_until(lambda text: re.search(r" %  [·░▒▓█]{8,}", row_of(text, sequence) or ""))
        tokens = int(row_of(text, sequence).replace(">", " ").split()[2])
        screen.wait_until(lambda text: int(row_of(text, sequence).replace(">", " ").split()[2]) > tokens)
        assert "? help" in screen.screen.display[-1]
        screen.press("q")
        assert os.waitstatus_to_exitcode(screen.wait_end()) == 0


def test_keys(cli: str, daemon: Daemon, engine: Engine):
    with top(cli, daemon) as screen:
        for name in ("tokens", "memory", "age", "sequence"):
            screen.press("s")
            screen.wait_for(f"s sort: {name}")
        first, second = sorted(engine.sequences.values())
        screen.wait_until(lambda text: (row_of(text, first) or "").startswith(">"))
        screen.press("\x1b[B")
        screen.wait_until(lambda text: (row_of(text, second) or "").startswith(">"))
        screen.press("\r")
        screen.wait_for(f"sequence {second}, plan", "selected since the last frame", "times selected")
        screen.wait_until(lambda text: re.search(r"up to [1-9]\d* times", text))
        screen.press("a")
        screen.wait_for("the books balance", "2 sequences", gone=("times selected",))
        screen.press("e")
        screen.wait_for("client=live", gone=("the books",))
        screen.press("?")
        screen.wait_for("Ctrl-Z stops", "SELECTED")
        screen.press("\x1b")
        screen.wait_for("TOKENS", gone=("Ctrl-Z stops",))
        screen.press("fwindow\r")
        screen.wait_until(lambda text: row_of(text, engine.sequences["quest"]) is None)
        assert row_of(screen.text, engine.sequences["window"]) and "f filter: window" in screen.text
        screen.press("f" + "\x7f" * 6 + "nothing\r")
        screen.wait_for("no sequence has 'nothing'")
        screen.press("f" + "\x7f" * 7 + "\r")
        screen.wait_until(lambda text: row_of(text, engine.sequences["quest"]))
        screen.press("p")
        screen.wait_for("p HELD")


def test_it_follows_the_size(cli: str, daemon: Daemon, engine: Engine):
    with top(cli, daemon) as screen:
        assert "CLIENT" not in screen.text
        screen.resize(140, 40)
        screen.wait_for("CLIENT", "HOST")
        assert "? help" in screen.screen.display[-1] or screen.wait_until(
            lambda _: "? help" in screen.screen.display[-1])
        screen.resize(60, 10)
        screen.wait_for("SEQ", gone=("CLIENT",))


# ---- the terminal afterwards ----

def cooked(screen: Screen) -> bool:
    return screen.modes() & (termios.ICANON | termios.ECHO) == termios.ICANON | termios.ECHO


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"])
def test_a_signal_leaves_the_terminal_as_it_was(cli: str, daemon: Daemon, name: str):
    with top(cli, daemon) as screen:
        assert not cooked(screen) and b"\x1b[?1049h" in screen.said
        before = len(screen.said)
        os.kill(screen.pid, getattr(signal, name))
        assert os.WTERMSIG(screen.wait_end()) == getattr(signal, name)
        assert b"\x1b[?25h\x1b[?1049l" in screen.said[before:]
        assert cooked(screen)


def test_ctrl_z_stops_it_and_fg_goes_on(cli: str, daemon: Daemon):
    """In a shell, since the kernel stops nobody whom no shell could wake."""
    screen = Screen(["/bin/bash", "--norc", "--noprofile", "-i"], PS1="READY ")
    try:
        screen.wait_for("READY")
        screen.press(f"{cli} --socket {daemon.socket} top --delay 300ms\r")
        screen.wait_for("TOKENS", "q quit")
        before = len(screen.said)
        screen.press("\x1a")
        screen.wait_until(lambda _: b"Stopped" in screen.said[before:])
        left = screen.said[before:]
        assert left.index(b"\x1b[?25h\x1b[?1049l") < left.index(b"Stopped")
        before = len(screen.said)
        screen.press("fg\r")
        screen.wait_until(lambda _: b"\x1b[?1049h" in screen.said[before:] and b"q quit" in screen.said[before:])
        screen.press("q")
        screen.wait_until(lambda _: b"READY" in screen.said[before:].rsplit(b"\x1b[?1049l", 1)[-1])
        screen.press("echo code=$?\r")
        screen.wait_until(lambda _: b"code=0" in screen.said[before:])
    finally:
        screen.close()


# ---- a daemon that goes away ----

def test_a_daemon_that_comes_back_is_shown_again(cli: str):
    with Daemon() as first:
        with top(cli, first, "--retry", "60s") as screen:
            first.process.kill()
            first.process.wait(DEADLINE_S)
            screen.wait_for("AWAY (DAEMON_UNREACHABLE)", "asked again")
            with Daemon(socket=first.socket):
                screen.wait_for("serving", gone=("AWAY",))


def test_one_that_does_not_ends_it(cli: str):
    with Daemon() as gone:
        with top(cli, gone, "--retry", "1s") as screen:
            gone.process.kill()
            gone.process.wait(DEADLINE_S)
            assert os.waitstatus_to_exitcode(screen.wait_end()) == 3
            assert b"DAEMON_UNREACHABLE" in screen.said.rsplit(b"\x1b[?1049l", 1)[1] and cooked(screen)


# ---- -w ----

LISTS = [["seq", "ls"], ["session", "ls"], ["model", "ls"], ["pool", "ls"], ["tier", "ls"], ["pin", "ls"],
         ["quota", "ls"], ["work", "ls"], ["value", "ls"], ["status"]]


def frames(cli: str, daemon: Daemon, *words: str, enough, **options) -> str:
    """What a watching verb says to a pipe, until enough(text)."""
    process = subprocess.Popen([cli, "--socket", daemon.socket, *words], stdout=subprocess.PIPE, text=True, **options)
    try:
        text, end = "", time.monotonic() + DEADLINE_S
        while not enough(text):
            assert time.monotonic() < end, text
            line = process.stdout.readline()
            assert line, f"it ended:\n{text}"
            text += line
        return text
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("words", LISTS, ids=" ".join)
def test_frames_follow_each_other_in_a_pipe(cli: str, daemon: Daemon, words: list[str]):
    stamp = re.compile(r"^20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ$", re.MULTILINE)
    text = frames(cli, daemon, *words, "-w", "100ms", enough=lambda text: len(stamp.findall(text)) >= 3)
    assert "\x1b" not in text
    lines = frames(cli, daemon, *words, "-o", "json", "--watch=100ms", enough=lambda text: text.count("\n") >= 3)
    for line in lines.splitlines():
        assert list(json.loads(line))[0] == "time"


def test_a_map_is_drawn_in_place(cli: str, daemon: Daemon, engine: Engine):
    sequence = engine.sequences["quest"]
    with terminal(cli, daemon, "seq", "map", str(sequence), "-w", "200ms") as screen:
        text = screen.wait_for(f"sequence {sequence}, plan quest", "times selected", "q quit")
        most = int(re.search(r"up to (\d+) times", text)[1])
        screen.wait_until(lambda text: int(re.search(r"up to (\d+) times", text)[1]) > most)
        assert screen.text.count("times selected") == 1
        screen.press("q")
        assert os.waitstatus_to_exitcode(screen.wait_end()) == 0 and cooked(screen)


def test_a_bad_period_is_usage(cli: str, daemon: Daemon):
    result = run(cli, daemon, "seq", "ls", "-w", "soon")
    assert result.returncode == 2 and "500ms" in result.stderr
