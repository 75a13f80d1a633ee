# SPDX-License-Identifier: Apache-2.0
"""What kvs_attend_cost counts, against the lists that were selected: a row once for each KV head."""

from __future__ import annotations

import numpy as np
import pytest
from toy import DIM, HEADS, KV_HEADS, LAYERS, Toy

import kvstrata

N, STEPS = 300, 3
ROW = 2 * DIM * 2  # key and value, bf16
PLANS = [
    "full",
    "window{n_sink = 4, n_recent = 60, min_tokens = 0}",
    "quest{budget = 64, min_tokens = 0}",
    'quest{budget = 64, rest = "mean", min_tokens = 0}',
    'chess{trigger = "every", every = 1, page = 16, window = 2, min_tokens = 0}',
    'chess{trigger = "every", every = 1, page = 16, window = 2, rest = "mean", tree = true, min_tokens = 0}',
    "tokenselect{k = 48, n_init = 4, n_local = 16, chunk = 64, min_tokens = 0}",
    "sentencekv{tau = 64, start = 4, recent = 16, n_obs = 16, min_tokens = 0}",
    "sentencekv{tau = 64, start = 4, recent = 16, n_obs = 16, per_query_head = true, min_tokens = 0}",
    "sekv{alpha = 1, local = 16, rows_share = 0.8, min_tokens = 0}",
    "sekv{alpha = 1, local = 16, rows = 0, min_tokens = 0}",
    '{selector = "bucket", codec = "lowrank", alpha = 1, local = 16, tau = 64, min_tokens = 0}',
    '{selector = "bucket", codec = "lowrank", alpha = 1, local = 16, tau = 64, per_query_head = true, min_tokens = 0}',
    "mosaickv{share = 0.2, min_tokens = 0}",
    '{selector = "vote", codec = "packed", k = 48, n_init = 4, n_local = 16, min_tokens = 0}',
    '{selector = "block", codec = "raw", page = 16, share = 0.2, min_tokens = 0}',
]


def read_rows(step: kvstrata.Step, new: int, tokens: int) -> int:
    """(position, KV head) pairs of the lists, which are of all heads, of a KV head or of a query head."""
    lists = step.selected_tokens()
    rows = 0
    for head in range(KV_HEADS):
        own = max(1, len(lists) // KV_HEADS)
        mine = lists[:1] if len(lists) == 1 else lists[head * own:(head + 1) * own]
        positions = set(range(tokens - new, tokens)).union(*(set(x.tolist()) for x in mine))
        rows += len(positions)
    return rows


@pytest.mark.parametrize("plan", PLANS)
def test_rows_are_counted_once_for_each_kv_head(session: kvstrata.Session, random: np.random.Generator,
                                                plan: str):
    toy = Toy(random, N + STEPS)
    shared = False
    with session.open(toy.register(session), plan) as sequence:
        for first, end in ((0, 130), (130, N), *((t, t + 1) for t in range(N, N + STEPS))):
            if first == N:
                sequence.report(0, surprisal=random.exponential(1, N), boundary=np.arange(N) % 9 == 0)
                sequence.prefill_done()
                sequence.settle()
            with session.step([(sequence, toy.ids[first:end])]) as step:
                for layer in range(LAYERS):
                    step.append(layer, toy.k[layer, first:end], toy.v[layer, first:end])
                    step.attend(layer, toy.q[layer, first:end])
                    cost = step.cost()
                    assert cost.rows <= end * KV_HEADS, cost
                    assert cost.coarse_rows <= end * KV_HEADS, cost
                    if first < N and "tokenselect" not in plan and "vote" not in plan:
                        assert cost.rows == end * KV_HEADS
                    if first >= N:
                        assert cost.rows == read_rows(step, end - first, end)
                        lists = step.selected_tokens()
                        shared |= len(lists) == HEADS and cost.rows < sum(len(x) for x in lists)
                    if "packed" not in plan and "mosaickv" not in plan and "rest" not in plan:
                        assert cost.attend_bytes <= ROW * (cost.rows + cost.coarse_rows), cost
                    if first < N:
                        assert cost.attend_bytes == ROW * cost.rows
    per_query_head = "per_query_head" in plan or plan.startswith("sekv")
    assert shared == per_query_head, "heads of a group share rows, or the case shows nothing"
