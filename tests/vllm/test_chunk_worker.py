# SPDX-License-Identifier: Apache-2.0
"""A worker's side of engine chunks: nothing is copied for a scheduler that takes the model for another one. Without an
engine; what a look finds is said by the test."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm installs it")

from kvstrata.torch_identity import Identity  # noqa: E402
from kvstrata_vllm import chunk_worker  # noqa: E402
from kvstrata_vllm.chunk_metadata import ChunkMetadata, ChunkWorkerMetadata  # noqa: E402
from kvstrata_vllm.chunk_worker import ChunkWorker  # noqa: E402
from kvstrata_vllm.transfers import Transfers  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata  # noqa: E402

RANK, MODEL, OTHER = 1, Identity("m" * 64, None), Identity("o" * 64, None)


class Reading:
    """A look that is under way until `over` is set."""

    def __init__(self, holds: bool) -> None:
        self.holds, self.over = holds, False

    def ended(self) -> bool:
        return self.over

    def hold(self) -> bool:
        return self.holds


class Engine:
    """model: as it is now; reading: of the next look, None: it is one that waits; due: whether a step that copies nothing
    is looked at; waited: how many looks were waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model, self.reading, self.due, self.waited = MODEL, None, True, 0
        monkeypatch.setattr(chunk_worker, "identity_here", self.identity_here)
        monkeypatch.setattr(chunk_worker, "begin_look", lambda: self.reading)
        monkeypatch.setattr(chunk_worker, "look_is_due", lambda: self.due)
        copies: Any = SimpleNamespace()
        self.transfers = Transfers(copies)
        self.worker = ChunkWorker(RANK, MODEL, self.transfers)

    def identity_here(self) -> Identity:
        self.waited += 1
        return self.model

    def step(self, loads: tuple[int, ...] = (), stores: tuple[int, ...] = (), known: Identity = MODEL, reset: str = ""
             ) -> ChunkMetadata:
        made = ChunkMetadata({job: SimpleNamespace(req_id=f"r{job}") for job in loads},
                             {job: SimpleNamespace() for job in stores}, reset=reset, identities={0: MODEL, RANK: known})
        self.worker.look(made)
        return made


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(monkeypatch)


def test_a_step_is_looked_at_once(engine: Engine):
    made = engine.step(loads=(1,), stores=(2,))
    engine.worker.look(made)
    assert engine.waited == 1 and engine.transfers.refused == set()
    engine.due = False
    engine.step()
    assert engine.waited == 1 and engine.worker.news(None) is None


def test_a_step_that_copies_nothing_waits_for_no_look(engine: Engine):
    """Neither for its own nor for one before it; what one finds is said when it has ended."""
    engine.reading = Reading(holds=False)
    engine.step()
    engine.step()
    engine.worker.settle(wait=False)
    assert engine.waited == 0 and engine.worker.news(None) is None
    engine.model, engine.reading.over = OTHER, True
    engine.worker.settle(wait=False)
    news = engine.worker.news(None)
    assert news is not None and news.identities == {RANK: OTHER}


def test_what_changed_is_refused_until_the_scheduler_has_heard(engine: Engine):
    engine.model = OTHER
    engine.step(loads=(1,), stores=(2,))
    assert engine.transfers.refused == {1, 2}
    news = engine.worker.news(None)
    assert news is not None and news.identities == {RANK: OTHER} and not news.since_reset
    engine.step(stores=(3,))
    assert engine.transfers.refused == {1, 2, 3}
    engine.step(stores=(4,), known=OTHER)
    assert engine.transfers.refused == {1, 2, 3} and engine.worker.news(None) is None


def test_behind_a_reset_what_changed_before_it_is_the_new_model(engine: Engine):
    engine.model = OTHER
    engine.step(stores=(1,), reset="r")
    news = engine.worker.news(None)
    assert news is not None and news.since_reset and news.identities == {RANK: OTHER}
    assert engine.transfers.refused == set()
    engine.model = MODEL
    engine.step(stores=(2,), reset="r", known=OTHER)
    news = engine.worker.news(None)
    assert engine.transfers.refused == {2} and news is not None and not news.since_reset


def test_a_private_model_behind_a_reset(engine: Engine):
    engine.model = Identity(MODEL.digest, "a hook")
    engine.step(stores=(1,), reset="r")
    assert engine.transfers.refused == {1}


@pytest.mark.parametrize("changed", [True, False])
def test_a_look_that_nobody_waits_for(engine: Engine, changed: bool):
    """The end of its jobs is said when it has ended, and they count where it found nothing."""
    engine.reading = Reading(holds=not changed)
    engine.step(loads=(1,), stores=(2,))
    engine.worker.settle(wait=False)
    assert engine.transfers.unsure == {1, 2} and engine.waited == 0
    engine.model = OTHER if changed else MODEL
    engine.reading.over = True
    engine.worker.settle(wait=False)
    assert engine.transfers.unsure == set() and engine.transfers.refused == ({1, 2} if changed else set())


def test_the_next_step_waits_for_the_last_look(engine: Engine):
    engine.reading = Reading(holds=False)
    engine.step(stores=(1,))
    engine.model, engine.reading = OTHER, None
    engine.step()
    assert engine.transfers.refused == {1} and engine.transfers.unsure == set()


def test_a_trace_that_says_nothing(engine: Engine):
    """An attribute that was made anew, of a model that is the same."""
    engine.reading = Reading(holds=False)
    engine.step(stores=(1,))
    engine.worker.settle(wait=True)
    assert engine.waited == 1 and engine.transfers.refused == set()


def test_requests_whose_loads_failed(engine: Engine):
    engine.step(loads=(1, 2))
    engine.transfers.failed.add(1)
    results = engine.worker.results(KVConnectorTransferResults(set(), {"r1", "r2"}))
    assert results.failed_recving == {"r1"} and results.finished_recving == {"r1", "r2"}
    news = engine.worker.news(OffloadingWorkerMetadata({1: 1, 2: 1}))
    assert news is not None and news.failed == {1} and news.completed_jobs == {1: 1, 2: 1}
    assert engine.worker.results(KVConnectorTransferResults(set(), set())).failed_recving == set()


def test_news_of_ranks_add_up():
    first = ChunkWorkerMetadata({1: 1}, identities={0: MODEL}, failed={1})
    second = ChunkWorkerMetadata({1: 1, 2: 1}, identities={1: OTHER}, since_reset=False)
    both = first.aggregate(second)
    assert both.completed_jobs == {1: 2, 2: 1} and both.identities == {0: MODEL, 1: OTHER}
    assert both.failed == {1} and not both.since_reset
