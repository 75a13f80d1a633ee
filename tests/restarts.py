"""What the tests of adapters over an idle restart of the daemon share; no engine."""

from __future__ import annotations

import signal

import torch
from kvstrata.daemon import Daemon
from kvstrata.torch_model import Geometry

import kvstrata

IDS = list(range(100))
HELD = 96  # whole pages, at most all but one token
GEOMETRY = Geometry("m", "d", 1, 2, 1, 64, 0.125, kvstrata.DType.F32, [])


def disk_of(folder: object) -> tuple[str, ...]:
    return ("--set", f"disk.path={folder}/tier", "--set", "disk.budget_bytes=512MiB", "--set", "disk.load_timeout=10s")


def end(daemon: Daemon, by: signal.Signals) -> None:
    daemon.process.send_signal(by)
    daemon.process.wait()


def batch_of(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v, out of the model."""
    return torch.ones(tokens, 2, 64), torch.ones(tokens, 1, 64), torch.ones(tokens, 1, 64), torch.zeros(tokens, 2, 64)
