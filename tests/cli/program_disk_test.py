#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The program `kvstrata` with a daemon that has a disk: its values one by one, scrubs, drains, another size.

Usage: program_disk_test.py --cli PATH --daemon PATH. Ends with `N passed, N failed`.
"""
import json
import os
import pty
import struct
import sys
import time

from cli_program import DEADLINE_S, expect, run_program
from random_trace import trace_bytes


def numbers_of(value):
    """All numbers of a document."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [n for entry in value for n in numbers_of(entry)]
    return [value] if isinstance(value, (int, float)) else []


def slots_on_disk(folder):
    """(file, offset, key) of every value, as docs/disk_format.md has slots."""
    found = []
    for name in sorted(os.listdir(folder)):
        if not name.startswith("segment."):
            continue
        with open(os.path.join(folder, name), "rb") as file:
            data = file.read()
        for at in range(8192, len(data), 4096):
            if data[at + 16:at + 24] == b"KVSSLOT1" and data[at + 28] == 1:
                size = struct.unpack_from("<H", data, at + 68)[0]
                found.append((os.path.join(folder, name), at, data[at + 72:at + 72 + size]))
    return found


def damage(slot):
    with open(slot[0], "r+b") as file:
        file.seek(slot[1] + 4096 + 5)
        byte = file.read(1)[0]
        file.seek(slot[1] + 4096 + 5)
        file.write(bytes([byte ^ 1]))


def wait_for_disk(cli, values):
    for _ in range(DEADLINE_S * 100):
        shown = json.loads(cli("tier", "show", "-o", "json").stdout)
        if shown["entries"] >= values and shown["waiting"] == 0:
            return
        time.sleep(0.01)
    raise AssertionError(f"the disk did not take {values} values: {shown}")


def wait_for_state(cli, state):
    end = time.monotonic() + DEADLINE_S
    while True:
        shown = json.loads(expect(cli("health", "-o", "json"), 0).stdout)
        if shown["state"] == state:
            return
        assert time.monotonic() < end, shown
        time.sleep(0.01)


def daemon_numbers_are_exact_in_any_reader(cli):
    for words in (["status"], ["model", "ls"], ["session", "ls"], ["seq", "ls"], ["pool", "ls"], ["work", "ls"],
                  ["tier", "ls"], ["pin", "ls"], ["config", "show"], ["value", "ls", "--limit", "1"], ["audit"]):
        document = json.loads(expect(cli(*words, "-o", "json"), 0).stdout)
        assert max([abs(n) for n in numbers_of(document)], default=0) <= 2 ** 53, (words, document)
    status = json.loads(cli("status", "-o", "json").stdout)
    assert isinstance(status["daemon_epoch"], str) and int(status["daemon_epoch"]) > 0, status
    assert isinstance(json.loads(cli("value", "ls", "-o", "json").stdout)["next"], str)


def daemon_is_shown(cli):
    shown = json.loads(expect(cli("tier", "show", "-o", "json"), 0).stdout)
    assert shown["path"] == os.path.join(cli.folder, "tier") and shown["capacity_bytes"] % (1 << 20) == 0, shown
    assert shown["queue"] in ("io_uring", "pread") and not shown["breaker_open"] and shown["entries"] == 0, shown
    assert json.loads(cli("tier", "ls", "-o", "json").stdout)["tiers"] == [shown]
    expect(cli("tier", "show"), 0, "LEFT-ALONE", "STOPPED-SEGMENTS", "LAST-ERROR")


def daemon_lists_values(cli):
    path = os.path.join(cli.folder, "b.safetensors")
    with open(path, "wb") as file:
        file.write(trace_bytes())
    expect(cli("replay", path, "--plan", "quest{min_tokens = 0}", "--keep"), 0)
    wait_for_disk(cli, 37)
    listed = json.loads(expect(cli("value", "ls", "-o", "json"), 0).stdout)
    pages = [b for b in listed["values"] if b["kind"] == "page"]
    assert len(pages) == 37 and listed["next"] == "0", listed
    assert all(p["tokens"] == 16 and p["model"] and p["tiers"][-1] == "disk" for p in pages), pages
    on_disk = {b["key"] for b in listed["values"] if "disk" in b["tiers"]}
    assert on_disk == {key.hex() for _, _, key in slots_on_disk(os.path.join(cli.folder, "tier"))}, listed
    expect(cli("value", "ls"), 0, "KIND", "device,disk")
    some = json.loads(expect(cli("value", "ls", "--limit", "5", "-o", "json"), 0).stdout)
    assert some["values"] == listed["values"][:5] and some["next"] != "0", some
    rest = json.loads(cli("value", "ls", "--after", some["next"], "--limit", "0", "-o", "json").stdout)
    assert some["values"] + rest["values"] == listed["values"], rest
    expect(cli("value", "ls", "--limit", "5"), 0, f'--after {some["next"]}')
    assert json.loads(cli("value", "ls", "--tier", "host", "-o", "json").stdout)["values"] == []
    expect(cli("value", "ls", "--tier", "moon"), 2, "disk")
    expect(cli("value", "ls", "--model", "nothing"), 5, "MODEL_UNKNOWN")


