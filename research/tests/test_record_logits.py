# SPDX-License-Identifier: Apache-2.0
"""research/record_logits.py: what is written is read again, and shares are those of the rule's choice."""
import json
import pathlib

import numpy as np
import record_logits
import torch
from emulated import Layer, Rule, Steps
from record_logits import HEADS, ITEMS, STRIP, STRIPS

KV_HEADS, D, PROMPT, STEPS = 2, 32, 4400, 3
SEED = 20261129


def recorded() -> tuple[record_logits.Recording, Layer, list[torch.Tensor]]:
    """Steps of random rows, and what they were given."""
    random = torch.Generator().manual_seed(SEED)
    rows = lambda *shape: torch.randn(KV_HEADS, *shape, D, generator=random)
    rule = record_logits.Recording("seed")
    layer = Layer(rows(PROMPT), rows(PROMPT), [rule], Steps(PROMPT, STEPS, torch.device("cpu")), D ** -0.5)
    given = [rows(STEPS, HEADS), rows(STEPS), rows(STEPS)]
    layer.attend(rule, *given)
    return rule, layer, given


def numbers_of(levels: str) -> np.ndarray:
    """[STRIPS, STRIP, HEADS]."""
    return (np.frombuffer(levels.encode("ascii"), np.uint8).reshape(STRIPS, STRIP, HEADS) - 48.0) / 4 - 6


def test_a_made_up_item_survives_writing_and_reading(tmp_path: pathlib.Path):
    relative = np.random.default_rng(SEED).normal(0, 4, (STRIPS, STRIP, HEADS))
    item = {"task": "a/b\\c", "fine": 0.1, "half_variance": [0.5, 0.25, 1.5, 2.0], "levels": record_logits.text_of(relative)}
    record_logits.write(tmp_path / "file", {"seed": SEED}, {"fine": 0.1, "strips": 0.4, "items": 1}, [item])
    read = json.loads((tmp_path / "file").read_text())
    assert read["items"] == [item] and read["rule"] == {"fine_above": 8, "skip_below": 2}
    np.testing.assert_allclose(numbers_of(read["items"][0]["levels"]), relative.clip(-6, 9.75), atol=0.125)
    assert "\\" in item["levels"] and len(item["levels"]) == STRIPS * STRIP * HEADS


def test_shares_are_those_of_the_rule():
    rule, layer, given = recorded()
    fine = layer.attend(Rule("strata{}"), *given)[1].fine
    for of_head, shares, item in zip(fine, rule.shares[0][0], rule.layers[0], strict=True):
        among = [of_step[4:n - 64] for n, of_step in enumerate(of_head, PROMPT + 1)]
        np.testing.assert_allclose(shares, [x.float().mean() for x in among], rtol=1e-6)
        assert item["tokens"] == PROMPT + 1 + item["step"]
        assert abs(item["fine"] - float(shares[item["step"]])) < 1e-5


def test_levels_are_logits_less_the_normaliser():
    """Strips in place of the context leave L_h where it is, and about as many weights are large as are fine."""
    rule, _, _ = recorded()
    for item in rule.layers[0]:
        weights = np.exp(numbers_of(item["levels"])) / item["tokens"]
        sums = weights.sum((0, 1)) * item["tokens"] / (STRIPS * STRIP)
        np.testing.assert_allclose(sums + item["recent"], 1, rtol=0.25)
        scored = weights * np.exp(item["half_variance"])
        np.testing.assert_allclose((scored.max(-1) >= 8 / item["tokens"]).mean(), item["fine"], rtol=0.3)


def item_of(task: str, layer: int, fine: float, number: float) -> record_logits.Item:
    levels = record_logits.text_of(np.full((STRIPS, STRIP, HEADS), number))
    return {"model": "m", "task": task, "layer": layer, "fine": fine, "strips": 4 * fine, "recent": [0] * HEADS, "levels": levels}


def test_eight_items_are_near_all_that_was_counted_and_keep_the_normaliser():
    draw = np.random.default_rng(SEED)
    lines = [{"fine": fine.tolist(), "strips": (4 * fine).tolist(),
              "items": [item_of(key, layer, x, 4.0 * (layer % 2)) for layer, x in enumerate(fine)]}
             for key in "abcdefgh" for fine in [draw.uniform(0.02, 0.2, 6)]]
    every, items = record_logits.chosen_of(lines, SEED)
    assert len(items) == ITEMS and every["items"] == 48
    assert abs(record_logits.mean_of(items, "fine") / every["fine"] - 1) < 0.15
    assert sum(item["layer"] % 2 for item in items) <= 1
