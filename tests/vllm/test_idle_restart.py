# SPDX-License-Identifier: Apache-2.0
"""A daemon that is started again while no request runs: both halves of owned mode on it, without an
engine."""

from __future__ import annotations

import pathlib
import signal

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm installs it")

from kvstrata.daemon import Daemon  # noqa: E402
from kvstrata_vllm.geometry import Options  # noqa: E402
from kvstrata_vllm.lookups import Lookups  # noqa: E402
from kvstrata_vllm.worker import WorkerHalf  # noqa: E402

from halves import MODEL, held, next_token, prompt, step  # noqa: E402
from restarts import HELD, disk_of, end  # noqa: E402

@pytest.fixture
def halves(tmp_path: pathlib.Path) -> tuple[Lookups, WorkerHalf]:
    options = Options(socket=str(tmp_path / "kvstratad.sock"))
    made = Lookups(options), WorkerHalf(options)
    made[0].serve(MODEL)
    return made


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
def test_owned(halves: tuple[Lookups, WorkerHalf], tmp_path: pathlib.Path, by: signal.Signals):
    """The next request is served, with what the new daemon has: all where the old one could write it down."""
    lookups, worker = halves
    socket, disk = str(tmp_path / "kvstratad.sock"), disk_of(tmp_path)
    with Daemon(*disk, socket=socket) as daemon:
        worker.serve(MODEL)
        first = held(lookups, "a")
        assert first == 0 and step(worker, prompt("a", first)) == set()
        end(daemon, by)
    with Daemon(*disk, socket=socket):
        first = held(lookups, "b")
        if by == signal.SIGTERM:
            assert first == HELD
        assert step(worker, prompt("b", first), ended=("a",)) == set()
        assert step(worker, next_token("b")) == set()  # it has a sequence


def test_owned_where_only_the_worker_finds_out(halves: tuple[Lookups, WorkerHalf], tmp_path: pathlib.Path):
    _, worker = halves
    socket = str(tmp_path / "kvstratad.sock")
    with Daemon(socket=socket):
        worker.serve(MODEL)
    with Daemon(socket=socket):
        assert step(worker, prompt("a", 0)) == set()
        assert step(worker, next_token("a")) == set()


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_owned_beside_a_request_that_is_hit(halves: tuple[Lookups, WorkerHalf], tmp_path: pathlib.Path, order: str):
    """One that had a sequence ends; the new one beside it does not."""
    _, worker = halves
    socket = str(tmp_path / "kvstratad.sock")
    with Daemon(socket=socket):
        worker.serve(MODEL)
        assert step(worker, prompt("a", 0)) == set()
    with Daemon(socket=socket):
        members = {"a": next_token("a"), "b": prompt("b", 0)}
        assert step(worker, *(members[name] for name in order)) == {ord("a")}
        assert step(worker, next_token("b")) == set()
