# SPDX-License-Identifier: Apache-2.0
"""What vLLM resets, and weights that change while it serves: nothing of before is found, and what is computed is."""

from __future__ import annotations

import pytest

from conftest import assert_same

NEW = 8


@pytest.mark.parametrize(("mode", "unit"), [("full", 32), ("chunks", 256)])
def test_each_begins_an_epoch(engine, text_ids: list[int], mode: str, unit: int):
    """Where vLLM has a cache of its own, it is reset as well: else the change shows in what that has."""
    prompt = text_ids[3000:3400]
    again = {"prompts": [prompt], "tokens": NEW, **({"reset": True} if mode == "chunks" else {})}
    owned = mode == "full"
    events = [["reset"], ["sleep"], ["change"] if owned else ["change", "reset"],
              ["reload"] if owned else ["reload", "reset"]]
    batches = [again, again]
    for event in events:
        batches += [{**again, "do": event}, again]
    ran = engine(mode, batches)
    assert ran["done"] == [True for event in events for name in event if name == "reset"]
    computed, held = ran["batches"][::2], ran["batches"][1::2]
    whole = (len(prompt) - 1) // unit * unit
    # The model that is reloaded is the one of before, which in owned mode is found again: since the last reset.
    assert [rows[0]["held"] for rows in computed] == [0, 0, 0, 0, whole if owned else 0]
    assert [rows[0]["held"] for rows in held] == [whole] * len(held)
    for first, second in zip(computed, held):
        assert_same(first, second)
    for rows in computed[1:3] + computed[4:]:
        assert_same(computed[0], rows)
    assert computed[3][0]["tokens"] != computed[0][0]["tokens"]
