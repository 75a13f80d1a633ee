"""golden_runner.py can fail: wrong answers, unknown plans and empty folders are never a pass."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT
from kvstrata.daemon import Daemon

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
