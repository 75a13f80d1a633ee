# SPDX-License-Identifier: Apache-2.0
"""Plans choose what direct calls with the same keys and queries choose; plans that SGLang cannot serve are refused."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("plan", ["quest{budget = 64, min_tokens = 0}", "bits{budget = 64, min_tokens = 0}",
                                  "tokenselect{k = 64, n_init = 16, n_local = 32, min_tokens = 0}"])
def test_the_same_tokens_are_chosen(engine, text_ids, plan: str):
    result = engine(plan, [{"prompts": [text_ids[3000:3700]], "tokens": 12}], record=True, chunked_prefill_size=256)
    assert result["chosen"] > 12 * 30
    assert result["differing"] == 0


def test_a_plan_that_needs_surprisal_is_refused(engine, text_ids):
    with pytest.raises(AssertionError, match="needs .*SURPRISAL"):
        engine("sekv", [{"prompts": [text_ids[:50]], "tokens": 2}])
