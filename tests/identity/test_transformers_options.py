# SPDX-License-Identifier: Apache-2.0
"""What generate() resolves counts, wherever it was said."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kvstrata.daemon import Daemon
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig, StaticCache

import kvstrata_transformers
from served_models import answer, assert_same, columns_of, compare, ids_of, padded, pair, small

PLACES = ("keyword", "argument", "model")


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon() as started:
        yield started


def said(place: str, models: tuple[Any, Any], **options: Any) -> dict[str, Any]:
    """Keywords of generate() that say the options in this place."""
    if place == "keyword":
        return options
    if place == "argument":
        return {"generation_config": GenerationConfig(**options)}
    for model in models:
        model.generation_config.update(**options)
    return {}


@pytest.mark.parametrize("place", PLACES)
def test_use_cache(daemon: Daemon, place: str):
    plain, model = pair(daemon)
    keywords = said(place, (plain, model), use_cache=False)
    for prompt in (ids_of(40, 1), padded(40, 9, seed=2)):
        assert compare(plain, model, prompt, 4, **keywords) == [40, 41, 42, 43]


def test_use_cache_in_a_checkpoint(daemon: Daemon, tmp_path: Any):
    original = small()
    original.config.use_cache = False
    original.save_pretrained(tmp_path)
    for remove in (False, True):
        if remove:
            (tmp_path / "generation_config.json").unlink()
        plain, model = (AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval() for _ in range(2))
        kvstrata_transformers.enable(model, socket=daemon.socket)
        with columns_of(plain) as wanted:
            answer(plain, ids_of(40, 3 + remove), 4)
        assert compare(plain, model, ids_of(40, 3 + remove), 4) == wanted


def test_no_cache_and_a_cache_contradict(daemon: Daemon):
    _, model = pair(daemon)
    with pytest.raises(kvstrata_transformers.NotServed, match="use_cache is False"):
        answer(model, ids_of(20), use_cache=False, past_key_values=kvstrata_transformers.cache(model))


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("place", PLACES)
def test_cache_implementation(daemon: Daemon, place: str, kind: str):
    plain, model = pair(daemon)
    keywords = said(place, (plain, model), cache_implementation=kind)
    with pytest.warns(UserWarning, match=f"runs without it: cache_implementation is '{kind}'"):
        compare(plain, model, ids_of(40, 4), 4, **keywords)


def test_a_checkpoint_with_a_cache_implementation_is_enabled(daemon: Daemon):
    plain, model = small(), small()
    for each in (plain, model):
        each.generation_config.cache_implementation = "static"
    kvstrata_transformers.enable(model, socket=daemon.socket)
    compare(plain, model, ids_of(40, 4), 4)
    model.generation_config.cache_implementation = plain.generation_config.cache_implementation = "hybrid"  # a default
    compare(plain, model, ids_of(70, 5), 4)
    assert compare(plain, model, ids_of(70, 5), 4)[0] == 6


@pytest.mark.parametrize("kind", [DynamicCache, lambda config: StaticCache(config=config, max_cache_len=60)],
                         ids=["dynamic", "static"])
def test_a_cache_of_transformers_own(daemon: Daemon, kind: Any):
    plain, model = pair(daemon)
    want, got = (answer(each, ids_of(40, 6), 4, past_key_values=kind(config=each.config)) for each in (plain, model))
    assert_same(want, got)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("place", PLACES)
def test_output_attentions(daemon: Daemon, place: str, attention: str):
    plain, model = small(), small()
    for each in (plain, model):
        each.set_attn_implementation(attention)
    kvstrata_transformers.enable(model, socket=daemon.socket)
    keywords = said(place, (plain, model), output_attentions=True, return_dict_in_generate=True)
    for _ in range(2):
        with pytest.warns(UserWarning, match="output_attentions"):
            want, got = (each.generate(ids_of(40, 7), do_sample=False, max_new_tokens=3, **keywords) for each in (plain, model))
        shapes = [[None if t is None else tuple(t.shape) for step in out.attentions for t in step] for out in (want, got)]
        assert shapes[0] == shapes[1] and torch.equal(want.sequences, got.sequences)
        compare(plain, model, ids_of(40, 7), 2, **({} if place == "keyword" else keywords))  # and the prompt is held


def test_eager_attention_stays_eager_without_pages(daemon: Daemon):
    plain, model = small(), small()
    for each in (plain, model):
        each.set_attn_implementation("eager")
    kvstrata_transformers.enable(model, socket=daemon.socket)
    batch = padded(40, 9, seed=8)
    with torch.no_grad():
        want, got = (each(**batch, output_attentions=True) for each in (plain, model))
    assert all(torch.equal(a, b) for a, b in zip(want.attentions, got.attentions, strict=True))
    compare(plain, model, batch)
    kvstrata_transformers.disable(model)
    assert model.config._attn_implementation == "eager"


def test_weights_of_attention_are_refused_on_a_cache(daemon: Daemon):
    _, model = pair(daemon)
    with torch.no_grad(), pytest.raises(kvstrata_transformers.NotServed, match="output_attentions"):
        model(input_ids=ids_of(10), output_attentions=True, past_key_values=kvstrata_transformers.cache(model))


@pytest.mark.parametrize("place", PLACES)
def test_what_is_returned(daemon: Daemon, place: str):
    plain, model = pair(daemon)
    keywords = said(place, (plain, model), return_dict_in_generate=True, output_scores=True, output_logits=True,
                    output_hidden_states=True)
    for _ in range(2):  # the second time behind what is held
        want, got = (each.generate(ids_of(70, 9), do_sample=False, max_new_tokens=3, **keywords) for each in (plain, model))
        assert_same(want, got)
        for a, b in zip(want.hidden_states, got.hidden_states, strict=True):
            for x, y in zip(a, b, strict=True):
                torch.testing.assert_close(y, x, rtol=1e-3, atol=1e-3)


def test_results_for_all_positions(daemon: Daemon):
    plain, model = pair(daemon)
    prompt = ids_of(70, 10)
    compare(plain, model, prompt)  # it is held
    with torch.no_grad():
        want = plain(input_ids=prompt, labels=prompt, output_hidden_states=True)
        for options in ({}, {"logits_to_keep": 0}, {"labels": prompt}, {"output_hidden_states": True, "logits_to_keep": 1}):
            got = model(input_ids=prompt, past_key_values=kvstrata_transformers.cache(model), **options)
            torch.testing.assert_close(got.logits, want.logits[:, -got.logits.shape[1]:], rtol=1e-3, atol=1e-3)
            assert got.logits.shape[1] == (options.get("logits_to_keep") or 70)
            if "labels" in options:
                torch.testing.assert_close(got.loss, want.loss, rtol=1e-4, atol=1e-4)
            if "output_hidden_states" in options:
                torch.testing.assert_close(got.hidden_states, want.hidden_states, rtol=1e-3, atol=1e-3)
        for keep in (1, 2, 20):
            with columns_of(model) as columns:
                got = model(input_ids=prompt, logits_to_keep=keep, past_key_values=kvstrata_transformers.cache(model))
            torch.testing.assert_close(got.logits, want.logits[:, -keep:], rtol=1e-3, atol=1e-3)
            assert columns == [6 if keep <= 6 else 38]


def test_results_for_columns_that_are_padding_in_all_rows(daemon: Daemon):
    plain, model = pair(daemon)
    batch = {name: torch.nn.functional.pad(x, (7, 0)) for name, x in padded(40, 12, seed=12).items()}
    want, got = (answer(each, batch, 2, output_hidden_states=True) for each in (plain, model))
    real = batch["attention_mask"].bool()
    for a, b in zip(want.hidden_states[0], got.hidden_states[0], strict=True):
        torch.testing.assert_close(b[real], a[real], rtol=1e-3, atol=1e-3)


def test_arguments_that_nobody_knows(daemon: Daemon):
    _, model = pair(daemon)
    with torch.no_grad(), pytest.raises(kvstrata_transformers.NotServed, match="argument cu_seq_lens_q"):
        model(input_ids=ids_of(10), cu_seq_lens_q=torch.tensor([0, 10]), past_key_values=kvstrata_transformers.cache(model))
    with torch.no_grad(), pytest.raises(kvstrata_transformers.NotServed, match="is_causal"):
        model(input_ids=ids_of(10), is_causal=False, past_key_values=kvstrata_transformers.cache(model))


def test_sampling_draws_the_same(daemon: Daemon):
    plain, model = pair(daemon)
    batch = padded(40, 9, 33, seed=11)
    for options in ({"top_k": 20}, {"num_return_sequences": 2, "top_p": 0.9}):
        outputs = []
        for each in (plain, model):
            torch.manual_seed(5)
            outputs.append(each.generate(**batch, do_sample=True, max_new_tokens=8, **copy.copy(options)))
        assert torch.equal(*outputs)
