# SPDX-License-Identifier: Apache-2.0
"""A daemon that is started again while no request runs: the adapter's sequences on it, without an engine."""

from __future__ import annotations

import pathlib
import signal

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed; make test-sglang installs it")

from kvstrata.daemon import Daemon  # noqa: E402
from kvstrata_sglang.geometry import Options  # noqa: E402
from kvstrata_sglang.sequences import Sequences  # noqa: E402

from alone import Loaded, request_of, show, step  # noqa: E402
from restarts import GEOMETRY, HELD, IDS, disk_of, end  # noqa: E402

@pytest.fixture
def sequences(tmp_path: pathlib.Path) -> Sequences:
    return Sequences(Options("full", str(tmp_path / "kvstratad.sock"), None))


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
def test_next_request(sequences: Sequences, tmp_path: pathlib.Path, by: signal.Signals):
    """It is served, with what the new daemon has: all where the old one could write it down."""
    socket, disk = str(tmp_path / "kvstratad.sock"), disk_of(tmp_path)
    a, b = request_of("a"), request_of("b")
    with Daemon(*disk, socket=socket) as daemon:
        sequences.serve(GEOMETRY, Loaded())
        assert show(sequences, a) == 0
        step(sequences, ("a", 0, IDS))
        sequences.close("a")
        end(daemon, by)
    with Daemon(*disk, socket=socket):
        first = show(sequences, b)
        if by == signal.SIGTERM:
            assert first == HELD
        step(sequences, ("b", first, IDS[first:]))
        step(sequences, ("b", len(IDS), [7]))
        assert a.to_finish is None and b.to_finish is None


def test_restart_behind_the_look_up(sequences: Sequences, tmp_path: pathlib.Path):
    """The open finds out, on its thread."""
    socket, disk = str(tmp_path / "kvstratad.sock"), disk_of(tmp_path)
    b = request_of("b")
    daemon = Daemon(*disk, socket=socket)
    sequences.serve(GEOMETRY, Loaded())
    show(sequences, request_of("a"))
    step(sequences, ("a", 0, IDS))
    sequences.close("a")
    daemon.stop()
    with Daemon(*disk, socket=socket) as second:
        assert sequences.held(request_of("look-up"), IDS, len(IDS) - 1) == HELD
        third = []

        def restart() -> None:
            second.stop()
            third.append(Daemon(*disk, socket=socket))

        assert show(sequences, b, restart) == HELD
        step(sequences, ("b", HELD, IDS[HELD:]))
        assert b.to_finish is None
        third[0].stop()


def test_nothing_held(sequences: Sequences, tmp_path: pathlib.Path):
    """Without a look-up the step's open finds out; a request beside it that had a sequence ends."""
    pytest.importorskip("sglang.srt.managers.schedule_batch")
    socket = str(tmp_path / "kvstratad.sock")
    a, b = request_of("a"), request_of("b")
    with Daemon(socket=socket):
        sequences.serve(GEOMETRY, Loaded())
        show(sequences, a)
        step(sequences, ("a", 0, IDS))
        sequences.held(b, IDS, 0)
    with Daemon(socket=socket):
        step(sequences, ("a", len(IDS), [7]), ("b", 0, IDS))
        step(sequences, ("b", len(IDS), [7]))
        assert a.to_finish is not None and b.to_finish is None
