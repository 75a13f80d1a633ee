# SPDX-License-Identifier: Apache-2.0
"""KVSTRATA_VERIFY: what is held is computed anew, and what differs is an error."""

from __future__ import annotations

import http.client
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kvstrata.daemon import Daemon
from kvstrata.torch_identity import Identity

import kvstrata
import kvstrata_transformers
from kvstrata_transformers import identity
from served_models import answer, assert_same, ids_of, padded, pair, small

PROMPT = ids_of(150, 1)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon("--set", "http.listen=127.0.0.1:0") as started:
        yield started


@pytest.fixture(autouse=True)
def verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTRATA_VERIFY", "1")


def verified_hits(daemon: Daemon) -> dict[str, int]:
    """By result, from /metrics."""
    [port] = re.findall(r"event=http .*listen=\S*127\.0\.0\.1:(\d+)", pathlib.Path(daemon.log).read_text())
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=30)
    connection.request("GET", "/metrics")
    page = connection.getresponse().read().decode()
    return {result: int(n) for result, n in
            re.findall(r'^kvstrata_verified_hits_total\{result="(\w+)"\} (\d+)$', page, re.MULTILINE)}


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_what_is_right_passes(daemon: Daemon, kind: str, monkeypatch: pytest.MonkeyPatch):
    plain, model = pair(daemon, kind=kind)
    batch = padded(150, 40, 90, seed=1)
    answer(model, batch)
    with torch.no_grad():
        for seed in range(5):  # a page at random each time
            assert_same(answer(plain, batch), answer(model, batch))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_passes(daemon: Daemon, dtype: torch.dtype):
    model = small(num_hidden_layers=4).to(dtype)
    kvstrata_transformers.enable(model, socket=daemon.socket)
    for _ in range(5):
        answer(model, padded(300, 40, 90, seed=2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_guard_of_identity_that_is_gone_is_found(daemon: Daemon, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(identity.ModelIdentity, "now", lambda self: Identity(f"one for all {dtype}", None))
    model = small().to(dtype)
    kvstrata_transformers.enable(model, socket=daemon.socket)
    answer(model, PROMPT)
    answer(model, PROMPT)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.1)
    with pytest.raises(kvstrata.DataLoss, match="HIT_MISMATCH: page [0-3] of a held prompt"):
        answer(model, PROMPT)
    other = small(rms_norm_eps=0.01).to(dtype)
    kvstrata_transformers.enable(other, socket=daemon.socket)
    with pytest.raises(kvstrata.DataLoss, match="HIT_MISMATCH"):
        answer(other, PROMPT)
    compared = verified_hits(daemon)
    assert compared["mismatch"] >= 2 and compared["equal"] >= 1
    monkeypatch.delenv("KVSTRATA_VERIFY")
    kvstrata_transformers.enable(other, socket=daemon.socket)
    answer(other, PROMPT)  # and nobody notices without it


def test_the_share(daemon: Daemon, monkeypatch: pytest.MonkeyPatch):
    _, model = pair(daemon)
    checked: list[Any] = []
    from kvstrata_transformers.verify import Verifier
    monkeypatch.setattr(Verifier, "_check", lambda self, row: checked.append(row))
    answer(model, PROMPT)
    answer(model, PROMPT)
    assert len(checked) in (1, 2)  # the first may have hit what others left
    for share in ("2", "much", "nan", "-0.1"):
        monkeypatch.setenv("KVSTRATA_VERIFY", share)
        with pytest.raises(ValueError, match="KVSTRATA_VERIFY"):
            kvstrata_transformers.enable(small(), socket=daemon.socket)
    for share, some in (("0", False), ("", False), ("0.5", True)):
        monkeypatch.setenv("KVSTRATA_VERIFY", share)
        _, model = pair(daemon)
        checked.clear()
        for _ in range(40):
            answer(model, PROMPT[:, :40], 1)
        assert (0 < len(checked) < 40) == some and (some or not checked)


def test_a_hook_that_changes_what_arrives_is_no_mismatch(daemon: Daemon):
    """Such a pass is served plainly; what is held is right all the same."""
    plain, model = pair(daemon)
    prompt = ids_of(70, 9)
    answer(model, prompt)
    before = verified_hits(daemon)

    def other_ids(module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return args, {**kwargs, "input_ids": kwargs["input_ids"] * 0 + 7}

    for each in (plain, model):
        each.base_model.register_forward_pre_hook(other_ids, with_kwargs=True)
    with pytest.warns(UserWarning, match="other_ids"):
        assert_same(answer(plain, prompt), answer(model, prompt))
    after = verified_hits(daemon)
    assert after["equal"] > before["equal"] and after["mismatch"] == before["mismatch"]


def test_a_plan_that_chooses_verifies_the_first_page_alone(daemon: Daemon):
    """What a plan attended makes an answer's keys."""
    _, model = pair(daemon, "window{n_recent = 32, min_tokens = 0}")
    prompt = ids_of(200, 5)
    said = answer(model, prompt, 60).sequences
    for _ in range(6):
        answer(model, torch.cat([said, ids_of(9, 6)], 1), 2)
