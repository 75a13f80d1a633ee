# SPDX-License-Identifier: Apache-2.0
"""When the worker of offload begins what it is told to, without an engine or a daemon."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm installs it")

from kvstrata_vllm.geometry import Geometry, Options  # noqa: E402
from kvstrata_vllm.offload_scheduler import Save  # noqa: E402
from kvstrata_vllm.offload_worker import OffloadWorker  # noqa: E402

from restarts import GEOMETRY  # noqa: E402


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> OffloadWorker:
    """Of one layer; what it would save is in its `sealed`."""
    made = OffloadWorker(Options(), Geometry(**vars(GEOMETRY)), [torch.zeros(4, 1, 16, 8)])
    made.sealed = []  # type: ignore[attr-defined]
    monkeypatch.setattr(made, "_seal", lambda save, saving: made.sealed.append(save.request) or True)
    return made


def drained(worker: OffloadWorker) -> list[str]:
    worker._saver.submit(lambda: None).result()  # behind all that was begun
    return list(worker.sealed)  # type: ignore[attr-defined]


def save_of(request: str) -> Save:
    return Save(request, 0, [1], list(range(16)), list(range(16)))


def test_saves_begin_in_the_next_step(worker: OffloadWorker):
    worker.save([save_of("a")])
    assert drained(worker) == []
    worker.load([])
    assert drained(worker) == ["a"]


def test_a_preempted_request_is_not_saved(worker: OffloadWorker):
    worker.save([save_of("a"), save_of("b")])
    worker.drop(["a"])
    worker.load([])
    assert drained(worker) == ["b"]


def test_what_was_ordered_is_saved_at_the_end(worker: OffloadWorker):
    worker.save([save_of("a")])
    worker.shutdown()
    assert worker.sealed == ["a"]  # type: ignore[attr-defined]


def test_a_finished_request_is_named_once_it_is_saved(worker: OffloadWorker):
    worker.save([save_of("a")])
    worker.load([])
    worker.results(["a"])
    drained(worker)
    assert worker.results([]).saved == {"a"} and worker.sealed == ["a"]  # type: ignore[attr-defined]