def daemon_keys_may_be_ambiguous(cli):
    """Keys of pins are their numbers, in order: beginnings that several have are certain."""
    path = os.path.join(cli.folder, "b.safetensors")
    model = json.loads(cli("model", "ls", "-o", "json").stdout)["models"][0]["name"]
    values = json.loads(cli("tier", "show", "-o", "json").stdout)["entries"]
    pins = [json.loads(expect(cli("pin", "add", model, path, "-o", "json"), 0).stdout)["pin"] for _ in range(10)]
    wait_for_disk(cli, values + len(pins))
    keys = sorted(f"pin/{int(pin):016x}" for pin in pins)
    assert keys == sorted(b["key"] for b in json.loads(cli("value", "ls", "-o", "json").stdout)["values"]
                          if b["key"].startswith("pin/"))
    out = os.path.join(cli.folder, "ambiguous.bin")
    for verb in (["get", "pin/0000", "--out", out], ["verify", "pin/0000"]):
        said = expect(cli("value", *verb), 2, "KEY_AMBIGUOUS", "10 keys begin with 'pin/0000'", "and more").stderr
        assert sum(key in said for key in keys) == 8, said  # so many are named
    assert not os.path.exists(out)
    two = os.path.commonprefix(keys[:2])
    alike = [key for key in keys if key.startswith(two)]
    said = expect(cli("value", "verify", two), 2, "KEY_AMBIGUOUS", f"{len(alike)} keys begin with", *alike[:8]).stderr
    assert ("and more" in said) == (len(alike) > 8), said
    expect(cli("value", "verify", keys[0]), 0, keys[0], "sound")  # a whole one is none's beginning
    expect(cli("value", "get", "pin/000", "--out", out), 2, "KEY_TEXT")
    for pin in pins:
        expect(cli("pin", "rm", str(pin)), 0)


def daemon_gets_values(cli):
    values = json.loads(cli("value", "ls", "-o", "json").stdout)["values"]
    keys = [b["key"] for b in values]
    key = next(b["key"] for b in values if b["kind"] == "page")
    out = os.path.join(cli.folder, "page.bin")
    got = json.loads(expect(cli("value", "get", key, "--out", out, "-o", "json"), 0).stdout)
    with open(out, "rb") as file:
        memory = file.read()
    assert len(memory) == got["bytes"] == sum(got["buffers"]) and got["tier"] == "device", got
    assert os.stat(out).st_mode & 0o777 == 0o600
    expect(cli("value", "get", key, "--out", out), 1, "VALUE_FILE", "--force")
    expect(cli("evict", "--yes"), 0)
    got = json.loads(expect(cli("value", "get", key, "--out", out, "--force", "-o", "json"), 0).stdout)
    with open(out, "rb") as file:
        assert file.read() == memory and got["tier"] == "disk", got
    expect(cli("value", "get", "00" * 32, "--out", out + ".no"), 5, "VALUE_UNKNOWN", "kvstrata value ls")
    assert not os.path.exists(out + ".no")
    expect(cli("value", "get", "12zz", "--out", out), 2, "KEY_TEXT")
    expect(cli("value", "get", "123", "--out", out), 2, "KEY_TEXT", "64 hexadecimal digits")
    none = next(f"{n:04x}" for n in range(1 << 16) if not any(k.startswith(f"{n:04x}") for k in keys))
    expect(cli("value", "get", none, "--out", out), 5, "VALUE_UNKNOWN", none)
    begin = next(key[:n] for n in range(4, 64) if sum(k.startswith(key[:n]) for k in keys) == 1)
    short = json.loads(expect(cli("value", "get", begin.upper(), "--out", out, "--force", "-o", "json"), 0).stdout)
    assert short["key"] == key and short["bytes"] == got["bytes"], short
    relative = os.path.relpath(out)
    short = json.loads(expect(cli("value", "get", begin, "--out", relative, "--force", "-o", "json"), 0).stdout)
    assert short["file"] == out, short
    expect(cli("value", "verify", begin), 0, key, "sound")
    expect(cli("value", "get", key), 2, "--out", "next: kvstrata value get --help")
    leader, follower = pty.openpty()
    expect(cli("value", "get", key, "--force", "--out", os.ttyname(follower)), 1, "VALUE_FILE", "terminal")
    os.close(leader)
    os.close(follower)


