# SPDX-License-Identifier: Apache-2.0
"""A daemon that does not answer, and values that are not finite: generate() answers as the plain model does."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kvstrata.daemon import Daemon

import kvstrata
import kvstrata_transformers
from served_models import answer, assert_same, compare, ids_of, pair, small

PROMPT = ids_of(62, 1)  # two tokens before a page's end
NEW = 160


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon() as started:
        yield started
        started.process.send_signal(signal.SIGCONT)


def hang(daemon: Daemon) -> None:
    """Until SIGCONT it answers nothing."""
    daemon.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, daemon.process.pid, os.WSTOPPED | os.WNOWAIT)


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Called: the time in which nobody asks is over."""
    from kvstrata_transformers import link
    clock = [0.0]
    monkeypatch.setattr(link, "monotonic", lambda: clock[0])
    return lambda: clock.__setitem__(0, clock[0] + link.SILENT_SECONDS + 1)


class Calls:
    """What the model's first layer is about to do, counted; `at` that count something happens."""

    def __init__(self, model: Any, at: int, happens: Callable[[], None]) -> None:
        self.count = 0

        def called(*_: object) -> None:
            self.count += 1
            if self.count == at:
                happens()

        self.hook = model.base_model.register_forward_pre_hook(called)


def test_stopped_before(daemon: Daemon, forgetful: Callable[[], None], monkeypatch: pytest.MonkeyPatch):
    plain, model = pair(daemon)
    compare(plain, model, PROMPT)
    hang(daemon)
    asked: list[int] = []
    ping = kvstrata.Session.ping
    monkeypatch.setattr(kvstrata.Session, "ping", lambda session: (asked.append(1), ping(session))[1])
    for _ in range(3):
        with pytest.warns(UserWarning, match="did not answer.*runs without it"):
            compare(plain, model, PROMPT)
    assert len(asked) == 1  # the others remember
    with pytest.raises(kvstrata.DeadlineExceeded):
        kvstrata_transformers.cache(model)
    daemon.process.send_signal(signal.SIGCONT)
    forgetful()
    assert compare(plain, model, PROMPT)[0] == 62 - 32


def test_stopped_in_the_middle(daemon: Daemon, forgetful: Callable[[], None]):
    plain, model = pair(daemon)
    stop = lambda: hang(daemon)
    calls = Calls(model, 10, stop)
    with pytest.warns(UserWarning, match="DEADLINE.*runs without it"):
        compare(plain, model, PROMPT, NEW)
    calls.hook.remove()
    daemon.process.send_signal(signal.SIGCONT)
    forgetful()
    compare(plain, model, PROMPT, 4)


def test_stopped_in_the_middle_of_a_kept_cache(daemon: Daemon, forgetful: Callable[[], None]):
    _, model = pair(daemon)
    cache = kvstrata_transformers.cache(model)
    Calls(model, 10, lambda: hang(daemon))
    with pytest.raises(kvstrata.DeadlineExceeded):
        answer(model, PROMPT, NEW, past_key_values=cache)
    daemon.process.send_signal(signal.SIGCONT)
    forgetful()
    said = torch.cat([PROMPT, ids_of(cache.columns + 1 - 62, 2)], 1)
    answer(model, said, 2, past_key_values=cache)  # the daemon has what was committed


class Listener:
    """A streamer that notes what it is given."""

    def __init__(self) -> None:
        self.heard: list[list[int]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.heard.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


def test_a_streamer_hears_each_token_once(daemon: Daemon):
    plain, model = pair(daemon)
    stop = lambda: hang(daemon)
    calls = Calls(model, 10, stop)
    with pytest.raises(kvstrata.DeadlineExceeded):  # some tokens are said, and a second run might say others
        answer(model, PROMPT, NEW, streamer=(listener := Listener()))
    assert 1 < len(listener.heard) < NEW
    calls.hook.remove()
    with pytest.warns(UserWarning, match="runs without it"):
        answer(model, PROMPT, 4, streamer=(listener := Listener()))
    want = Listener()
    answer(plain, PROMPT, 4, streamer=want)
    assert listener.heard == want.heard and listener.ended == 1


def test_a_caller_that_counts_tokens_is_not_given_two_runs(daemon: Daemon):
    from transformers import StoppingCriteriaList
    _, model = pair(daemon)
    seen: list[int] = []
    stop = lambda: hang(daemon)
    Calls(model, 10, stop)
    criteria = StoppingCriteriaList([lambda ids, scores: (seen.append(ids.shape[1]), torch.zeros(len(ids), dtype=torch.bool))[1]])
    with pytest.raises(kvstrata.DeadlineExceeded):
        answer(model, PROMPT, NEW, stopping_criteria=criteria)
    assert seen == sorted(set(seen))


def test_sampling_draws_the_same_in_a_second_run(daemon: Daemon):
    plain, model = pair(daemon)
    Calls(model, 10, lambda: hang(daemon))
    outputs = []
    for each in (plain, model):
        torch.manual_seed(4)
        outputs.append(each.generate(PROMPT, do_sample=True, max_new_tokens=NEW))
    assert torch.equal(*outputs)


def test_killed_in_the_middle(daemon: Daemon):
    plain, model = pair(daemon)
    kill = lambda: (daemon.process.kill(), daemon.process.wait())
    Calls(model, 10, kill)
    with pytest.warns(UserWarning, match="DAEMON_GONE.*runs without it"):
        compare(plain, model, PROMPT, NEW)


def row_of_nan(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    output = output.clone()
    output[-1] = float("nan")
    return output


def test_a_row_of_nan_does_not_take_the_others_answers(daemon: Daemon):
    plain, model = pair(daemon)
    batch = ids_of(70, 3, rows=3)
    hooks = [each.model.layers[0].mlp.register_forward_hook(row_of_nan) for each in (plain, model)]
    with pytest.warns(UserWarning, match="TENSOR_NOT_FINITE.*runs without it"):
        compare(plain, model, batch)
    for hook in hooks:
        hook.remove()
    assert compare(plain, model, batch)[0] == 70  # nothing of it is held
    assert compare(plain, model, batch)[0] == 6


def test_nan_in_a_forward_that_decodes(daemon: Daemon):
    plain, model = pair(daemon)
    for each in (plain, model):
        passes = iter(range(1000))
        each.model.layers[0].mlp.register_forward_hook(
            lambda module, args, output, passes=passes: output * (float("nan") if next(passes) == 3 else 1))
    want, got = answer(plain, PROMPT, 8), answer(model, PROMPT, 8)
    assert torch.equal(want.sequences[:, :65], got.sequences[:, :65])


def test_half_precision_that_overflows(daemon: Daemon):
    plain, model = (small().to(torch.float16) for _ in range(2))
    with torch.no_grad():
        for each in (plain, model):
            each.model.layers[1].self_attn.v_proj.weight.mul_(1e5)
    kvstrata_transformers.enable(model, socket=daemon.socket)
    for _ in range(2):
        with pytest.warns(UserWarning, match="TENSOR_NOT_FINITE"):
            compare(plain, model, PROMPT, 3)


def test_a_kept_cache_says_what_is_not_finite(daemon: Daemon):
    _, model = pair(daemon)
    cache = kvstrata_transformers.cache(model)
    hook = model.model.layers[0].mlp.register_forward_hook(row_of_nan)
    with pytest.raises(kvstrata.InvalidArgument, match="TENSOR_NOT_FINITE"):
        answer(model, PROMPT, past_key_values=cache)
    hook.remove()
    assert cache.columns == 0
