# SPDX-License-Identifier: Apache-2.0
"""Masks and positions: tokens are counted, not columns, and what is at other positions is nobody else's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kvstrata.daemon import Daemon

import kvstrata_transformers
from served_models import answer, assert_same, columns_of, compare, ids_of, padded, pair, prompt_of

HELD = 70 - 64  # columns that are computed of a prompt of 70 tokens of which two pages are held


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon() as started:
        yield started


def test_a_hole_in_the_mask(daemon: Daemon):
    plain, model = pair(daemon)
    holed = prompt_of(ids_of(70, 1))
    holed["attention_mask"][0, 20:30] = 0
    with pytest.warns(UserWarning, match="attention_mask has holes"):
        assert compare(plain, model, holed, 40)[0] == 70
    assert compare(plain, model, holed, 40)[0] == 70  # nothing of it is held
    compact = ids_of(70, 1)[:, holed["attention_mask"][0].bool()]
    assert compare(plain, model, compact, 8)[0] == 60
    # What the compact prompt left is not taken for the one with a hole.
    assert compare(plain, model, holed, 40)[0] == 70


@pytest.mark.parametrize("positions", [torch.arange(70) + 100, torch.arange(70) % 35, torch.arange(70) * 2],
                         ids=["shifted", "packed", "spread"])
@pytest.mark.parametrize("chunk", [None, 40])
def test_positions_of_the_callers(daemon: Daemon, positions: torch.Tensor, chunk: int | None):
    plain, model = pair(daemon)
    prompt = ids_of(70, 2 + int(positions[-1]) + (chunk or 0))
    odd = {**prompt_of(prompt), "position_ids": positions[None]}
    with pytest.warns(UserWarning, match="position_ids are not 0, 1, 2"):
        assert compare(plain, model, odd, prefill_chunk_size=chunk)[0] == (chunk or 70)
    assert compare(plain, model, prompt, prefill_chunk_size=chunk)[0] == (chunk or 70)  # what they left is not hit
    assert compare(plain, model, prompt)[0] == HELD
    compare(plain, model, odd)  # nor does it hit


def test_positions_that_are_the_usual_ones(daemon: Daemon):
    plain, model = pair(daemon)
    usual = {**prompt_of(ids_of(70, 3)), "position_ids": torch.arange(70)[None]}
    compare(plain, model, usual)
    assert compare(plain, model, usual)[0] == HELD


def test_right_padding(daemon: Daemon):
    plain, model = pair(daemon)
    with pytest.warns(UserWarning, match="padding_side"):
        compare(plain, model, padded(40, 9, 33, seed=4, right=True), 12)
    del (inferred := padded(40, 9, 33, seed=4, right=True))["attention_mask"]
    compare(plain, model, inferred, 12)
    with pytest.raises(kvstrata_transformers.NotServed, match="padding_side"):
        answer(model, padded(40, 9, seed=4, right=True), past_key_values=kvstrata_transformers.cache(model))


def test_a_row_that_is_all_padding(daemon: Daemon):
    plain, model = pair(daemon)
    batch = padded(40, 9, 33, seed=5)
    batch["attention_mask"][1] = 0
    compare(plain, model, batch, 12)


def loop(model: Any, cache: Any, batch: dict[str, torch.Tensor], positions: bool, tokens: int = 5) -> torch.Tensor:
    """Logits [row][step][vocabulary] of a decoding loop without generate()."""
    ids, mask, logits = batch["input_ids"], batch["attention_mask"], []
    fed = ids
    for _ in range(tokens):
        at = {"position_ids": (mask.cumsum(1) - 1).clamp(0)[:, -fed.shape[1]:]} if positions else {}
        with torch.no_grad():
            out = model(input_ids=fed, attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1, **at)
        logits.append(out.logits[:, -1])
        fed = logits[-1].argmax(-1)[:, None]
        mask = torch.cat([mask, torch.ones_like(fed)], 1)
    return torch.stack(logits, 1)


@pytest.mark.parametrize("positions", [False, True])
def test_a_left_padded_loop(daemon: Daemon, positions: bool):
    """Without positions the model counts columns: a padded row's keys are turned by its padding."""
    from transformers import DynamicCache
    plain, model = pair(daemon)
    batch = padded(80, 50, 67, seed=60 + positions)
    for _ in range(2):
        want = loop(plain, DynamicCache(config=plain.config), batch, positions)
        cache = kvstrata_transformers.cache(model)
        torch.testing.assert_close(loop(model, cache, batch, positions), want, rtol=1e-3, atol=1e-3)
        assert [row.private for row in cache.rows] == [False, not positions, not positions]
    assert [row.sequence.held for row in cache.rows] == ([64, 32, 64] if positions else [64, 0, 0])
    alone = ids_of(50, 61 + positions)
    assert compare(plain, model, alone)[0] == (50 - 32 if positions else 50)


