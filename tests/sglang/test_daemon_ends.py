# SPDX-License-Identifier: Apache-2.0
"""A daemon that is killed in the middle, one that is stopped, one that is not there, and the kill switch."""

from __future__ import annotations

import pathlib
import signal

import numpy as np

from conftest import SEED, assert_same
from restarts import disk_of

LAYERS, NEW = 30, 8


def test_killed_at_random_moments(engine, plain, prompts, amount):
    """Requests that it hits end with an error that names it, or as they would have; the next batch is on the new
    daemon."""
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
            assert row["reason"] == "length" or (row["reason"] == "abort" and "kvstratad" in row["message"]), row
    assert any(row["reason"] == "abort" for rows in result["batches"][::2] for row in rows)


def test_stopped_at_random_moments(engine, plain, prompts, amount):
    """All requests of the batch end while it is stopped, with an error or as they would have, also one that begins then;
    when it goes on, it serves the same engine."""
    print(f"seed {SEED}")
    random = np.random.default_rng(SEED)
    few = [p for p in prompts if len(p) < 400][:3]
    batches = []
    for _ in range(amount(10)):
        batches += [{"prompts": few, "tokens": NEW, "stop_at": int(random.integers(NEW * LAYERS))},
                    {"prompts": few, "tokens": NEW}]
    result = engine("full", batches, max_running_requests=1)
    want = [{**row, "tokens": row["tokens"][:NEW]} for p, row in zip(prompts, plain) if p in few]
    for rows in result["batches"][1::2]:
        assert_same(want, rows)
    hit = [row for rows in result["batches"][::2] for row in rows]
    for expected, row in zip(want * len(batches), hit):
        assert row["tokens"] == expected["tokens"][:len(row["tokens"])]
        assert row["reason"] == "length" or (row["reason"] == "abort" and "send the request again" in row["message"]), row
    assert any(row["reason"] == "abort" and not row["tokens"] for row in hit), "none began while it was stopped"


def test_without_a_daemon(engine, plain, prompts):
    """A request that comes then ends with an error that names it, and has no token that might be wrong."""
    few = {"prompts": [p for p in prompts if len(p) < 400][:3], "tokens": NEW}
    _, without, again = engine("full", [{**few, "kill_at": 0, "left_dead": True}, few, few])["batches"]
    for row in without:
        assert row["reason"] == "abort" and "kvstratad" in row["message"] and row["tokens"] == []
    want = [{**row, "tokens": row["tokens"][:NEW]} for p, row in zip(prompts, plain) if p in few["prompts"]]
    assert_same(want, again)


def test_idle_restart(engine, text_ids: list[int], tmp_path: pathlib.Path):
    """The next request is on the new daemon, with what that has on disk: all where the old one could write it down."""
    batch = {"prompts": [text_ids[:700]], "tokens": NEW}
    result = engine("full", [{**batch, "end_by": signal.SIGTERM}, {**batch, "end_by": signal.SIGKILL}, batch],
                    daemon=disk_of(tmp_path))
    computed, held, killed = result["batches"]
    assert_same(computed, held)
    assert_same(computed, killed)
    assert held[0]["held"] == 699 // 32 * 32


def test_kill_switch(engine, plain, prompts):
    assert_same(plain, engine("", [{"prompts": prompts, "tokens": 24}])["batches"][0])
