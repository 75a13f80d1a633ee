#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""/metrics of a real daemon by Prometheus' own reader: promtool finds nothing to say of the page, on a port and on a
Unix socket, and OpenMetrics tells the same samples.

Usage: page_test.py DAEMON PROMTOOL. Ends with `N passed, N failed`; without promtool it says SKIPPED.
"""
import http.client
import os
import pathlib
import socket
import subprocess
import sys
import tempfile

DEADLINE_S = 30


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path):
        super().__init__("localhost", timeout=DEADLINE_S)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


def get(connection, accept="text/plain"):
    connection.request("GET", "/metrics", headers={"Accept": accept})
    answer = connection.getresponse()
    assert answer.status == 200, answer.status
    return answer.getheader("Content-Type"), answer.read().decode()


def served(daemon, folder, listen):
    """A daemon that serves there, and its log."""
    ready, tell = os.pipe()
    log = os.path.join(folder, "log")
    with open(log, "wb") as out:
        process = subprocess.Popen([daemon, "--socket", os.path.join(folder, "k.sock"), "--ready-fd", str(tell), "--set",
                                    "http.listen=" + listen], pass_fds=[tell], stderr=out)
    os.close(tell)
    assert os.read(ready, 1), pathlib.Path(log).read_text()
    os.close(ready)
    return process, log


def check(daemon, promtool, folder, listen):
    process, log = served(daemon, folder, listen)
    try:
        bound = next(line for line in pathlib.Path(log).read_text().splitlines() if "event=http " in line)
        where = bound.split("listen=")[1].strip('"')
        def connect():
            if where.startswith("unix:"):
                return UnixConnection(where.removeprefix("unix:"))
            return http.client.HTTPConnection(where, timeout=DEADLINE_S)
        kind, page = get(connect())
        assert kind.startswith("text/plain; version=0.0.4"), kind
        found = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, text=True,
                               timeout=DEADLINE_S, check=False)
        assert found.returncode == 0 and not found.stdout + found.stderr, found.stdout + found.stderr
        kind, opened = get(connect(), "application/openmetrics-text;version=1.0.0,text/plain;q=0.5")
        assert kind.startswith("application/openmetrics-text; version=1.0.0"), kind
        assert opened.endswith("# EOF\n"), opened[-100:]
        series = [{line.rsplit(" ", 1)[0] for line in text.splitlines() if not line.startswith("#")}
                  for text in (page, opened)]
        assert series[0] == series[1], series[0] ^ series[1]
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


def main():
    daemon, promtool = sys.argv[1:]
    if not os.access(promtool, os.X_OK):
        print(f"SKIPPED: no promtool at {promtool}; docker/fetch_promtool.sh {promtool}")
        return 0
    passed = 0
    listens = ("127.0.0.1:0", "[::1]:0", "unix:{}/http.sock")
    for listen in listens:
        with tempfile.TemporaryDirectory(prefix="kvs-page-") as folder:
            os.chmod(folder, 0o755)
            if "::" in listen and not os.path.exists("/proc/net/if_inet6"):
                print("not checked: IPv6, which is not here")
                continue
            check(daemon, promtool, folder, listen.format(folder))
            passed += 1
    print(f"{passed} passed, 0 failed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
