#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The program `kvstrata` on traces: replays and calibrations, and prefixes that a replay left in the daemon, which are
looked up and pinned.

Usage: program_trace_test.py --cli PATH --daemon PATH. Ends with `N passed, N failed`.
"""
import json
import os
import struct
import sys

from cli_program import expect, run_program
from random_trace import trace_bytes


def test_bad_traces_name_the_field(cli):
    path = os.path.join(cli.folder, "bad.safetensors")

    def replay():
        return cli("replay", path, "--plan", "full")
    expect(replay(), 5, "TRACE_UNREADABLE")
    for content, reason in ((b"abc", "TRACE_TRUNCATED"), (b"GGUF\3\0\0\0\0\0\0\0\0\0", "TRACE_FOREIGN"),
                            (struct.pack("<Q", 100) + b"{}", "TRACE_TRUNCATED"),
                            (struct.pack("<Q", 2) + b"{}", "TRACE_FOREIGN")):
        with open(path, "wb") as file:
            file.write(content)
        expect(replay(), 1, reason, path, "docs/traces.md")


def test_calibrates_without_a_daemon(cli):
    trace, other, out = (os.path.join(cli.folder, name) for name in ("c.safetensors", "d.safetensors", "c.toml"))
    for path, geometry in ((trace, {}), (other, {"layers": "4"})):
        with open(path, "wb") as file:
            file.write(trace_bytes(steps=70, **geometry))
    result = json.loads(expect(cli("calibrate", trace, "--offline", "--out", out, "-o", "json"), 0).stdout)
    assert result["chess"]["pages"] == 1 and result["chess"]["thresholds"] == [1, 0], result["chess"]
    assert result["sekv"]["alphas"][0]["anchor_share"] == 1 / 600, result["sekv"]
    assert len(result["tokenselect"]["cache"]) == 4 and result["break_even"]["plans"] == []
    with open(out) as file:
        written = file.read()
    assert "\nchess_calibrated = 'chess{thresholds = [1.0, 0.0]}'\n" in written, written
    assert os.listdir(cli.folder).count("c.toml.part") == 0
    expect(cli("calibrate", trace, "--offline"), 0, "ALPHA", "THETA", "chess_calibrated")
    expect(cli("calibrate", trace, "--offline", "-o", "yaml"), 0, "break_even:")
    expect(cli("calibrate", trace, other, "--offline"), 2, "CALIBRATE_MODELS", "layers is '3' and '4'")
    expect(cli("calibrate", trace, "--offline", "--out", cli.folder + "/none/x.toml"), 2, "CALIBRATE_OUT")
    expect(cli("calibrate", trace, cli.folder + "/none", "--offline"), 5, "TRACE_UNREADABLE")
    expect(cli("calibrate", trace, "--out", out), 3)  # the rest needs a daemon
    with open(out) as file:
        assert file.read() == written, "a failed calibration changed the file of an earlier one"
    assert os.listdir(cli.folder).count("c.toml.part") == 0


def daemon_keeps_nothing_of_a_replay(cli):
    path = os.path.join(cli.folder, "gone.safetensors")
    with open(path, "wb") as file:
        file.write(trace_bytes())
    models, values = (json.loads(cli(*words, "-o", "json").stdout) for words in (["model", "ls"], ["value", "ls"]))
    expect(cli("replay", path, "--plan", "quest{min_tokens = 0}", "--plan", "mosaickv{min_tokens = 0}"), 0)
    assert json.loads(cli("model", "ls", "-o", "json").stdout) == models
    assert json.loads(cli("value", "ls", "-o", "json").stdout) == values
    expect(cli("audit"), 0, "yes")
    expect(cli("calibrate", path, "--out", os.path.join(cli.folder, "gone.toml")), 0)
    assert json.loads(cli("model", "ls", "-o", "json").stdout) == models
    expect(cli("replay", path, "--plan", "full", "--keep"), 0)
    assert len(json.loads(cli("model", "ls", "-o", "json").stdout)["models"]) == len(models["models"]) + 1
    expect(cli("evict", "--yes"), 0)
    assert json.loads(cli("model", "ls", "-o", "json").stdout)["models"] == [], "no page, no session, no model"


def daemon_replays(cli):
    path = os.path.join(cli.folder, "t.safetensors")
    with open(path, "wb") as file:
        file.write(trace_bytes())
    small = ["quest{budget = 128, min_tokens = 0}", "window{n_sink = 4, n_recent = 60, min_tokens = 0}",
             "chess{min_tokens = 0, window = 4}"]
    plans = [word for plan in ["full"] + small for word in ("--plan", plan)]
    result = json.loads(expect(cli("replay", path, *plans, "--keep", "-o", "json"), 0).stdout)
    assert result["layers"] == [0, 2] and result["steps"] == 6
    reference, full, *sparse = result["plans"]
    for row in (reference, full):
        assert abs(row["mass_recall"]["mean"] - 1) < 1e-6 and row["output_error"]["p95"] < 1e-6, row
        assert row["kv_tokens_per_step"] == 603.5 and row["oracle_overlap"] == 1, row
    assert full["held_tokens"] > 0, "the second sequence found no prefix"
    for row in sparse:
        assert 0 < row["mass_recall"]["mean"] < 1, row
        assert 0 < row["output_error"]["mean"] and row["output_error"]["codec"]["mean"] == 0, row
        assert row["kv_tokens_per_step"] < 400, row
        assert 0 < row["oracle_overlap"] < 1, row
        assert row["kv_bytes_per_step"]["total"] == row["kv_tokens_per_step"] * 2 * 2 * 2 * 64 * 2, row
        assert row["cost_per_step"]["rows"] == row["kv_tokens_per_step"] * 2 * 2, row  # layers, KV heads
        assert row["cost_per_step"]["attend_bytes"] > 0 and not row["sampled"], row
    window = sparse[1]
    assert window["kv_tokens_per_step"] == 64, window
    assert sparse[2]["selections"] is not None, sparse[2]
    expect(cli("replay", path, "--plan", "quest", "--steps", "2", "--layers", "2"), 0, "RECALL", "1 layers")
    expect(cli("replay", path, "--plan", "quest", "--layers", "1"), 2, "REPLAY_LAYER")
    expect(cli("replay", path, "--plan", "qest"), 5, "PLAN_UNKNOWN")
    expect(cli("audit"), 0, "yes")
    assert json.loads(cli("session", "ls", "-o", "json").stdout)["sessions"] == []


def daemon_looks_up(cli):
    """What daemon_replays left behind."""
    path = os.path.join(cli.folder, "t.safetensors")
    model = json.loads(cli("model", "ls", "-o", "json").stdout)["models"][0]
    found = json.loads(expect(cli("lookup", str(model["model"]), path, "-o", "json"), 0).stdout)
    assert found["tokens"] == 606 and found["held_tokens"] == 592 and found["page_tokens"] == 16, found
    assert found["device_tokens"] + found["host_tokens"] == 592 and found["disk_tokens"] == 0, found
    assert len(found["pages"]) == 37 and {p["tier"] for p in found["pages"]} <= {"device", "host"}, found
    assert json.loads(cli("lookup", model["name"], path, "-o", "json").stdout) == found, "it takes nothing"
    keys = [word for p in found["pages"][:3] for word in ("--key", p["key"])]
    by_keys = json.loads(expect(cli("lookup", model["name"], *keys, "-o", "json"), 0).stdout)
    assert by_keys["pages"] == found["pages"][:3] and by_keys["tokens"] == 48, by_keys
    text = os.path.join(cli.folder, "tokens.txt")
    with open(text, "w") as file:
        file.write("[0, 1, 2]\n" + " ".join(str(i) for i in range(3, 100)))
    assert json.loads(cli("lookup", model["name"], text, "-o", "json").stdout)["held_tokens"] == 96
    with open(text) as file:
        expect(cli("lookup", model["name"], "-", stdin=file), 0, "HELD-TOKENS", "96")
    assert found["plan"] == "" and found["indexed_tokens"] == 0, found
    expect(cli("lookup", model["name"], text), 0, "PLAN", "raw pages")
    planned = json.loads(expect(cli("lookup", model["name"], path, "--plan", "sentencekv", "-o", "json"), 0).stdout)
    assert planned["plan"].startswith("sentencekv{") and planned["held_tokens"] < 592, planned
    expect(cli("lookup", model["name"], path, "--plan", "sentencekv"), 0, "INDEXED", str(planned["held_tokens"]))
    expect(cli("lookup", model["name"], path, "--plan", "qest"), 5, "PLAN_UNKNOWN")
    expect(cli("lookup", model["name"], path, "--plan", "full", "--device", "GPU-9"), 5, "DEVICE_UNKNOWN")
    expect(cli("lookup", model["name"], path, "--device", "GPU-9"), 2, "--plan")
    expect(cli("lookup", model["name"], *keys, "--plan", "full"), 2, "LOOKUP_WHAT", "tokens")
    stranger = expect(cli("lookup", model["name"], text, "--tenant", "uid:4242", "-o", "json"), 0)
    assert json.loads(stranger.stdout)["held_tokens"] == 0
    expect(cli("lookup", model["name"], text, "--pages"), 0, "TIER", found["pages"][5]["key"])
    expect(cli("lookup", "nothing", text), 5, "MODEL_UNKNOWN", "kvstrata model ls")
    expect(cli("lookup", model["name"], text + ".none"), 5, "TOKENS_UNREADABLE", "No such file")
    expect(cli("lookup", model["name"]), 2, "LOOKUP_WHAT", "next: kvstrata lookup MODEL FILE")
    expect(cli("tier", "probe", model["name"]), 2, "LOOKUP_WHAT", "next: kvstrata tier probe MODEL FILE")
    expect(cli("lookup", model["name"], "--key", "12zz"), 2, "KEY_TEXT")
    expect(cli("lookup", model["name"], "--key", "1234"), 2, "PAGE_KEY")
    with open(text, "w") as file:
        file.write("1 2 three")
    expect(cli("lookup", model["name"], text), 2, "TOKENS_TEXT", "three")


def daemon_pins(cli):
    """What daemon_replays left behind, pinned: it is on disk and in memory."""
    path = os.path.join(cli.folder, "t.safetensors")
    model = json.loads(cli("model", "ls", "-o", "json").stdout)["models"][0]["name"]
    assert json.loads(expect(cli("pin", "ls", "-o", "json"), 0).stdout)["pins"] == []
    pin = json.loads(expect(cli("pin", "add", model, path, "--ttl", "2d", "-o", "json"), 0).stdout)
    assert pin["tokens"] == 592 and pin["pages"] == 37 and pin["tenant"] == f"uid:{os.geteuid()}", pin
    assert pin["device_pages"] + pin["host_pages"] == 37, pin
    assert 47 * 3600 * 10**6 < pin["ttl_left_us"] <= 48 * 3600 * 10**6, pin
    listed = json.loads(cli("pin", "ls", "-o", "json").stdout)
    assert [p["pin"] for p in listed["pins"]] == [pin["pin"]] and listed["used_bytes"] == pin["bytes"], listed
    assert listed["limit_bytes"] > listed["used_bytes"], listed
    expect(cli("pin", "ls"), 0, "TTL-LEFT", model)
    before = json.loads(cli("evict", "--dry-run", "-o", "json").stdout)
    assert before["dry_run"] and before["pages"] == sum(t["pages"] for t in before["tiers"]), before
    assert sum(t["pinned_bytes"] for t in before["tiers"]) == pin["bytes"], before
    assert json.loads(cli("evict", "--dry-run", "-o", "json").stdout) == before, "it does nothing"
    expect(cli("evict", "--yes"), 0, "KEPT-BY-PINS")
    assert json.loads(cli("lookup", model, path, "-o", "json").stdout)["device_tokens"] == 592
    expect(cli("audit"), 0, "yes")
    expect(cli("pin", "rm", str(pin["pin"])), 0)
    expect(cli("pin", "rm", str(pin["pin"])), 5, "PIN_UNKNOWN", "kvstrata pin ls")
    after = json.loads(cli("evict", "--dry-run", "-o", "json").stdout)
    assert after["pages"] >= 37 and sum(t["pinned_bytes"] for t in after["tiers"]) == 0, after
    expect(cli("pin", "add", "--seq", "99"), 5, "SEQUENCE_UNKNOWN")
    expect(cli("pin", "add", "nothing", path), 5, "MODEL_UNKNOWN")
    expect(cli("pin", "add", model, path, "--tenant", "uid:4242"), 5, "PIN_MISS", "kvstrata lookup")
    expect(cli("pin", "add", model), 2, "PIN_WHAT")
    expect(cli("pin", "add", model, path, "--ttl", "400d"), 2, "8784h")


def daemon_replays_lossy_plans(cli):
    path = os.path.join(cli.folder, "l.safetensors")
    with open(path, "wb") as file:
        file.write(trace_bytes(tail=64))  # sentencekv watches the last 32 queries of the prompt
    known = {p["name"] for p in json.loads(cli("plan", "ls", "-o", "json").stdout)["plans"]}
    if not {"sekv", "mosaickv"} <= known:
        print("    not checked: the daemon has no lossy preset")
        return
    plans = ["mosaickv{min_tokens = 0}", "sekv{min_tokens = 0, local = 64}",
             'quest{budget = 64, min_tokens = 0, rest = "mean"}', "sentencekv{min_tokens = 0, tau = 64}"]
    words = [word for plan in plans for word in ("--plan", plan)]
    _, packed, spans, rest, buckets = json.loads(expect(cli("replay", path, *words, "-o", "json"), 0).stdout)["plans"]
    for row in (packed, spans, rest):
        assert row["sampled"] and 0 < row["mass_recall"]["mean"] <= 1, row
        assert row["output_error"]["codec"]["mean"] > 0, row
        assert row["cost_per_step"]["attend_bytes"] > 0, row
    for row in (packed, spans):
        assert row["kv_bytes_per_step"]["device"] is None, row
        assert row["kv_bytes_per_step"]["total"] == row["cost_per_step"]["attend_bytes"], row
    assert rest["cost_per_step"]["coarse_rows"] > 0 and rest["kv_bytes_per_step"]["device"] > 0, rest
    assert not buckets["sampled"] and 0 < buckets["mass_recall"]["mean"] < 1, buckets
    expect(cli("replay", path, *words), 0, "COARSE", "lossy plans")


def daemon_calibrates(cli):
    trace, out = (os.path.join(cli.folder, name) for name in ("k.safetensors", "k.toml"))
    with open(trace, "wb") as file:
        file.write(trace_bytes(steps=40))
    result = json.loads(expect(cli("calibrate", trace, "--out", out, "-o", "json"), 0).stdout)
    known = {p["name"] for p in json.loads(cli("plan", "ls", "-o", "json").stdout)["plans"]}
    for row in result["break_even"]["plans"]:
        name = row["plan"].split("{")[0]
        assert (row["status"] == "ok") == (name in known), row
        assert [p["tokens"] for p in row["points"]] == ([512, 600] if name in known else []), row
    assert (result["mosaickv"]["status"] == "ok") == ("mosaickv" in known), result["mosaickv"]
    # The file is one that a daemon takes; of presets that it has not, it says so.
    checked = cli("config", "check", out)
    assert checked.returncode == (0 if {"sekv", "tokenselect"} <= known else 1), checked
    expect(cli("calibrate", trace), 0, "break-even", "512")
    assert json.loads(cli("session", "ls", "-o", "json").stdout)["sessions"] == []
    expect(cli("audit"), 0, "yes")


if __name__ == "__main__":
    sys.exit(run_program(globals()))
