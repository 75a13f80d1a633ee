#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The program `kvstrata` with a real daemon: what it lists, checks and changes there.

Usage: program_daemon_test.py --cli PATH --daemon PATH. Ends with `N passed, N failed`.
"""
import json
import os
import shutil
import socket
import sys

from cli_program import as_nobody, expect, run_program


def daemon_reports(cli):
    status = json.loads(expect(cli("status", "-o", "json"), 0).stdout)
    assert status["socket"] == cli.socket and status["sessions"] == 0
    assert [p["tier"] for p in status["pools"]] == ["device", "host"]
    expect(cli("status"), 0, "VERSION", "CAPACITY")
    expect(cli("health"), 0, "SERVING", "serving")
    assert cli("health", "-q").stdout == ""
    expect(cli("health", "--live"), 0, "SERVING")
    assert json.loads(cli("version", "-o", "json").stdout)["daemon"] == status["version"]


def daemon_lists(cli):
    plans = json.loads(expect(cli("plan", "ls", "-o", "json"), 0).stdout)["plans"]
    assert {"full", "window", "quest", "chess"} <= {p["name"] for p in plans}
    table = expect(cli("plan", "ls"), 0).stdout
    for plan in plans:  # whatever presets the daemon has
        shown = json.loads(expect(cli("plan", "show", plan["name"], "-o", "json"), 0).stdout)
        assert shown == plan and plan["description"], (shown, plan)
        assert f'\n{plan["name"]} ' in table, table
    expect(cli("plan", "show", "quest{budget = 1024}"), 0, "budget = 1024")
    expect(cli("plan", "show", "sekv"), 0, "NEEDS", "surprisal", "of every prompt token")
    needs = {p["name"]: {n["name"] for n in p["needs"]} for p in plans}
    assert needs["full"] == {"token_ids"} and "entropy" in needs["chess"], needs
    assert {"boundary", "prompt_queries", "prefill_done"} <= needs["sentencekv"], needs
    expect(cli("plan", "show", "qest"), 5, "PLAN_UNKNOWN", "quest")
    expect(cli("plan", "show", "quest{budgte = 1}"), 2, "budget")
    for words in (["model", "ls"], ["session", "ls"], ["seq", "ls"], ["pool", "ls"], ["work", "ls"],
                  ["tier", "ls"],
                  ["config", "show"]):
        table = expect(cli(*words), 0).stdout.split("\n\n")[0].splitlines()  # below: the cgroup
        rows = expect(cli(*words, "--no-headers"), 0).stdout.splitlines()
        assert len(rows) == len(table) - 1, (words, table, rows)
        json.loads(expect(cli(*words, "-o", "json"), 0).stdout)
        expect(cli(*words, "-o", "yaml"), 0, ":")


def daemon_names_what_is_not_there(cli):
    for words in (["seq", "show", "99"], ["seq", "map", "99"], ["seq", "demote", "99"],
                  ["seq", "prefetch", "99"]):
        expect(cli(*words), 5, "SEQUENCE_UNKNOWN", "kvstrata seq ls")
    expect(cli("model", "show", "nothing"), 5, "MODEL_UNKNOWN")
    expect(cli("tier", "show"), 5, "TIER_UNKNOWN", "disk.path")
    expect(cli("tier", "scrub"), 5, "TIER_UNKNOWN", "disk.path")
    expect(cli("tier", "drain"), 5, "TIER_UNKNOWN", "disk.path")
    expect(cli("tier", "resize", "64MiB"), 5, "TIER_UNKNOWN", "disk.path")


def daemon_books_and_cache(cli):
    expect(cli("audit"), 0, "yes")
    expect(cli("evict", "--dry-run"), 0)
    expect(cli("evict", "--yes"), 0)


def daemon_checks_files(cli):
    path = os.path.join(cli.folder, "k.toml")
    with open(path, "w") as file:
        file.write("nonsense = [\n")
    expect(cli("config", "check", path), 1)
    with open(path, "w") as file:
        file.write("")
    expect(cli("config", "check", path), 0)
    assert json.loads(cli("config", "check", path, "-o", "json").stdout)["valid"] is True


def daemon_health_is_the_same_for_everybody(cli):
    mine = json.loads(expect(cli("health", "-o", "json"), 0).stdout)
    assert mine == {"healthy": True, "health": "SERVING", "state": "serving", "why": ""}, mine
    if os.geteuid() == 0 and shutil.which("setpriv"):
        os.chmod(cli.folder, 0o755)
        assert json.loads(expect(as_nobody(cli, "health", "-o", "json"), 0).stdout) == mine


def daemon_resizes_pools(cli):
    def capacity():
        pools = json.loads(cli("pool", "ls", "-o", "json").stdout)["pools"]
        return {pool["tier"]: pool["capacity_bytes"] for pool in pools}
    for group in json.loads(cli("pool", "ls", "-o", "json").stdout)["cgroups"]:
        assert group["available_bytes"] <= group["limit_bytes"], group
        expect(cli("pool", "ls"), 0, "CGROUP-LIMIT", group["file"])
    before = capacity()
    expect(cli("tier", "resize", "256MiB", "--tier", "device"), 0, "RESTART-TAKES", "pool.device_bytes", "256.0 MiB")
    assert capacity() == {**before, "device": 256 << 20}, capacity()
    back = json.loads(expect(
        cli("tier", "resize", str(before["device"]), "--tier", "device", "-o", "json"), 0).stdout)
    assert back["capacity_bytes"] == before["device"] and back["beyond_bytes"] == 0, back
    named = ("--tier", "device", "--device")
    expect(cli("tier", "resize", "256MiB", *named, "emulated"), 0, "256.0 MiB")
    expect(cli("tier", "resize", str(before["device"]), *named, "emulated"), 0)
    expect(cli("tier", "resize", "256MiB", *named, "moon"), 5, "DEVICE_UNKNOWN", "'emulated'")
    for tier in ("host", "device"):
        expect(cli("tier", "resize", "2TiB", "--tier", tier), 2, "POOL_BEYOND_MACHINE", "of memory of this machine",
               "next: kvstrata tier resize with a smaller SIZE")
    assert capacity() == before, capacity()
    expect(cli("tier", "resize", "4KiB", "--tier", "host"), 2, "POOL_SIZE")
    expect(cli("tier", "resize", "1GiB", "--tier", "moon"), 2, "device")
    expect(cli("tier", "resize", "much"), 2, "200MiB")
    expect(cli("tier", "resize"), 2, "SIZE")


def daemon_quotas(cli):
    def of(user):
        users = json.loads(expect(cli("quota", "ls", "-o", "json"), 0).stdout)["users"]
        return next(row for row in users if row["user"] == user)
    defaults = json.loads(expect(cli("quota", "ls", "-o", "json"), 0).stdout)["defaults"]
    pools = json.loads(cli("pool", "ls", "-o", "json").stdout)["pools"]
    assert defaults["sessions"] == 512, defaults
    host = next(pool["capacity_bytes"] for pool in pools if pool["tier"] == "host")
    assert defaults["host_bytes"] == host * 9 // 10, (defaults, host)
    expect(cli("quota", "set", "uid:4711", "sessions", "7"), 0, "uid:4711", "0 / 7")
    assert of("uid:4711")["limits"]["sessions"] == 7 and of("uid:4711")["changed"] == ["sessions"]
    expect(cli("quota", "set", "uid:4711", "host_bytes", "1 GiB"), 0, "1.0 GiB")
    expect(cli("quota", "set", "uid:4711", "models", "none"), 0, "0 / -")
    expect(cli("quota", "reset", "uid:4711", "sessions"), 0, "0 / 512")
    expect(cli("quota", "set", "default", "sessions", "9"), 0, "default", "9")
    assert of("uid:4711")["limits"]["sessions"] == 9
    expect(cli("quota", "reset", "default", "sessions"), 0, "512")
    expect(cli("quota", "ls"), 0, "SESSIONS", "default", "uid:4711")
    expect(cli("quota", "set", "root", "sessions", "1"), 2, "QUOTA_USER", "uid:N")
    expect(cli("quota", "set", "uid:1", "session", "1"), 2, "QUOTA_LIMIT", "attaches_per_second")
    expect(cli("quota", "set", "uid:1", "sessions", "4KiB"), 2, "QUOTA_VALUE", "none", "next: kvstrata quota ls")
    for limit, nothing in (("sessions", "0"), ("host_bytes", "0GiB")):  # somebody meant to keep the user out
        expect(cli("quota", "set", "uid:1", limit, nothing), 2, "QUOTA_VALUE", "say none", "socket.group")
    expect(cli("quota", "set", "uid:1", "host_bytes", "much"), 2, "QUOTA_VALUE", "200MiB")
    expect(cli("quota", "set", "uid:1", "sessions"), 2, "USAGE")


if __name__ == "__main__":
    sys.exit(run_program(globals()))
