# SPDX-License-Identifier: Apache-2.0
"""Sequence.build, recompress and cancel_work, over both transports."""

from __future__ import annotations

import numpy as np
import pytest

import kvstrata
from toy import Toy

N = 1040
QUEST = "quest{min_tokens = 0, budget = 64}"


@pytest.fixture
def toy(random: np.random.Generator) -> Toy:
    return Toy(random, N + 1)


def test_an_index_is_built_for_its_own_plan_and_for_another(session: kvstrata.Session, toy: Toy):
    model = toy.register(session)
    with session.open(model) as full:
        toy.feed(session, full, 0, N)
        with session.open(model, QUEST, toy.ids) as own:
            assert own.held == N
            built = own.build()
            assert built.built_blocks == 2 and built.indexed_tokens == N and built.extents == 0
            assert own.build() == kvstrata.Built(N, 0, 0)
        assert full.build("chess{min_tokens = 0, page = 16, pages_per_chunk = 4}").built_blocks == 2
        with pytest.raises(kvstrata.KvstrataError, match="queries") as error:
            full.build("sentencekv")
        assert error.value.reason == "BUILD_INPUT"
        with pytest.raises(kvstrata.KvstrataError) as error:
            full.recompress()
        assert error.value.reason == "RECOMPRESS_RAW"


def test_recompress_and_cancel(session: kvstrata.Session, toy: Toy):
    plan = '{selector = "full", codec = "packed", max_loss = 1, min_tokens = 0, keep_raw = "host"}'
    with session.open(toy.register(session), plan) as sequence:
        toy.feed(session, sequence, 0, N)
        sequence.prefill_done()
        sequence.cancel_work()
        sequence.recompress()
        assert sequence.build().extents > 0