def test_masks_that_contradict_what_the_cache_has(daemon: Daemon):
    _, model = pair(daemon)
    batch = padded(40, 20, seed=7)
    more = torch.full((2, 1), 5)
    mask = torch.cat([batch["attention_mask"], torch.ones_like(more)], 1)
    hidden = mask.clone()
    hidden[0, 30] = 0
    for wrong, named in ((None, "attention_mask is None"), (mask[:, :-3], "attention_mask has 38 columns"),
                         (hidden, "attention_mask says otherwise")):
        cache = kvstrata_transformers.cache(model)
        with torch.no_grad():
            model(**batch, past_key_values=cache)
            with pytest.raises(ValueError, match=named):
                model(input_ids=more, attention_mask=wrong, past_key_values=cache)


def test_positions_that_turn_odd_behind_a_shared_beginning(daemon: Daemon):
    _, model = pair(daemon)
    cache = kvstrata_transformers.cache(model)
    with torch.no_grad():
        model(input_ids=ids_of(40, 8), past_key_values=cache)
        with pytest.raises(kvstrata_transformers.NotServed, match="begin another"):
            model(input_ids=ids_of(5, 9), position_ids=torch.arange(5)[None] + 90, past_key_values=cache)
    assert cache.columns == 40


def test_masks_of_four_dimensions_are_refused_by_name(daemon: Daemon):
    _, model = pair(daemon)
    mask = torch.ones(1, 1, 70, 70).tril().bool()
    with torch.no_grad(), pytest.raises(kvstrata_transformers.NotServed, match=r"attention_mask has shape \(1, 1, 70, 70\)"):
        model(input_ids=ids_of(70), attention_mask=mask, past_key_values=kvstrata_transformers.cache(model))


def test_a_batch_of_several_turns(daemon: Daemon):
    from transformers import DynamicCache
    plain, model = pair(daemon)
    cache, other = kvstrata_transformers.cache(model), DynamicCache(config=plain.config)
    batch = padded(40, 9, 33, seed=10)
    for turn in range(3):
        want, got = answer(plain, batch, 5, past_key_values=other), answer(model, batch, 5, past_key_values=cache)
        assert_same(want, got)
        new = ids_of(12, 90 + turn, rows=3)
        ids = torch.cat([want.sequences, new], 1)
        behind = ids.shape[1] - batch["attention_mask"].shape[1]
        batch = {"input_ids": ids, "attention_mask": torch.nn.functional.pad(batch["attention_mask"], (0, behind), value=1)}


ROPES: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    "longrope": {"rope_type": "longrope", "factor": 8.0, "rope_theta": 1e4, "original_max_position_embeddings": 128,
                 "short_factor": [1.0] * 32, "long_factor": [1.0 + i for i in range(32)]},
    "yarn": {"rope_type": "yarn", "factor": 8.0, "rope_theta": 1e4, "original_max_position_embeddings": 128},
}


@pytest.mark.parametrize("name", ROPES)
def test_rope_that_depends_on_the_length(daemon: Daemon, name: str):
    changes = {"max_position_embeddings": 128 if name == "dynamic" else 1024, "rope_parameters": ROPES[name]}
    _, model = pair(daemon, **changes)
    prompt = ids_of(250, 11)
    for n in (100, 220, 100, 122):  # short, long, short again, one that crosses while it decodes
        plain, _ = pair(daemon, **changes)  # some keep the longest that they have seen
        columns = compare(plain, model, prompt[:, :n], 12)
        if name != "yarn":
            assert columns[0] == n
    if name == "yarn":
        assert columns[0] == 122 - 96


def test_hooks_that_look_keep_hits_and_those_that_change_are_named(daemon: Daemon):
    plain, model = pair(daemon)
    prompt = ids_of(70, 12)
    with columns_of(model):  # before the model's own, and again behind
        compare(plain, model, prompt)
        assert compare(plain, model, prompt)[0] == HELD

    def other_ids(module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return args, {**kwargs, "input_ids": kwargs["input_ids"] * 0 + 7}

    def counting(module: Any, args: Any, kwargs: Any) -> None: ...

    for each in (plain, model):
        each.base_model.register_forward_pre_hook(other_ids, with_kwargs=True)
        each.base_model.register_forward_pre_hook(counting, with_kwargs=True)
    cache = kvstrata_transformers.cache(model)
    with torch.no_grad(), pytest.raises(kvstrata_transformers.NotServed, match="changed input_ids.*other_ids"):
        model(input_ids=prompt, past_key_values=cache)
    assert cache.columns == 0
    with pytest.warns(UserWarning, match="other_ids"):
        assert_same(answer(plain, prompt), answer(model, prompt))