def daemon_verifies_values(cli):
    """What daemon_gets_values left on disk alone."""
    slots = slots_on_disk(os.path.join(cli.folder, "tier"))
    sound, damaged = slots[0][2].hex(), slots[1][2].hex()
    expect(cli("value", "verify", sound, damaged), 0, "VERDICT", "sound")
    damage(slots[1])
    found = json.loads(expect(cli("value", "verify", sound, damaged, "-o", "json"), 1).stdout)["values"]
    assert [b["verdict"] for b in found] == ["sound", "corrupt"] and found[1]["detail"], found
    assert found[0]["tiers"] == ["disk"], found
    expect(cli("value", "verify", damaged), 1, "gone")
    assert json.loads(cli("tier", "show", "-o", "json").stdout)["corrupt"] == 1


def daemon_is_scrubbed(cli):
    folder = os.path.join(cli.folder, "tier")
    values = json.loads(cli("tier", "show", "-o", "json").stdout)["entries"]
    clean = json.loads(expect(cli("tier", "scrub", "-o", "json"), 0).stdout)
    assert clean["done"] and clean["values"] == values > 30 and clean["corrupt"] == clean["late"] == 0, clean
    expect(cli("tier", "scrub", "--rate", "100GiB"), 0, "CORRUPT")
    live = {b["key"] for b in json.loads(cli("value", "ls", "-o", "json").stdout)["values"]}
    for slot in [s for s in slots_on_disk(folder) if s[2].hex() in live][3:6]:
        damage(slot)
    found = json.loads(expect(cli("tier", "scrub", "-o", "json"), 1).stdout)
    assert found["corrupt"] == 3 and found["values"] == values, found
    assert json.loads(expect(cli("tier", "scrub", "-o", "json"), 0).stdout)["values"] == values - 3
    expect(cli("tier", "scrub", "--rate", "fast"), 2, "200MiB")
    expect(cli("tier", "scrub", "--rate", "1", "--timeout", "50ms"), 6, "DEADLINE")


def daemon_is_drained(cli):
    def entries():
        return json.loads(cli("tier", "show", "-o", "json").stdout)["entries"]
    drained = json.loads(expect(cli("tier", "drain", "-o", "json"), 0).stdout)
    assert drained["drained"] and drained["draining"], drained
    before = entries()
    path = os.path.join(cli.folder, "d.safetensors")
    with open(path, "wb") as file:
        file.write(trace_bytes(prompt=400))
    expect(cli("replay", path, "--plan", "full", "--keep"), 0)
    expect(cli("tier", "show"), 0, "REFUSED-DRAINING")
    wait_for_state(cli, "serving, draining the disk")
    expect(cli("tier", "ls"), 0, "STATE", "draining")
    shown = json.loads(cli("tier", "show", "-o", "json").stdout)
    assert shown["draining"] and shown["refused"] > 0 and shown["entries"] == before, shown
    values = json.loads(cli("value", "ls", "--limit", "0", "-o", "json").stdout)["values"]
    missing = sum("disk" not in b["tiers"] for b in values)
    assert missing > 0, values
    resumed = json.loads(expect(cli("tier", "drain", "--resume", "-o", "json"), 0).stdout)
    assert not resumed["draining"] and not resumed["drained"], resumed
    wait_for_disk(cli, before + missing)
    expect(cli("tier", "drain"), 0, "SAFE-TO-STOP  ", "yes")
    expect(cli("tier", "drain", "--resume"), 0)
    wait_for_state(cli, "serving")


def daemon_is_resized(cli):
    folder = os.path.join(cli.folder, "tier")
    def segments():
        sizes = [os.path.getsize(os.path.join(folder, name)) for name in os.listdir(folder) if "segment" in name]
        return sum(size > 0 for size in sizes)
    before = segments()
    entries = json.loads(cli("tier", "show", "-o", "json").stdout)["entries"]
    grown = json.loads(expect(cli("tier", "resize", "24MiB", "-o", "json"), 0).stdout)
    assert segments() == grown["capacity_bytes"] >> 20 > before and grown["evicted"] == 0, grown
    shrunk = json.loads(expect(cli("tier", "resize", "8MiB", "-o", "json"), 0).stdout)
    assert segments() == shrunk["capacity_bytes"] >> 20 < before, shrunk
    left = json.loads(cli("tier", "show", "-o", "json").stdout)["entries"]
    assert left == entries - shrunk["evicted"], (left, entries, shrunk)
    expect(cli("tier", "resize", "16MiB"), 0, "disk.budget_bytes")
    assert segments() == before
    expect(cli("tier", "resize", "4KiB"), 2, "DISK_BUDGET", "next: kvstrata tier resize with a SIZE")
    assert json.loads(expect(cli("tier", "scrub", "-o", "json"), 0).stdout)["corrupt"] == 0


if __name__ == "__main__":
    sys.exit(run_program(
        globals(), lambda folder: ["--set", f"disk.path={folder}/tier", "--set", "disk.budget_bytes=16MiB",
                                   "--set", "disk.segment_bytes=1MiB"]))
