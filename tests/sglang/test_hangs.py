# SPDX-License-Identifier: Apache-2.0
"""A daemon that does not answer: nothing raises in the scheduler's thread, nobody waits twice, requests end with an
error. Without an engine."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed; make test-sglang installs it")
pytest.importorskip("sglang.srt.managers.schedule_batch")

import kvstrata  # noqa: E402
from kvstrata import attachment  # noqa: E402
from kvstrata.daemon import Daemon  # noqa: E402
from kvstrata_sglang.geometry import Options  # noqa: E402
from kvstrata_sglang.sequences import Sequences  # noqa: E402

from alone import Loaded, request_of, show, step  # noqa: E402
from restarts import GEOMETRY, HELD, IDS, go_on, hang  # noqa: E402

ROOM = 4000  # tokens that no page table has room for from the beginning


@pytest.fixture(autouse=True)
def plenty(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are processors enough, however busy the machine that tests run on."""
    monkeypatch.setattr(attachment, "short_of_processors", lambda: False)


@pytest.fixture
def daemon(tmp_path: pathlib.Path) -> Iterator[Daemon]:
    with Daemon(socket=str(tmp_path / "kvstratad.sock")) as started:
        yield started
        go_on(started)


@pytest.fixture
def sequences(daemon: Daemon) -> Sequences:
    made = Sequences(Options("full", daemon.socket, None))
    made.serve(GEOMETRY, Loaded())
    return made


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by an entry with each open and look-up that the library is asked for."""
    names: list[str] = []

    def count(name: str) -> None:
        call = getattr(kvstrata.Session, name)

        def counted(session: kvstrata.Session, *args: Any, **options: Any) -> Any:
            names.append(name)
            return call(session, *args, **options)

        monkeypatch.setattr(kvstrata.Session, name, counted)

    count("open")
    count("lookup")
    return names


def serves_again(sequences: Sequences, daemon: Daemon) -> None:
    go_on(daemon)
    sequences._attachment.start()
    z = request_of("z")
    sequences.held(z, IDS, 0)
    step(sequences, ("z", 0, IDS))
    step(sequences, ("z", len(IDS), [7]))
    assert z.to_finish is None


def test_new_requests(sequences: Sequences, daemon: Daemon, asked: list[str]):
    """The first look-up waits; nothing else does."""
    hang(daemon)
    requests = [request_of(name) for name in "abc"]
    for request in requests:
        assert show(sequences, request) == 0
        step(sequences, (request.rid, 0, IDS))
        assert "did not answer in time" in request.to_finish.message
    assert asked == ["lookup"]
    serves_again(sequences, daemon)


def test_the_end_of_a_request(sequences: Sequences, daemon: Daemon, asked: list[str]):
    """Its close is not answered, and is waited for in place of the next open."""
    a, b = request_of("a"), request_of("b")
    show(sequences, a)
    step(sequences, ("a", 0, IDS))
    sequences.held(b, IDS, 0)
    asked.clear()
    hang(daemon)
    sequences.close("a")
    step(sequences, ("b", 0, IDS))
    assert asked == [] and b.to_finish is not None
    serves_again(sequences, daemon)


def test_a_new_request_beside_one_that_runs(sequences: Sequences, daemon: Daemon):
    """Its open shows that the other one's sequence is out of reach, too."""
    a, b = request_of("a"), request_of("b")
    sequences.held(a, IDS, 0)
    step(sequences, ("a", 0, IDS))
    sequences.held(b, IDS, 0)
    hang(daemon)
    step(sequences, ("a", len(IDS), [7]), ("b", 0, IDS))
    assert a.to_finish is not None and b.to_finish is not None
    serves_again(sequences, daemon)


def test_requests_that_run(sequences: Sequences, daemon: Daemon):
    """They go on while they have pages, and end when they need more."""
    requests = {name: request_of(name) for name in "ab"}
    for request in requests.values():
        sequences.held(request, IDS, 0)
    step(sequences, *((name, 0, IDS) for name in requests))
    hang(daemon)
    for number in range(ROOM):
        step(sequences, *((name, len(IDS) + number, [7]) for name in requests))
        if all(request.to_finish is not None for request in requests.values()):
            break
    assert 0 < number < ROOM - 1
    serves_again(sequences, daemon)


@pytest.mark.parametrize("what", [{"cache_salt": "s"}, {"extra_key": "k"}])
def test_requests_with_a_key_of_their_own_are_private(sequences: Sequences, what: dict[str, str]):
    for name, other in (("a", what), ("b", what), ("c", {})):
        request = request_of(name, **other)
        assert show(sequences, request) == 0
        step(sequences, (name, 0, IDS))
        step(sequences, (name, len(IDS), [7]))
        assert request.to_finish is None
        sequences.close(name)
        sequences._attachment.settle()
    assert show(sequences, request_of("d")) == HELD  # c's
    assert show(sequences, request_of("e", **what)) == 0


def test_a_flush_and_a_model_that_changes(daemon: Daemon):
    """Begin an epoch each."""
    loaded, sequences = Loaded(), Sequences(Options("full", daemon.socket, None))
    sequences.serve(GEOMETRY, loaded)

    def compute(name: str) -> None:
        """And find it again."""
        assert show(sequences, request_of(name)) == 0
        step(sequences, (name, 0, IDS))
        sequences.close(name)
        sequences._attachment.settle()
        assert show(sequences, request_of(f"{name} again")) == HELD
        sequences.close(f"{name} again")

    compute("a")
    sequences.forget_prompts()
    compute("b")
    loaded.identity = loaded.identity._replace(digest="changed")
    sequences._looked_at = 0.0  # as if a moment ago
    compute("c")
    running = request_of("d")
    held = show(sequences, running)
    step(sequences, ("d", held, IDS[held:]))
    loaded.identity = loaded.identity._replace(digest="changed again")
    sequences._looked_at = 0.0
    step(sequences, ("d", len(IDS), [7]))
    assert "MODEL_CHANGED" in running.to_finish.message
