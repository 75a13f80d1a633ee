# SPDX-License-Identifier: Apache-2.0
"""Plans on a real trace: every preset, and combinations that no paper has, through `kvstrata replay`.

The trace is SmolLM2 on the GPL-3 text, recorded once a run (600 tokens, two layers): short, so budgets are
small and errors large; what is held here is that each runs end to end, that its parts add up, and the
invariants of docs/spec/README.md that a trace can show. bench/fidelity.py measures what plans lose.
"""

from __future__ import annotations

import json
import pathlib
import subprocess

import pytest
from conftest import ROOT

import kvstrata
from kvstrata.daemon import Daemon

CLI = ROOT / "build" / "bin" / "kvstrata"
PROMPT, STEPS = 600, 24
PRESETS = {
    "quest": "quest{budget = 64, min_tokens = 0}",
    "chess": 'chess{trigger = "every", every = 1, page = 16, window = 2, min_tokens = 0}',
    "tokenselect": "tokenselect{k = 48, n_init = 4, n_local = 16, min_tokens = 0}",
    "sentencekv": "sentencekv{tau = 64, start = 4, recent = 16, min_tokens = 0}",
    "sekv": "sekv{max_loss = 1, local = 32, rows_share = 0.6, min_tokens = 0}",
    "mosaickv": "mosaickv{max_loss = 1, share = 0.1, min_tokens = 0}",
    "bits": "bits{budget = 64, min_tokens = 0}",
    "strata": "strata{min_tokens = 0}",
}
COMBINATIONS = {
    "cascade over packed": '{selector = "cascade", codec = "packed", max_loss = 1, trigger = "every", every = 1, page = 16, '
                           "window = 2, min_tokens = 0}",
    "vote over packed": '{selector = "vote", codec = "packed", max_loss = 1, k = 48, n_init = 4, n_local = 16, min_tokens = 0}',
    "bucket over lowrank": '{selector = "bucket", codec = "lowrank", tau = 64, local = 32, min_tokens = 0}',
    "minmax over packed": '{selector = "minmax", codec = "packed", max_loss = 1, budget = 64, min_tokens = 0}',
    "bits over packed": '{selector = "bits", codec = "packed", max_loss = 1, budget = 64, min_tokens = 0}',
    "block over raw": '{selector = "block", codec = "raw", page = 16, share = 0.1, min_tokens = 0}',
    "full over packed": '{selector = "full", codec = "packed", max_loss = 1, min_tokens = 0}',
    "window over packed": '{selector = "window", codec = "packed", max_loss = 1, n_sink = 4, n_recent = 64, min_tokens = 0}',
    "packed, raw pages released": '{selector = "minmax", codec = "packed", max_loss = 1, budget = 64, keep_raw = "no", '
                                    "min_tokens = 0}",
    "softmax of heads": 'quest{group = "softmax", page = 32, n_sink = 4, n_recent = 64, budget = 64, min_tokens = 0}',
    "coarse rest": 'quest{budget = 64, rest = "mean", min_tokens = 0}',
    "tree": 'chess{trigger = "every", every = 1, page = 16, window = 2, rest = "mean", tree = true, min_tokens = 0}',
    "drift": 'mosaickv{max_loss = 1, strategy = "search", closing = "drift", min_segment = 256, min_tokens = 0}',
}


@pytest.fixture(scope="module")
def trace(model_file: str, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    from kvstrata_numpy import trace as recorder
    path = tmp_path_factory.mktemp("trace") / "gpl.safetensors"
    assert recorder.main(["--out", str(path), "--model", model_file, "--tokens", str(PROMPT), "--steps",
                          str(STEPS), "--tail", "64", "--layers", "1,15"]) == 0
    return path


@pytest.fixture(scope="module")
def reports(trace: pathlib.Path, daemon: Daemon) -> dict[str, dict]:
    plans = {"full": "full", **PRESETS, **COMBINATIONS}
    arguments = [CLI, "--socket", daemon.socket, "replay", trace, "-o", "json"]
    for plan in plans.values():
        arguments += ["--plan", plan]
    done = subprocess.run(list(map(str, arguments)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout)["plans"]
    return dict(zip(plans, [row for row in rows if not row["reference"]]))


def mean(value: object) -> float:
    return value["mean"] if isinstance(value, dict) else value


@pytest.mark.parametrize("name", [*PRESETS, *COMBINATIONS])
def test_runs_on_a_real_trace(reports: dict[str, dict], name: str):
    report = reports[name]
    assert 0 < mean(report["mass_recall"]) <= 1.0001, report
    # An output that is off by its own size says that something is broken, not that a budget is small.
    assert 0 <= mean(report["output_error"]) < 1, report
    full = reports["full"]["cost_per_step"]
    cost = report["cost_per_step"]
    assert cost["attend_bytes"] > 0
    assert cost["rows"] <= full["rows"]
    if "full over" not in name:
        assert cost["attend_bytes"] < full["attend_bytes"], (cost, full)
    if "packed" in name or name == "mosaickv":
        assert cost["attend_bytes"] < 0.75 * cost["rows"] * 256, "packed rows are smaller than raw ones"
    if name in ("sekv", "coarse rest", "tree"):
        assert cost["coarse_rows"] > 0


def test_full_is_exact(reports: dict[str, dict]):
    assert mean(reports["full"]["output_error"]) == 0
    assert abs(mean(reports["full"]["mass_recall"]) - 1) < 1e-5


def test_all_packed_loses_by_the_codec_alone(reports: dict[str, dict]):
    report = reports["full over packed"]
    assert abs(mean(report["mass_recall"]) - 1) < 1e-5
    assert mean(report["output_error"]) > 0.01


@pytest.mark.parametrize(("plan", "because"), [
    ('{selector = "zoom", codec = "raw"}', "spans"),
    ('{selector = "minmax", codec = "lowrank"}', "whole spans"),
    ('{selector = "bucket", codec = "packed", max_loss = 1}', "sentence"),
    ('{selector = "block", codec = "lowrank"}', "whole spans"),
    ('{selector = "full", codec = "planes"}', "only selector 'fine'"),
    ('{selector = "fine", codec = "raw"}', "only selector 'fine'"),
])
def test_impossible_combinations_say_why(daemon: Daemon, plan: str, because: str):
    with kvstrata.attach(daemon.socket) as session:
        model = session.register_model("m", "combinations", layers=1, query_heads=2, kv_heads=1, head_dim=64)
        with pytest.raises(kvstrata.InvalidArgument, match=because) as error:
            session.open(model, plan)
    assert error.value.reason == "PLAN_COMBINATION"
