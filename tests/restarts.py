# SPDX-License-Identifier: Apache-2.0
"""What the tests of adapters share over a daemon that ends while nobody asks it, or hangs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time

import torch
from kvstrata.daemon import Daemon, find_daemon
from kvstrata.torch_model import Geometry

import kvstrata

IDS = list(range(100))
HELD = 96  # whole pages, at most all but one token
GEOMETRY = Geometry("m", "d", 1, 2, 1, 64, 0.125, kvstrata.DType.F32, [])
_PATIENCE = 60  # seconds until what is sealed must be on disk


def disk_of(folder: object) -> tuple[str, ...]:
    return ("--set", f"disk.path={folder}/tier", "--set", "disk.budget_bytes=512MiB", "--set", "disk.load_timeout=10s")


def end(daemon: Daemon, by: signal.Signals) -> None:
    """Ends a daemon. One that is to end by SIGTERM has written something to its disk: it then has all on disk, where a
    clean end alone writes what waits for half a second and drops the rest."""
    if by == signal.SIGTERM:
        _await_writes(daemon.socket)
    daemon.process.send_signal(by)
    daemon.process.wait()


def hang(daemon: Daemon) -> None:
    """Until SIGCONT it answers nothing."""
    daemon.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, daemon.process.pid, os.WSTOPPED | os.WNOWAIT)


def go_on(daemon: Daemon) -> None:
    daemon.process.send_signal(signal.SIGCONT)


def _await_writes(socket: str) -> None:
    command = [find_daemon().removesuffix("d"), "--socket", socket, "tier", "ls", "-o", "json"]
    until = time.monotonic() + _PATIENCE
    while True:
        [tier] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["tiers"]
        if tier["written"] and not tier["waiting"]:
            return
        assert time.monotonic() < until, f"never written: {tier}"
        time.sleep(0.02)


def batch_of(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v, out of the model."""
    return torch.ones(tokens, 2, 64), torch.ones(tokens, 1, 64), torch.ones(tokens, 1, 64), torch.zeros(tokens, 2, 64)
