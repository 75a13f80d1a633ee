# SPDX-License-Identifier: Apache-2.0
"""A daemon that does not answer: nothing raises in the engine's thread, nobody waits twice, requests end with an error.
Without an engine."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm installs it")

import kvstrata  # noqa: E402
from kvstrata import attachment  # noqa: E402
from kvstrata.daemon import Daemon  # noqa: E402
from kvstrata_vllm.geometry import Options  # noqa: E402
from kvstrata_vllm.lookups import Lookups  # noqa: E402
from kvstrata_vllm.worker import WorkerHalf  # noqa: E402

from halves import MODEL, next_token, prompt, step  # noqa: E402
from restarts import IDS, go_on, hang  # noqa: E402

ROOM = 4000  # tokens that no page table has room for from the beginning


@pytest.fixture(autouse=True)
def plenty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of processors, however busy the machine that tests run on."""
    monkeypatch.setattr(attachment, "short_of_processors", lambda: False)


@pytest.fixture
def daemon(tmp_path: pathlib.Path) -> Iterator[Daemon]:
    with Daemon(socket=str(tmp_path / "kvstratad.sock")) as started:
        yield started
        go_on(started)


@pytest.fixture
def worker(daemon: Daemon) -> WorkerHalf:
    made = WorkerHalf(Options(socket=daemon.socket))
    made.serve(MODEL)
    return made


@pytest.fixture
def opens(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by an entry with each open that the library is asked for."""
    asked: list[str] = []
    opened = kvstrata.Session.open

    def counted(session: kvstrata.Session, *args: Any, **options: Any) -> kvstrata.Sequence:
        asked.append("open")
        return opened(session, *args, **options)

    monkeypatch.setattr(kvstrata.Session, "open", counted)
    return asked


def serves_again(worker: WorkerHalf, daemon: Daemon) -> None:
    go_on(daemon)
    worker._attachment.start()
    assert step(worker, prompt("z", 0)) == set()
    assert step(worker, next_token("z")) == set()


def test_new_requests(worker: WorkerHalf, daemon: Daemon, opens: list[str]):
    """The first one waits, the others do not; each has its first token, and ends with the next."""
    hang(daemon)
    assert step(worker, prompt("a", 0), prompt("b", 0)) == set()
    assert step(worker, next_token("a"), next_token("b"), prompt("c", 0)) == {ord("a"), ord("b")}
    assert len(opens) == 1
    serves_again(worker, daemon)


def test_the_end_of_a_request(worker: WorkerHalf, daemon: Daemon, opens: list[str]):
    """Its close is not answered: whoever begins then does not wait for an open as well."""
    assert step(worker, prompt("a", 0)) == set()
    hang(daemon)
    opens.clear()
    assert step(worker, prompt("b", 0), ended=("a",)) == set()
    assert opens == [] and step(worker, next_token("b")) == {ord("b")}
    serves_again(worker, daemon)


def test_a_new_request_beside_one_that_runs(worker: WorkerHalf, daemon: Daemon):
    """Its open shows that the other one's sequence is out of reach, too."""
    assert step(worker, prompt("a", 0)) == set()
    hang(daemon)
    assert step(worker, next_token("a"), prompt("b", 0)) == {ord("a")}
    assert step(worker, next_token("b")) == {ord("b")}
    serves_again(worker, daemon)


def test_requests_that_run(worker: WorkerHalf, daemon: Daemon):
    """They go on while they have pages, and end when they need more."""
    assert step(worker, prompt("a", 0), prompt("b", 0)) == set()
    hang(daemon)
    for number in range(ROOM):
        if lost := step(worker, next_token("a", number), next_token("b", number)):
            break
    assert number > 0 and lost == {ord("a"), ord("b")}
    serves_again(worker, daemon)


def test_a_preempted_request_restarts(worker: WorkerHalf, daemon: Daemon):
    assert step(worker, prompt("a", 0)) == set()
    hang(daemon)
    assert step(worker, prompt("a", 0), ended=("a",)) == set()
    assert step(worker, next_token("a")) == {ord("a")}
    serves_again(worker, daemon)


def test_a_layer_that_refuses(worker: WorkerHalf, daemon: Daemon, monkeypatch: pytest.MonkeyPatch):
    """Whoever is at its first token attends alone; the others end with an error."""
    assert step(worker, prompt("a", 0)) == set()

    def refuse(*_: Any) -> None:
        raise kvstrata.InvalidArgument("k has a number that is not finite", "TENSOR_NOT_FINITE")

    with monkeypatch.context() as patched:
        patched.setattr(kvstrata.Step, "append", refuse)
        assert step(worker, next_token("a"), prompt("b", 0)) == {ord("a")}
    assert step(worker, next_token("b")) == {ord("b")}
    serves_again(worker, daemon)


class Clock:
    """Of a machine on which every wait lasts until its end, and nothing else takes time."""

    def __init__(self) -> None:
        self.now, self.waits = 1000.0, 0.0

    def monotonic(self) -> float:
        return self.now

    def wait(self, futures: list[Future[Any]], seconds: float) -> tuple[set[Any], set[Any]]:
        self.now, self.waits = self.now + seconds, self.waits + seconds
        return set(), set(futures)


@pytest.mark.parametrize("waiting", [1, 8, 64])
def test_a_step_waits_for_look_ups_once(monkeypatch: pytest.MonkeyPatch, waiting: int):
    """Whatever the number of requests whose look-ups are slow."""
    clock = Clock()
    monkeypatch.setattr(attachment, "wait", clock.wait)
    monkeypatch.setattr(attachment, "time", clock)
    lookups = Lookups(Options())
    lookups.serve(MODEL)
    monkeypatch.setattr(lookups._beside, "submit", lambda *_: Future())
    for _ in range(3):
        lookups.next_step()
        clock.waits = 0.0
        for number in range(waiting):
            assert lookups.held(SimpleNamespace(request_id=str(number), all_token_ids=IDS)) is None
        assert clock.waits <= attachment.PATIENCE * 1.001
