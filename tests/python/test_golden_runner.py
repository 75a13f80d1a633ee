# SPDX-License-Identifier: Apache-2.0
"""golden_runner.py can fail: wrong answers, unknown plans and empty folders are never a pass."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT
from kvstrata.daemon import Daemon

import golden_runner

RUNNER = ROOT / "tests" / "golden_runner.py"
CASE = ROOT / "tests" / "golden" / "case_006.npz"


def run(folder: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, RUNNER, folder, *arguments], capture_output=True, text=True,
                          timeout=300)


def copy(folder: pathlib.Path, **changes) -> pathlib.Path:
    with np.load(CASE) as file:
        arrays = {name: file[name] for name in file.files}
    for name, change in changes.items():
        arrays[name.replace("__", ".")] = change(arrays[name.replace("__", ".")].copy())
    np.savez(folder / "case_006.npz", **arrays)
    return folder


def bump(x: np.ndarray) -> np.ndarray:
    x.reshape(-1)[min(3, x.size - 1)] += x.dtype.type(1)
    return x


def test_unchanged(tmp_path: pathlib.Path):
    got = run(copy(tmp_path))
    assert got.returncode == 0, got.stdout + got.stderr
    assert got.stdout.splitlines()[-1].endswith(" passed, 0 failed")
    assert "NOT RUN" not in got.stdout


@pytest.mark.parametrize("array", ["full.out", "window.tokens", "quest.units", "chess.selections",
                                   "chess.page_vectors_bf16", "chess.chunk_scores", "tokenselect.tokens",
                                   "tokenselect.votes_layer0", "tokenselect.chunk_tokens",
                                   "sentencekv.kept", "sentencekv.bucket_means", "sekv.spans",
                                   "sekv.relevance_logits", "mosaickv.strategies", "mosaickv.segments",
                                   "rawblocks.units"])
def test_a_changed_array_fails(tmp_path: pathlib.Path, array: str):
    stable = {f"{array.split('.')[0]}__stable": lambda x: np.ones_like(x)}
    got = run(copy(tmp_path, **{array.replace(".", "__"): bump}, **stable), "--plan", array.split(".")[0])
    assert got.returncode == 1, got.stdout
    assert f"FAIL case_006 {array}" in got.stdout
    assert ", 1 failed" in got.stdout.splitlines()[-1]


def test_a_case_that_cannot_run_is_no_pass(tmp_path: pathlib.Path):
    """SeKV's trained cases need the runner's own daemon."""
    with Daemon() as daemon:
        got = run(copy(tmp_path), "--plan", "sekv", "--socket", daemon.socket)
    assert got.returncode == 1
    assert "NOT RUN: plan sekv" in got.stdout
    assert got.stdout.splitlines()[-1] == "0 passed, 0 failed"


def test_usage(tmp_path: pathlib.Path):
    assert run(tmp_path).returncode == 2
    assert run(copy(tmp_path), "--plan", "nonsense").returncode == 2


def outcome_of(arrays: dict[str, np.ndarray], plan: str, turned: int) -> golden_runner.Outcome:
    """The expected selections, in the first `turned` stable rows one token shifted."""
    steps, layers, heads = len(arrays["entropy"]), len(arrays["keys_bf16"]), arrays["queries_bf16"].shape[2]
    outcome = golden_runner.Outcome(np.zeros((steps, layers, heads, 1)))
    outcome.tokens = [[[] for _ in range(layers)] for _ in range(steps)]
    rows = golden_runner.rows_of(arrays, f"{plan}.tokens")
    for (step, layer, _, _), row, stable in zip(golden_runner.walk(arrays, plan), rows, arrays[f"{plan}.stable"]):
        row = row.copy()
        if stable and turned > 0:
            row[0] += 1
            turned -= 1
        outcome.tokens[step][layer].append(row)
    return outcome


@pytest.mark.parametrize("backend, plan, turned, passes", [
    ("simd", "sentencekv", 0, True), ("simd", "sentencekv", 1, False), ("cuda", "sentencekv", 1, True),
    ("cuda", "sentencekv", 2, False), ("cuda", "quest", 1, False), ("simd", "bits", 3, True), ("ref", "bits", 1, False)])
def test_near_ties_of_a_gpu_are_few_and_of_some_plans(backend: str, plan: str, turned: int, passes: bool):
    with np.load(CASE.with_name("case_003.npz")) as file:
        arrays = {name: file[name] for name in file.files}
    assert len(golden_runner.rows_of(arrays, "sentencekv.tokens")) == 20
    problem, agrees = golden_runner.compare_rows(arrays, plan, outcome_of(arrays, plan, turned), "tokens", backend)
    assert (problem == "") == passes, problem
    assert agrees.all() == (turned == 0), "outputs of other choices are not compared"
