#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The program `kvstrata` as a shell sees it: exit codes, output, errors; with no daemon, with a socket
that never answers, and with a real daemon where one was built.

Usage: program_test.py --cli PATH --daemon PATH. Ends with `N passed, N failed`.
"""
import argparse
import json
import os
import select
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback

DEADLINE_S = 60


class Cli:
    def __init__(self, program, folder):
        self.program, self.folder = program, folder
        self.socket = os.path.join(folder, "k.sock")

    def __call__(self, *words, stdin=subprocess.DEVNULL, **env):
        environment = {k: v for k, v in os.environ.items() if k not in ("KVSTRATA_SOCKET", "NO_COLOR")}
        environment.update({"KVSTRATA_SOCKET": self.socket, **env})
        return subprocess.run([self.program, *words], env=environment, stdin=stdin, timeout=DEADLINE_S,
                              capture_output=True, text=True)


def expect(result, code, *words):
    shown = f"{result.args[1:]} exit {result.returncode}\n{result.stdout}{result.stderr}"
    assert result.returncode == code, f"wanted exit {code}: {shown}"
    for word in words:
        assert word in result.stdout + result.stderr, f"wanted {word!r}: {shown}"
    return result


def as_nobody(cli, *words):
    """Of the daemon's group. REQUIRES: root and setpriv."""
    with tempfile.TemporaryDirectory(prefix="kvs-cli-") as folder:  # whatever the build folder's mode
        os.chmod(folder, 0o755)
        copy = shutil.copy(cli.program, folder)
        library = next(line.split("=>")[1].split("(")[0].strip()
                       for line in subprocess.run(["ldd", cli.program], capture_output=True,
                                                  text=True).stdout.splitlines() if "libkvstrata" in line)
        shutil.copy(library, os.path.join(folder, os.path.basename(library)))
        return subprocess.run(["setpriv", "--reuid=65534", "--clear-groups", copy, *words],
                              env={"LD_LIBRARY_PATH": folder, "KVSTRATA_SOCKET": cli.socket},
                              timeout=DEADLINE_S, capture_output=True, text=True)


# ---- without a daemon ----

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


# ---- with a real daemon ----

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


