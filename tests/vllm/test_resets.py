# SPDX-License-Identifier: Apache-2.0
"""What vLLM resets, and weights that change while it serves: nothing of before is found, and what is computed is."""

from __future__ import annotations

import pathlib
from typing import Any

import families
from conftest import assert_same

NEW = 8


def test_each_begins_an_epoch(engine, tmp_path: pathlib.Path):
    """vLLM's own cache is reset as well: else the change shows in what that has."""
    prompt = families.prompt(400)
    again = {"prompts": [prompt], "tokens": NEW, "reset": True}
    events = [["reset"], ["sleep"], ["change", "reset"], ["reload", "reset"]]
    batches = [again, again]
    for event in events:
        batches += [{**again, "do": event}, again]
    ran = engine("chunks", batches, **families.made("llama", tmp_path))
    assert ran["done"] == [True for event in events for name in event if name == "reset"]
    computed, held = ran["batches"][::2], ran["batches"][1::2]
    assert [rows[0]["held"] for rows in computed] == [0] * len(computed)
    assert [rows[0]["held"] for rows in held] == [256] * len(held)
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
