# SPDX-License-Identifier: Apache-2.0
"""A daemon that is killed in the middle, is restarted, or was never there."""

from __future__ import annotations

import contextlib
import pathlib
import signal
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from kvstrata.daemon import Daemon

import kvstrata
import kvstrata_transformers
from conftest import assert_same, batch_of
from restarts import disk_of, end


def test_no_daemon_at_enable(loaded):
    with pytest.raises(kvstrata.Unavailable):
        kvstrata_transformers.enable(loaded, socket="/nowhere/kvstratad.sock")
    assert "generate" not in vars(loaded)


def test_killed_at_random_moments(plain, loaded, text_ids, monkeypatch: pytest.MonkeyPatch, amount, shard,
                                  random: np.random.Generator):
    """The generate that it hits gives what it would have, plainly if need be; the next is plain, with a warning; once a
    daemon is there again, it serves."""
    batch = batch_of([text_ids[:80], text_ids[90:120]], 2)
    want = plain.generate(**batch, max_new_tokens=12, do_sample=False)
    for number in shard(random.integers(12 * len(loaded.model.layers), size=amount(20))):
        with Daemon() as doomed:
            monkeypatch.setenv("KVSTRATA_SOCKET", doomed.socket)
            kvstrata_transformers.enable(loaded)
            _generate_and_kill(plain, loaded, batch, want, doomed, number)
        with pytest.warns(UserWarning, match="runs without it"):
            assert_same(plain, batch, want, loaded.generate(**batch, max_new_tokens=12, do_sample=False))
        with Daemon() as anew:
            monkeypatch.setenv("KVSTRATA_SOCKET", anew.socket)
            cache = kvstrata_transformers.cache(loaded)
            got = loaded.generate(**batch, past_key_values=cache, max_new_tokens=12, do_sample=False)
            assert_same(plain, batch, want, got)
            assert cache.rows[0].tokens == 91
        kvstrata_transformers.disable(loaded)


def _generate_and_kill(plain, model, batch, want, daemon: Daemon, number: int) -> None:
    """Kills at the number-th call of a layer."""
    def kill() -> None:
        daemon.process.kill()
        daemon.process.wait()

    with _before_layers(model, _at_call(number, kill)):
        assert_same(plain, batch, want, model.generate(**batch, max_new_tokens=12, do_sample=False))
    print(f"killed at call {number}")


def _at_call(number: int, act: Callable[[], object]) -> Callable[..., None]:
    """A hook that acts at its number-th call. It returns None: anything else would take the place of the arguments."""
    calls = iter(range(10 ** 6))

    def hook(*_: object) -> None:
        if next(calls) == number:
            act()

    return hook


@contextlib.contextmanager
def _before_layers(model, call: Callable[..., None]) -> Iterator[None]:
    hooks = [layer.register_forward_pre_hook(call) for layer in model.model.layers]
    yield
    for hook in hooks:
        hook.remove()


def test_stopped_at_random_moments(plain, loaded, text_ids, amount, shard, random: np.random.Generator):
    """As killed; when it goes on, it serves."""
    batch = batch_of([text_ids[:80], text_ids[90:120]], 2)
    want = plain.generate(**batch, max_new_tokens=40, do_sample=False)
    for number in shard(random.integers(12 * len(loaded.model.layers), size=amount(20))):
        with Daemon() as daemon:
            kvstrata_transformers.enable(loaded, socket=daemon.socket)
            with _before_layers(loaded, _at_call(number, lambda: daemon.process.send_signal(signal.SIGSTOP))):
                assert_same(plain, batch, want, loaded.generate(**batch, max_new_tokens=40, do_sample=False))
            daemon.process.send_signal(signal.SIGCONT)
            print(f"stopped at call {number}")
            kvstrata_transformers.enable(loaded, socket=daemon.socket)
            cache = kvstrata_transformers.cache(loaded)
            assert_same(plain, batch, want, loaded.generate(**batch, past_key_values=cache, max_new_tokens=40,
                                                            do_sample=False))
            kvstrata_transformers.disable(loaded)


def test_a_cache_of_a_daemon_that_is_gone(loaded, text_ids, monkeypatch: pytest.MonkeyPatch):
    batch = batch_of([text_ids[:40]], 2)
    with Daemon() as first:
        monkeypatch.setenv("KVSTRATA_SOCKET", first.socket)
        kvstrata_transformers.enable(loaded)
        cache = kvstrata_transformers.cache(loaded)
        loaded.generate(**batch, past_key_values=cache, max_new_tokens=4)
    more = torch.ones(1, 60, dtype=torch.long)
    with pytest.raises(kvstrata.Unavailable):
        loaded.generate(more, past_key_values=cache, max_new_tokens=4)
    with Daemon() as second:
        monkeypatch.setenv("KVSTRATA_SOCKET", second.socket)
        with pytest.raises(kvstrata.FailedPrecondition, match="CACHE_LOST"):
            loaded.generate(more, past_key_values=cache, max_new_tokens=4)
        cache.close()
        kvstrata_transformers.disable(loaded)


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
def test_idle_restart(plain, loaded, text_ids, tmp_path: pathlib.Path, by: signal.Signals):
    """The next generate is on the new daemon, with what that has on disk: all where the old one could write it down."""
    socket, disk = str(tmp_path / "kvstratad.sock"), disk_of(tmp_path)
    batch = batch_of([text_ids[:200]], 2)
    want = plain.generate(**batch, max_new_tokens=4, do_sample=False)
    with Daemon(*disk, socket=socket) as old:
        kvstrata_transformers.enable(loaded, socket=socket)
        assert_same(plain, batch, want, loaded.generate(**batch, max_new_tokens=4, do_sample=False))
        end(old, by)
    with Daemon(*disk, socket=socket):
        cache = kvstrata_transformers.cache(loaded)
        got = loaded.generate(**batch, past_key_values=cache, max_new_tokens=4, do_sample=False)
        assert_same(plain, batch, want, got)
        if by == signal.SIGTERM:
            assert cache.rows[0].sequence.held == 192  # whole pages, at most all but one token
        kvstrata_transformers.disable(loaded)
