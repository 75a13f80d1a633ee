# SPDX-License-Identifier: Apache-2.0
"""A daemon that is killed in the middle, and the kill switch."""

from __future__ import annotations

import pathlib
import signal

import numpy as np

from conftest import SEED, assert_same
from restarts import disk_of

LAYERS, NEW = 30, 8


def test_killed_at_random_moments(engine, plain, prompts, amount):
    """Requests that it hits end with an error, or as they would have; the next batch is on the new daemon."""
    print(f"seed {SEED}")
    random = np.random.default_rng(SEED)
    few = [p for p in prompts if len(p) < 400][:3]
    batches = []
    for _ in range(amount(20)):
        batches += [{"prompts": few, "tokens": NEW, "kill_at": int(random.integers(NEW * LAYERS))},
                    {"prompts": few, "tokens": NEW}]
    result = engine("full", batches)
    want = [{**row, "tokens": row["tokens"][:NEW]} for p, row in zip(prompts, plain) if p in few]
    for number, rows in enumerate(result["batches"]):
        if number % 2:
            assert_same(want, rows)
            continue
        for expected, row in zip(want, rows):
            n = len(row["tokens"])
            assert row["tokens"] == expected["tokens"][:n]
            assert row["reason"] in ("length", "error"), row["reason"]
    assert any(row["reason"] == "error" for rows in result["batches"][::2] for row in rows)
    assert "kvstratad ended or was restarted; send the request again" in result["log"]


def test_idle_restart(engine, text_ids: list[int], tmp_path: pathlib.Path):
    """The next request is on the new daemon, with what that has on disk: all where the old one could write it down."""
    batch = {"prompts": [text_ids[:700]], "tokens": NEW}
    result = engine("full", [{**batch, "end_by": signal.SIGTERM}, {**batch, "end_by": signal.SIGKILL}, batch],
                    {"daemon": disk_of(tmp_path)})
    computed, held, killed = result["batches"]
    assert_same(computed, held)
    assert_same(computed, killed)
    assert held[0]["held"] == 699 // 32 * 32


def test_kill_switch(engine, plain, prompts):
    assert_same(plain, engine("", [{"prompts": prompts, "tokens": 24}])["batches"][0])