def trace_bytes(prompt=600, steps=6, tail=8, layers="3"):
    """A trace of random keys: 4 query heads, 2 KV heads, dim 64, layers 0 and 2 of 3."""
    import random
    draw = random.Random(7)
    tokens = prompt + steps

    def bf16(n):
        return b"".join(struct.pack("<f", draw.gauss(0, 1))[2:] for _ in range(n))
    tensors = {"tokens": ("I32", [tokens], struct.pack(f"<{tokens}i", *range(tokens))),
               "entropy": ("F32", [steps], struct.pack(f"<{steps}f", *[1.0] * steps)),
               "surprisal": ("F32", [prompt], struct.pack(f"<{prompt}f", *[0.5] * prompt))}
    for layer in (0, 2):
        tensors[f"k.{layer}"] = ("BF16", [tokens, 2, 64], bf16(tokens * 128))
        tensors[f"v.{layer}"] = ("BF16", [tokens, 2, 64], bf16(tokens * 128))
        tensors[f"q.{layer}"] = ("BF16", [tail + steps, 4, 64], bf16((tail + steps) * 256))
    tensors["boundary"] = ("U8", [tokens], bytes(tokens))
    header = {"__metadata__": {
        "format": "kvstrata-trace", "format_version": "1", "layers": layers, "trace_layers": "0,2",
        "query_heads": "4", "kv_heads": "2", "head_dim": "64", "page_tokens": "16", "keys": "post_rope",
        "N0": str(prompt), "T": str(steps), "tail": str(tail)}}
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def numbers_of(value):
    """All numbers of a document."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [n for entry in value for n in numbers_of(entry)]
    return [value] if isinstance(value, (int, float)) else []


def disk_numbers_are_exact_in_any_reader(cli):
    for words in (["status"], ["model", "ls"], ["session", "ls"], ["seq", "ls"], ["pool", "ls"], ["work", "ls"],
                  ["tier", "ls"], ["pin", "ls"], ["config", "show"], ["value", "ls", "--limit", "1"], ["audit"]):
        document = json.loads(expect(cli(*words, "-o", "json"), 0).stdout)
        assert max([abs(n) for n in numbers_of(document)], default=0) <= 2 ** 53, (words, document)
    status = json.loads(cli("status", "-o", "json").stdout)
    assert isinstance(status["daemon_epoch"], str) and int(status["daemon_epoch"]) > 0, status
    assert isinstance(json.loads(cli("value", "ls", "-o", "json").stdout)["next"], str)


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


def daemon_health_is_the_same_for_everybody(cli):
    mine = json.loads(expect(cli("health", "-o", "json"), 0).stdout)
    assert mine == {"healthy": True, "health": "SERVING", "state": "serving", "why": ""}, mine
    if os.geteuid() == 0 and shutil.which("setpriv"):
        os.chmod(cli.folder, 0o755)
        assert json.loads(expect(as_nobody(cli, "health", "-o", "json"), 0).stdout) == mine


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
    expect(cli("lookup", model["name"]), 2, "LOOKUP_WHAT")
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


# ---- with a daemon that has a disk ----

def disk_is_shown(cli):
    shown = json.loads(expect(cli("tier", "show", "-o", "json"), 0).stdout)
    assert shown["path"] == os.path.join(cli.folder, "tier") and shown["capacity_bytes"] % (1 << 20) == 0, shown
    assert shown["queue"] in ("io_uring", "pread") and not shown["breaker_open"] and shown["entries"] == 0, shown
    assert json.loads(cli("tier", "ls", "-o", "json").stdout)["tiers"] == [shown]
    expect(cli("tier", "show"), 0, "LEFT-ALONE", "STOPPED-SEGMENTS", "LAST-ERROR")


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


def disk_lists_values(cli):
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


def disk_keys_may_be_ambiguous(cli):
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


def disk_gets_values(cli):
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
    import pty
    leader, follower = pty.openpty()
    expect(cli("value", "get", key, "--force", "--out", os.ttyname(follower)), 1, "VALUE_FILE", "terminal")
    os.close(leader)
    os.close(follower)


def disk_verifies_values(cli):
    """What disk_gets_values left on disk alone."""
    slots = slots_on_disk(os.path.join(cli.folder, "tier"))
    sound, damaged = slots[0][2].hex(), slots[1][2].hex()
    expect(cli("value", "verify", sound, damaged), 0, "VERDICT", "sound")
    damage(slots[1])
    found = json.loads(expect(cli("value", "verify", sound, damaged, "-o", "json"), 1).stdout)["values"]
    assert [b["verdict"] for b in found] == ["sound", "corrupt"] and found[1]["detail"], found
    assert found[0]["tiers"] == ["disk"], found
    expect(cli("value", "verify", damaged), 1, "gone")
    assert json.loads(cli("tier", "show", "-o", "json").stdout)["corrupt"] == 1


def disk_is_scrubbed(cli):
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


def wait_for_state(cli, state):
    end = time.monotonic() + DEADLINE_S
    while True:
        shown = json.loads(expect(cli("health", "-o", "json"), 0).stdout)
        if shown["state"] == state:
            return
        assert time.monotonic() < end, shown
        time.sleep(0.01)


def disk_is_drained(cli):
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
    expect(cli("quota", "set", "uid:1", "sessions", "4KiB"), 2, "QUOTA_VALUE", "none")
    for limit, nothing in (("sessions", "0"), ("host_bytes", "0GiB")):  # somebody meant to keep the user out
        expect(cli("quota", "set", "uid:1", limit, nothing), 2, "QUOTA_VALUE", "say none", "socket.group")
    expect(cli("quota", "set", "uid:1", "host_bytes", "much"), 2, "QUOTA_VALUE", "200MiB")
    expect(cli("quota", "set", "uid:1", "sessions"), 2, "USAGE")


def disk_is_resized(cli):
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


def with_daemon(program, cli, *flags):
    """Starts a daemon on cli's socket; yields nothing, returns its process."""
    read, write = os.pipe()
    process = subprocess.Popen([program, "--socket", cli.socket, "--ready-fd", str(write), *flags],
                               pass_fds=[write])
    os.close(write)
    ready = select.select([read], [], [], DEADLINE_S)[0] and os.read(read, 1)
    os.close(read)
    if not ready:
        process.kill()
        process.wait()
        raise RuntimeError("the daemon was not ready in time")
    return process


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cli", required=True)
    parser.add_argument("--daemon", required=True)
    args = parser.parse_args()
    passed = failed = 0

    def run(test, cli):
        nonlocal passed, failed
        try:
            test(cli)
            passed += 1
            print("ok     ", test.__name__)
        except Exception:
            failed += 1
            print("FAILED ", test.__name__)
            traceback.print_exc(file=sys.stdout)

    everything = list(globals().items())
    with tempfile.TemporaryDirectory(prefix="kvs-cli-") as folder:
        cli = Cli(args.cli, folder)
        for name, test in everything:
            if name.startswith("test_"):
                run(test, cli)
        if os.access(args.daemon, os.X_OK):
            disk = ["--set", f"disk.path={folder}/tier", "--set", "disk.budget_bytes=16MiB",
                    "--set", "disk.segment_bytes=1MiB"]
            for prefix, flags in (("daemon_", []), ("disk_", disk)):
                process = with_daemon(args.daemon, cli, *flags)
                try:
                    for name, test in everything:
                        if name.startswith(prefix):
                            run(test, cli)
                finally:
                    process.terminate()
                    process.wait(DEADLINE_S)
        else:
            print(f"NOT RUN: tests with a daemon: no {args.daemon}")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
