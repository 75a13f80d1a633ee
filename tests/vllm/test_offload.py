# SPDX-License-Identifier: Apache-2.0
"""Offload: vLLM's own cache with kvstratad behind it."""

from __future__ import annotations

import pathlib
import re

import numpy as np
import pytest
from kvstrata.daemon import Daemon

from conftest import SEED, assert_same

BLOCK = 128  # vLLM's on a CPU


def whole(prompt: list[int]) -> int:
    return (len(prompt) - 1) // BLOCK * BLOCK


def test_repeats_after_a_reset_are_held(engine, prompts, plain):
    batch = {"prompts": prompts, "tokens": 24}
    ran = engine("offload", [batch, {**batch, "reset": True}])
    for got in ran["batches"]:
        assert_same(plain, got)
    assert [o["held"] for o in ran["batches"][0]] == [0] * len(prompts)
    assert [o["held"] for o in ran["batches"][1]] == [whole(p) for p in prompts]


def test_repeats_after_a_restart_are_held_on_disk(engine, prompts, plain, tmp_path: pathlib.Path):
    disk = ("--set", f"disk.path={tmp_path}/tier", "--set", "disk.budget_bytes=4GiB", "--set", "disk.load_timeout=10s")
    batch = {"prompts": prompts, "tokens": 24}
    for held in (lambda _: 0, whole):
        with Daemon(*disk) as daemon:
            got = engine("offload", [batch], {"socket": daemon.socket})["batches"][0]
        assert_same(plain, got)
        assert [o["held"] for o in got] == [held(p) for p in prompts]


def test_preempted_requests_go_on(engine, prompts, plain):
    """On blocks for little more than the longest: vLLM takes them back while they are saved."""
    blocks = max(len(p) for p in prompts) // BLOCK + 4
    batch = {"prompts": prompts, "tokens": 24}
    ran = engine("offload", [batch, {**batch, "reset": True}], num_gpu_blocks_override=blocks, max_model_len=3072)
    for got in ran["batches"]:
        assert_same(plain, got)


def short(text_ids: list[int]) -> list[list[int]]:
    return [text_ids[begin:begin + n] for begin, n in ((2000, 150), (4000, 300), (6000, 450))]


def test_a_daemon_that_dies_costs_no_request(engine, text_ids, amount):
    """Killed before the n-th transfer of a batch whose prompts are held: each of those is loaded, and saved anew."""
    batch = {"prompts": short(text_ids), "tokens": 12}
    random = np.random.default_rng(SEED)
    moments = [int(random.integers(0, 2 * len(batch["prompts"]))) for _ in range(amount(20))]
    print(f"seed {SEED}, killed at transfers {moments}")
    batches = [batch]
    for at in moments:
        batches += [{**batch, "reset": True, "kill_at": at}, {**batch, "reset": True}]
    ran = engine("offload", batches)
    for got in ran["batches"]:
        assert_same(ran["batches"][0], got)
    assert re.search(r"is computed, or not saved: DAEMON_(GONE|UNREACHABLE)", ran["log"])


def test_a_load_that_fails_is_computed(engine, text_ids):
    batch = {"prompts": short(text_ids), "tokens": 12}
    ran = engine("offload", [batch, {**batch, "reset": True}], {"fail_loads": True})
    assert_same(*ran["batches"])
    assert [o["held"] for o in ran["batches"][1]] == [0] * len(batch["prompts"])


@pytest.mark.parametrize(("flags", "extra", "said"), [
    ({"attention_backend": "CUSTOM"}, {}, "--attention-backend is CUSTOM"),
    ({}, {"plan": "quest"}, "kv_connector_extra_config has ['plan']"),
])
def test_refusals(engine, flags, extra, said):
    with pytest.raises(AssertionError) as error:
        engine("offload", [], {"extra": extra}, **flags)
    assert said in str(error.value)


def test_without_a_daemon_vllm_is_plain(engine, prompts, plain, tmp_path: pathlib.Path):
    ran = engine("offload", [{"prompts": prompts, "tokens": 24}], {"socket": f"{tmp_path}/nobody.sock"})
    assert_same(plain, ran["batches"][0])
    assert "nothing is held" in ran["log"]
