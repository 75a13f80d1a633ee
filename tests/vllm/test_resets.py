# SPDX-License-Identifier: Apache-2.0
"""What vLLM resets, and weights that change while it serves: nothing of before is found, and what is computed is."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

import families
from conftest import assert_same

NEW = 8


@pytest.mark.parametrize(("mode", "unit"), [("full", 32), ("chunks", 256)])
def test_each_begins_an_epoch(engine, text_ids: list[int], tmp_path: pathlib.Path, mode: str, unit: int):
    """Where vLLM has a cache of its own, it is reset as well: else the change shows in what that has."""
    owned = mode == "full"
    prompt, model = (text_ids[3000:3400], {}) if owned else (families.prompt(400), families.made("llama", tmp_path))
    again = {"prompts": [prompt], "tokens": NEW, **({} if owned else {"reset": True})}
    events = [["reset"], ["sleep"], ["change"] if owned else ["change", "reset"],
              ["reload"] if owned else ["reload", "reset"]]
    batches = [again, again]
    for event in events:
        batches += [{**again, "do": event}, again]
    ran = engine(mode, batches, **model)
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


def test_amid_stores(engine, tmp_path: pathlib.Path):
    """The model changes and is reset while stores of before are under way: nobody finds them, neither then nor later."""
    batch: dict[str, Any] = {"prompts": [families.prompt(300 + 60 * n, n) for n in range(4)], "tokens": NEW}
    changed = {**batch, "do": ["change", "reset"]}
    batches = [{**batch, "leave": True}, {**changed, "leave": True}, {**changed, "leave": True}, changed,
               {**batch, "reset": True}]
    model = families.made("llama", tmp_path)
    ran, plain = engine("chunks", batches, **model), engine(None, batches, **model)
    for want, rows in zip(plain["batches"], ran["batches"]):
        assert_same(want, rows)
    held = [[row["held"] for row in rows] for rows in ran["batches"]]
    assert held == [[0] * 4] * 4 + [[(len(ids) - 1) // 256 * 256 for ids in batch["prompts"]]]
    assert len({tuple(rows[0]["tokens"]) for rows in plain["batches"]}) == 4


def test_a_change_without_a_reset(engine, tmp_path: pathlib.Path):
    """Nothing of before is found. Nothing is stored either, since vLLM's own cache may have blocks of before."""
    batch = {"prompts": [families.prompt(400)], "tokens": NEW, "reset": True}
    ran = engine("chunks", [batch, batch, {**batch, "do": ["change"]}, batch, {**batch, "do": ["reset"]}, batch],
                 **families.made("llama", tmp_path))
    assert [rows[0]["held"] for rows in ran["batches"]] == [0, 256, 0, 0, 0, 256]
    assert "nothing is stored until reset_prefix_cache(reset_connector=True)" in ran["log"]
    first, found, *changed = (rows[0]["tokens"] for rows in ran["batches"])
    assert first == found != changed[0] and changed == [changed[0]] * 4
