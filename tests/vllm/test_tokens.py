# SPDX-License-Identifier: Apache-2.0
"""Tokens under plan `full` are plain vLLM's."""

from __future__ import annotations

import pytest

from conftest import assert_same


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_equal_and_held_when_repeated(engine, plain, prompts, eager: bool):
    """Prompts are chunked beside others' decode: a batch has more tokens than a step."""
    batch = {"prompts": prompts, "tokens": 24}
    result = engine("full", [batch, batch], enforce_eager=eager)
    first, second = result["batches"]
    assert_same(plain, first)
    assert_same(plain, second)
    for prompt, row in zip(prompts, second):
        assert row["held"] == (len(prompt) - 1) // 32 * 32


def test_preempted_requests_go_on(engine, plain, prompts):
    """vLLM is given blocks for its longest prompt and little more, so that it preempts."""
    blocks = -(-(max(map(len, prompts)) + 24) // 128) + 2
    batch = {"prompts": prompts + prompts, "tokens": 24}
    result = engine("full", [batch], num_gpu_blocks_override=blocks, max_model_len=3072, block_size=128)
    assert_same(plain + plain, result["batches"][0])


def test_a_salted_request_is_private(engine, plain, prompts):
    """It finds nothing, also of its own salt, and nobody finds what it computed."""
    some = [i for i, prompt in enumerate(prompts) if 64 < len(prompt) < 600][:2]
    batch = {"prompts": [prompts[i] for i in some], "tokens": 24}
    salted = {**batch, "with": {"cache_salt": "a"}}
    result = engine("full", [salted, salted, batch, salted, batch])["batches"]
    for rows in result:
        assert_same([plain[i] for i in some], rows)
    assert [[row["held"] > 0 for row in rows] for rows in result] == [[False] * 2] * 4 + [[True] * 2]
