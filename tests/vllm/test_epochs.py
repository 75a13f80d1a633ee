# SPDX-License-Identifier: Apache-2.0
"""Resets, and a model that changes while it is served: both halves of owned mode agree on what is found. Without an
engine."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm installs it")

from kvstrata.daemon import Daemon  # noqa: E402
from kvstrata.torch_identity import Identity  # noqa: E402
from kvstrata_vllm import lookups as lookups_module, worker as worker_module  # noqa: E402
from kvstrata_vllm.epochs import WorkerIdentity  # noqa: E402
from kvstrata_vllm.geometry import Options  # noqa: E402
from kvstrata_vllm.lookups import Lookups, follow  # noqa: E402
from kvstrata_vllm.scheduler import SchedulerHalf  # noqa: E402
from kvstrata_vllm.worker import WorkerHalf  # noqa: E402
from vllm.v1.request import RequestStatus  # noqa: E402

from halves import MODEL, held, next_token, prompt, step  # noqa: E402
from restarts import HELD, IDS  # noqa: E402


@pytest.fixture
def socket(tmp_path: pathlib.Path) -> Iterator[str]:
    with Daemon(socket=str(tmp_path / "kvstratad.sock")) as daemon:
        yield daemon.socket


@pytest.fixture
def halves(socket: str) -> tuple[Lookups, WorkerHalf]:
    """On whose model a prompt is held."""
    lookups, worker = Lookups(Options(socket=socket)), WorkerHalf(Options(socket=socket))
    lookups.serve(MODEL)
    worker.serve(MODEL)
    assert step(worker, prompt("a", 0)) == set() and step(worker, ended=("a",)) == set()
    worker._attachment.settle()
    assert held(lookups, "b") == HELD
    return lookups, worker


def other_engine(socket: str) -> Lookups:
    made = Lookups(Options(socket=socket))
    made.serve(MODEL)
    return made


def is_found_within(lookups: Lookups, worker: WorkerHalf, name: str) -> None:
    """What the epoch's first request computes its second one finds."""
    assert held(lookups, f"first {name}") == 0
    reset = lookups.epoch.reset
    assert step(worker, prompt(name, 0), reset=reset) == set()
    assert step(worker, ended=(name,), reset=reset) == set()
    worker._attachment.settle()
    assert held(lookups, f"second {name}") == HELD


def test_a_reset(halves: tuple[Lookups, WorkerHalf], socket: str):
    """Nothing of before is found, and nobody else loses anything."""
    lookups, worker = halves
    lookups.reset()
    is_found_within(lookups, worker, "c")
    assert held(other_engine(socket), "d") == HELD
    first = lookups.epoch.digest()
    lookups.reset()
    assert lookups.epoch.digest() != first
    is_found_within(lookups, worker, "e")


@pytest.mark.parametrize("here", [True, False])
def test_a_model_that_changes(halves: tuple[Lookups, WorkerHalf], socket: str, monkeypatch: pytest.MonkeyPatch,
                              here: bool):
    """here: scheduler and worker are one process; else the scheduler hears of it with a step's output."""
    lookups, worker = halves
    changed = Identity("changed", None)
    monkeypatch.setattr(worker_module, "identity_here", lambda opens: changed)
    if here:
        monkeypatch.setattr(lookups_module, "identity_here", lambda: changed)
    else:
        first = held(lookups, "x")
        assert first == HELD and step(worker, prompt("x", first)) == {ord("x")}  # what was promised is not there
        follow(lookups, SimpleNamespace(kv_connector_worker_meta=WorkerIdentity(worker.epoch.identity)))
    lookups.next_step()
    is_found_within(lookups, worker, "c")
    monkeypatch.undo()
    assert held(other_engine(socket), "d") == HELD


def test_a_request_that_runs_meanwhile_ends(halves: tuple[Lookups, WorkerHalf], monkeypatch: pytest.MonkeyPatch,
                                            caplog: pytest.LogCaptureFixture):
    """Its keys are of two models."""
    _, worker = halves
    assert step(worker, prompt("c", 0)) == set()
    monkeypatch.setattr(worker_module, "identity_here", lambda opens: Identity("changed", None))
    assert step(worker, next_token("c")) == {ord("c")}
    assert "request c: kvstratad: MODEL_CHANGED" in caplog.text


def test_what_cannot_be_known_is_private(halves: tuple[Lookups, WorkerHalf], monkeypatch: pytest.MonkeyPatch):
    """It is served, finds nothing, and is not found."""
    lookups, worker = halves
    with monkeypatch.context() as patched:
        for module in (lookups_module, worker_module):
            patched.setattr(module, "identity_here", lambda *_: Identity(MODEL.digest, "a hook is on it"))
        lookups.next_step()
        assert held(lookups, "c") == 0
        other = [7] * len(IDS)
        assert step(worker, prompt("c", 0)) == set() and step(worker, next_token("c")) == set()
        private = prompt("e", 0)
        private.ids = private.known = other
        assert step(worker, private) == set() and step(worker, ended=("e", "c")) == set()
    lookups.follow(identity=Identity(MODEL.digest, None))
    lookups.next_step()
    assert held(lookups, "d") == HELD  # of before
    assert lookups._look_up("f", other, 0) == 0


def request_of(status: RequestStatus) -> SimpleNamespace:
    return SimpleNamespace(request_id="r", status=status, cache_salt=None)


def test_a_reset_that_cannot_be_says_so(caplog: pytest.LogCaptureFixture):
    scheduler = SchedulerHalf(Options(), 32)
    scheduler.lookups.serve(MODEL)
    scheduler.add(request_of(RequestStatus.RUNNING))
    assert not scheduler.reset() and scheduler.lookups.epoch.digest() == MODEL.digest
    assert "nothing is reset: 1 requests run (r ...)" in caplog.text
    scheduler.add(request_of(RequestStatus.PREEMPTED))
    assert scheduler.reset() and scheduler.lookups.epoch.digest() != MODEL.digest
