#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The program `kvstrata` as a shell sees it, with no daemon, and with a socket that never answers: exit codes, output,
errors. Beside it are those with a real daemon: program_daemon_test.py, of traces program_trace_test.py, and with
a disk program_disk_test.py.

Usage: program_test.py --cli PATH --daemon PATH. Ends with `N passed, N failed`.
"""
import json
import os
import shutil
import socket
import subprocess
import sys
import time

from cli_program import DEADLINE_S, as_nobody, expect, run_program


def test_a_missing_daemon_is_3_and_says_how_to_start_one(cli):
    expect(cli("status"), 3, "DAEMON_UNREACHABLE", cli.socket, "kvstratad --socket " + cli.socket)
    error = json.loads(expect(cli("seq", "ls", "-o", "json"), 3).stderr)["error"]
    assert error["reason"] == "DAEMON_UNREACHABLE" and error["code"] == "UNAVAILABLE" and error["next"]
    expect(cli("health", "-q"), 3)


def test_a_stale_socket_is_3(cli):
    stale = os.path.join(cli.folder, "stale.sock")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(stale)
    listener.close()
    expect(cli("status", "--socket", stale), 3, "left it behind")


def test_a_socket_that_is_none_is_3(cli):
    expect(cli("status", "--socket", cli.folder), 3, "SOCKET_INVALID", "a directory")
    expect(cli("status", "--socket", __file__), 3, "not a socket")
    expect(cli("status", "--socket", "/" + "x" * 200), 3, "bytes")


def test_a_deaf_daemon_is_6(cli):
    deaf = os.path.join(cli.folder, "deaf.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(deaf)
        listener.listen(8)
        expect(cli("status", "--socket", deaf, "--timeout", "300ms"), 6, "DEADLINE", "300 ms")
        expect(cli("health", "--socket", deaf, "--timeout", "300ms"), 6)
        waits = ("--socket", deaf, "--timeout", "300ms")
        expect(cli("tier", "resize", "1GiB", *waits), 6, "RESIZE_DEADLINE", "300 ms", "goes on", "tier ls")
        expect(cli("seq", "build", "1", *waits), 6, "WORK_DEADLINE", "goes on", "work ls", "ask again")
        expect(cli("seq", "recompress", "1", *waits), 6, "WORK_DEADLINE", "goes on", "work ls")


def test_recompress_waits_no_longer_than_it_is_told(cli):
    """A listener that never answers, and --timeout: nothing is added to it, which a much longer one shows."""
    deaf = os.path.join(cli.folder, "deaf2.sock")
    def took(timeout):
        begin = time.monotonic()
        expect(cli("seq", "recompress", "1", "--socket", deaf, "--timeout", timeout), 6, "WORK_DEADLINE")
        return time.monotonic() - begin
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(deaf)
        listener.listen(8)
        assert took("100ms") < took("4s")


def test_a_forbidden_socket_is_4(cli):
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        print("    not checked: needs root and setpriv")
        return
    forbidden = os.path.join(cli.folder, "forbidden.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(forbidden)
        os.chmod(forbidden, 0o600)
        os.chmod(cli.folder, 0o755)
        expect(as_nobody(cli, "status", "--socket", forbidden), 4, "SOCKET_DENIED", "next:")


def test_usage_is_2(cli):
    bare = expect(cli(), 2, "USAGE", "no verb", "next: kvstrata status", " doctor ")
    assert not bare.stdout and max(map(len, bare.stderr.splitlines())) <= 80, bare.stderr
    expect(cli("-o", "json"), 2, "no verb")
    expect(cli("sttaus"), 2, "did you mean 'status'?")
    expect(cli("seq", "show"), 2, "SEQ")
    expect(cli("status", "-o", "xml"), 2, "json")
    expect(cli("status", "--timeout", "never"), 2, "500ms")
    expect(cli("evict"), 2, "CONFIRMATION_MISSING", "--yes")


def test_help_and_version_need_no_daemon(cli):
    assert "Exit codes" in expect(cli("--help"), 0).stdout
    for words in (["seq", "map"], ["plan"], ["replay"], ["config", "check"]):
        expect(cli(*words, "--help"), 0, "Usage")
    version = json.loads(expect(cli("version", "-o", "json"), 0).stdout)
    assert version["client"] and version["abi"] == 2 and version["daemon"] is None
    expect(cli("--version"), 0, version["client"])


def test_the_documents_are_those_of_the_table(cli):
    """docs/cli.md has the examples that the program has; the manual page is one that troff reads."""
    path = os.path.join(os.path.dirname(__file__), "..", "..", "docs", "cli.md")
    with open(path) as file:
        examples = file.read().split("## Examples\n")[1].split("\n## ")[0]
    lines = "".join(line for line in examples.splitlines(True) if line.startswith("    "))
    assert lines == expect(cli("__reference", "examples"), 0).stdout, "kvstrata __reference examples"
    page = expect(cli("__reference", "man"), 0, ".TH KVSTRATA 1").stdout
    if not shutil.which("groff"):
        print("    not checked: needs groff")
        return
    read = subprocess.run(["groff", "-man", "-Tutf8", "-ww"], input=page, capture_output=True, text=True,
                          timeout=DEADLINE_S)
    assert read.returncode == 0 and not read.stderr, read.stderr


def test_explain_needs_no_daemon(cli):
    told = json.loads(expect(cli("explain", "pool_exhausted", "-o", "json"), 0).stdout)
    assert told["reason"] == "POOL_EXHAUSTED" and told["area"] == "memory" and "evict" in told["next"], told
    event = json.loads(expect(cli("explain", "value_lost", "-o", "json"), 0).stdout)
    assert event["area"] == "event" and "segment" in event["fields"].split(), event
    expect(cli("explain", "value_l"), 0, "EVENT", "value_lost")  # a beginning that only one has
    several = json.loads(expect(cli("explain", "disk_c", "-o", "json"), 0).stdout)["reasons"]
    assert {"DISK_CORRUPT", "disk_checkpoint_failed"} <= {row["reason"] for row in several}, several
    assert all(row["reason"].upper().startswith("DISK_C") for row in several), several
    expect(cli("explain", "value_lots"), 5, "did you mean 'value_lost'?")
    guessed = expect(cli("explain", "REDIS_AUTH"), 5, "REDIS_LOGIN", "REDIS_PASSWORD")
    assert "did you mean" not in guessed.stderr, guessed.stderr
    expect(cli("explain", "POOL_EXAUSTED"), 5, "REASON_UNKNOWN", "did you mean 'POOL_EXHAUSTED'?", "kvstrata explain")
    reasons = json.loads(expect(cli("explain", "-o", "json"), 0).stdout)["reasons"]
    assert len(reasons) > 250 and all(r["meaning"] for r in reasons), len(reasons)
    completion = subprocess.run(
        ["bash", "-c", f"source <({cli.program} completion bash); COMP_WORDS=(kvstrata explain POOL_E) COMP_CWORD=2; "
                       "_kvstrata; echo ${COMPREPLY[*]}"], capture_output=True, text=True, timeout=DEADLINE_S)
    assert "POOL_EXHAUSTED" in completion.stdout.split(), completion


def test_completions_parse(cli):
    script = expect(cli("completion", "bash"), 0).stdout
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    for shell in ("zsh", "fish"):
        expect(cli("completion", shell), 0, "prefetch")


if __name__ == "__main__":
    sys.exit(run_program(globals()))
