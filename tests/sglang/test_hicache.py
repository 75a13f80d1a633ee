# SPDX-License-Identifier: Apache-2.0
"""HiCache in the real engine, with the daemon as its storage; host_pools.py moves pages in place of CUDA's kernels."""

from __future__ import annotations

from kvstrata.daemon import Daemon

from conftest import assert_same

PAGE, THRESHOLD = 64, 64  # tokens of SGLang's page; less than the threshold is not fetched


def whole(prompt: list[int]) -> int:
    pages = (len(prompt) - 1) // PAGE * PAGE
    return pages if pages >= THRESHOLD else 0


def test_prompts_come_back(engine, plain, prompts):
    """After a flush of SGLang's pools, and in another SGLang."""
    batch = {"prompts": prompts, "tokens": 24}
    with Daemon() as daemon:
        first = engine("hicache", [batch, {**batch, "flush": True}], socket=daemon.socket)["batches"]
        second = engine("hicache", [batch], socket=daemon.socket)["batches"]
    for rows in (*first, *second):
        assert_same(plain, rows)
    assert [row["held"] for row in first[0]] == [0] * len(prompts)
    for rows in (first[1], second[0]):
        assert [row["held"] for row in rows] == [whole(prompt) for prompt in prompts]
