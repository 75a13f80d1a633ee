# SPDX-License-Identifier: Apache-2.0
"""A daemon that is started again while no request runs: both halves of the adapter on it, without an engine."""

from __future__ import annotations

import pathlib
import signal
import time
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm installs it")

from kvstrata.daemon import Daemon  # noqa: E402
from kvstrata_vllm.geometry import Geometry, Options  # noqa: E402
from kvstrata_vllm.lookups import Lookups  # noqa: E402
from kvstrata_vllm.offload_scheduler import Load, Save  # noqa: E402
from kvstrata_vllm.offload_worker import OffloadWorker  # noqa: E402
from kvstrata_vllm.scheduler import Scheduled, StepMetadata  # noqa: E402
from kvstrata_vllm.worker import Rows, WorkerHalf  # noqa: E402

from restarts import GEOMETRY, HELD, IDS, batch_of, disk_of, end  # noqa: E402

_GEOMETRY = Geometry(**vars(GEOMETRY))
_ANSWERS = 60  # seconds in which a look-up, or a transfer, must be over


def held(lookups: Lookups, name: str) -> int:
    until = time.monotonic() + _ANSWERS
    request = SimpleNamespace(request_id=name, all_token_ids=IDS)
    while (tokens := lookups.held(request)) is None:
        assert time.monotonic() < until, "the look-up is never over"
    return tokens


def step(worker: WorkerHalf, *members: Scheduled, ended: tuple[str, ...] = ()) -> set[int]:
    """Blocks that are lost in it. Each member has one block, of its name's place in the alphabet."""
    blocks = [member.first_block for member in members]
    worker.begin(StepMetadata(dict(zip(blocks, members)), list(ended)))
    starts = [0]
    for member in members:
        starts.append(starts[-1] + len(member.ids))
    worker.attend(0, Rows(starts, blocks), *batch_of(starts[-1]), 0.125)
    worker.end(1)
    return worker.lost_blocks()


def prompt(name: str, first: int) -> Scheduled:
    return Scheduled(name, first, ord(name), IDS[first:], IDS)


def next_token(name: str) -> Scheduled:
    return Scheduled(name, len(IDS), ord(name), [7], None)


@pytest.fixture
def halves(tmp_path: pathlib.Path) -> tuple[Lookups, WorkerHalf]:
    options = Options(socket=str(tmp_path / "kvstratad.sock"))
    made = Lookups(options), WorkerHalf(options)
    made[0].serve(_GEOMETRY)
    return made


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
def test_owned(halves: tuple[Lookups, WorkerHalf], tmp_path: pathlib.Path, by: signal.Signals):
    """The next request is served, with what the new daemon has: all where the old one could write it down."""
    lookups, worker = halves
    socket, disk = str(tmp_path / "kvstratad.sock"), disk_of(tmp_path)
    with Daemon(*disk, socket=socket) as daemon:
        worker.serve(_GEOMETRY)
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
        worker.serve(_GEOMETRY)
    with Daemon(socket=socket):
        assert step(worker, prompt("a", 0)) == set()
        assert step(worker, next_token("a")) == set()


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_owned_beside_a_request_that_is_hit(halves: tuple[Lookups, WorkerHalf], tmp_path: pathlib.Path, order: str):
    """One that had a sequence ends; the new one beside it does not."""
    _, worker = halves
    socket = str(tmp_path / "kvstratad.sock")
    with Daemon(socket=socket):
        worker.serve(_GEOMETRY)
        assert step(worker, prompt("a", 0)) == set()
    with Daemon(socket=socket):
        members = {"a": next_token("a"), "b": prompt("b", 0)}
        assert step(worker, *(members[name] for name in order)) == {ord("a")}
        assert step(worker, next_token("b")) == set()


def test_offload(tmp_path: pathlib.Path):
    """A load is on the new daemon, which has the pages; so is a save."""
    options = Options(socket=str(tmp_path / "kvstratad.sock"))
    disk, lookups = disk_of(tmp_path), Lookups(options)
    lookups.serve(_GEOMETRY)
    cache = torch.rand(4, 1, 32, 128)
    worker, saved = OffloadWorker(options, _GEOMETRY, [cache]), cache[:3].clone()

    def finished(name: str) -> None:
        until = time.monotonic() + _ANSWERS
        worker.load([])
        ended: tuple[str, ...] = (name,)
        while name not in worker.results(ended).saved:
            ended = ()
            assert time.monotonic() < until, "blocks are never free"

    with Daemon(*disk, socket=options.socket):
        assert held(lookups, "a") == 0
        worker.save([Save("a", 0, [0, 1, 2], IDS[:HELD], IDS)])
        finished("a")
    cache.zero_()
    with Daemon(*disk, socket=options.socket):
        assert held(lookups, "b") == HELD
        worker.load([Load("b", IDS[:HELD + 1], 0, HELD, [0, 1, 2])])
        worker._loader.shutdown()
        results = worker.results(())
        assert results.loaded == {"b"} and not results.failed and torch.equal(cache[:3], saved)
    with Daemon(socket=options.socket):
        worker.save([Save("c", 0, [0, 1, 2], IDS[:HELD], IDS)])
        finished("c")
        assert held(lookups, "c") == HELD
    worker._loader = worker._saver
    worker.shutdown()
