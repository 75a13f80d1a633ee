# SPDX-License-Identifier: Apache-2.0
"""Tokens under plan `full` are plain SGLang's."""

from __future__ import annotations

from conftest import assert_same


def test_equal_and_held_when_repeated(engine, plain, prompts):
    """Prompts are computed in chunks; a flush of SGLang's cache is the end of what is held."""
    batch = {"prompts": prompts, "tokens": 24}
    ran = engine("full", [batch, batch, {**batch, "flush": True}])
    first, second, flushed = ran["batches"]
    for rows in (first, second, flushed):
        assert_same(plain, rows)
    assert [row["held"] for row in first] == [0] * len(prompts)
    assert [row["held"] for row in second] == [(len(prompt) - 1) // 32 * 32 for prompt in prompts]
    assert [row["held"] for row in flushed] == [0] * len(prompts)
    assert ran["sequences"] == [0, 0, 0]


def test_aborted_requests_are_closed(engine, plain, prompts):
    """By their clients, while they decode and while others' prompts are computed."""
    aborted = {"prompts": prompts, "tokens": 500, "abort_at": 5}
    ran = engine("full", [aborted, {"prompts": prompts, "tokens": 24}])
    for want, row in zip(plain, ran["batches"][0]):
        assert row["reason"] == "abort" and row["tokens"][:5] == want["tokens"][:5]
    assert_same(plain, ran["batches"][1])
    assert ran["sequences"] == [0, 0]


def test_mixed_chunks(engine, plain, prompts):
    """Prefill beside decode in one batch."""
    rows, = engine("full", [{"prompts": prompts, "tokens": 24}], enable_mixed_chunk=True)["batches"]
    assert_same(plain, rows)


def test_retracted_requests_go_on(engine, plain, prompts):
    """SGLang takes running requests back every few steps, by its own switch for tests."""
    ran = engine("full", [{"prompts": prompts, "tokens": 24}],
                 environment={"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"})
    assert any(row["retractions"] for row in ran["batches"][0])
    assert_same(plain, ran["batches"][0])
    assert ran["sequences"] == [0]
