# SPDX-License-Identifier: Apache-2.0
"""The same tokens as plain transformers, in every way that generate() goes."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import transformers

import kvstrata
import kvstrata_transformers
from conftest import MARGIN, assert_same, batch_of, prompts_of

reorders = pytest.mark.skipif(not hasattr(kvstrata.Session, "reorder"), reason="this binding has no Session.reorder")
truncates = pytest.mark.skipif(not hasattr(kvstrata.Sequence, "truncate"),
                               reason="this binding has no Sequence.truncate")


def compare(plain: Any, model: Any, batch: dict[str, torch.Tensor], **options: Any) -> None:
    options = {"max_new_tokens": 32, "do_sample": False, **options}
    assert_same(plain, batch, plain.generate(**batch, **options), model.generate(**batch, **options))


def test_greedy(plain, model, text_ids, random, amount, shard):
    for prompt in shard(prompts_of(text_ids, random, amount(100), 10, 6000)):
        compare(plain, model, batch_of([prompt], 2))


def test_batches_with_padding(plain, model, text_ids, random, amount, shard):
    batches = [prompts_of(text_ids, random, 8, 5, 600) for _ in range(amount(20))]
    for prompts in batches:
        random.shuffle(prompts)
    for prompts in shard(batches):
        compare(plain, model, batch_of(prompts, 2), max_new_tokens=24)


def test_rows_that_hold_different_prefixes(plain, model, columns, text_ids, random):
    prompts = prompts_of(text_ids, random, 4, 100, 400)
    for prompt in prompts[1:3]:
        model.generate(torch.tensor([prompt]), max_new_tokens=1)
    columns.clear()
    batch = batch_of(prompts, 2)
    compare(plain, model, batch)
    missing = [len(p) - (len(p) - 1) // 32 * 32 if p in prompts[1:3] else len(p) for p in prompts]
    assert columns[0] == max(missing)


@reorders
def test_beams(plain, model, text_ids, random, amount, shard):
    for prompt in shard(prompts_of(text_ids, random, amount(20), 10, 800)):
        options = {"max_new_tokens": 24, "num_beams": 4, "do_sample": False, "return_dict_in_generate": True,
                   "output_scores": True}
        batch = batch_of([prompt, prompt[:len(prompt) // 2]], 2)
        want, got = plain.generate(**batch, **options), model.generate(**batch, **options)
        if not torch.equal(want.sequences, got.sequences):
            torch.testing.assert_close(got.sequences_scores, want.sequences_scores, rtol=0, atol=MARGIN)


@reorders
def test_several_returned_sequences(plain, model, text_ids):
    compare(plain, model, batch_of([text_ids[:90]], 2), num_beams=3, num_return_sequences=1)
    batch = batch_of([text_ids[:90], text_ids[200:240]], 2)
    torch.manual_seed(3)
    out = model.generate(**batch, do_sample=True, num_return_sequences=3, max_new_tokens=8)
    assert out.shape == (6, 98)


def test_sampling(plain, model, text_ids):
    batch, tokens = batch_of([text_ids[:120]], 2), []
    for each in (plain, model):
        torch.manual_seed(11)
        tokens.append(each.generate(**batch, do_sample=True, temperature=0.7, max_new_tokens=24))
    assert torch.equal(*tokens)


@pytest.mark.parametrize("chunk", [1, 50, 512])
def test_prefill_in_chunks(plain, model, text_ids, random, chunk):
    begin = int(random.integers(len(text_ids) - 200))
    for prompts in ([text_ids[begin:begin + 200]], [text_ids[begin:begin + 130], text_ids[begin + 50:begin + 60]]):
        batch = batch_of(prompts, 2)
        assert_same(plain, batch, plain.generate(**batch, max_new_tokens=16, do_sample=False),
                    model.generate(**batch, max_new_tokens=16, do_sample=False, prefill_chunk_size=chunk))


@truncates
def test_assisted(plain, model, folder, text_ids, random, amount, shard):
    from transformers import AutoModelForCausalLM
    assistant = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, num_hidden_layers=24).eval()
    for prompt in shard(prompts_of(text_ids, random, amount(20), 20, 800)):
        batch = batch_of([prompt], 2)
        want = plain.generate(**batch, max_new_tokens=32, do_sample=False)
        for options in ({"prompt_lookup_num_tokens": 6}, {"assistant_model": assistant}):
            assert_same(plain, batch, want, model.generate(**batch, max_new_tokens=32, do_sample=False, **options))


@truncates
def test_drafts_leave_nothing_behind(plain, model, text_ids):
    """The turn behind one with rejected drafts."""
    cache = kvstrata_transformers.cache(model)
    first = batch_of([text_ids[300:600]], 2)
    answer = model.generate(**first, past_key_values=cache, max_new_tokens=32, do_sample=False,
                            prompt_lookup_num_tokens=8)
    second = torch.cat([answer, torch.tensor([text_ids[50:80]])], 1)
    batch = {"input_ids": second, "attention_mask": torch.ones_like(second)}
    got = model.generate(**batch, past_key_values=cache, max_new_tokens=20, do_sample=False)
    assert_same(plain, batch, plain.generate(**batch, max_new_tokens=20, do_sample=False), got)
    cache.close()


def test_two_turns_on_a_cache(plain, model, columns, text_ids):
    cache = kvstrata_transformers.cache(model)
    first = batch_of([text_ids[700:900]], 2)
    answer = model.generate(**first, past_key_values=cache, max_new_tokens=20, do_sample=False)
    assert_same(plain, first, plain.generate(**first, max_new_tokens=20, do_sample=False), answer)
    more = torch.cat([answer, torch.tensor([text_ids[50:80]])], 1)
    second = {"input_ids": more, "attention_mask": torch.ones_like(more)}
    columns.clear()
    got = model.generate(**second, past_key_values=cache, max_new_tokens=20, do_sample=False)
    assert columns[0] == 31  # the answer's last token was never fed
    assert_same(plain, second, plain.generate(**second, max_new_tokens=20, do_sample=False), got)
    cache.close()


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_either_name_of_a_cache(plain, model, text_ids, name):
    """transformers calls it `cache` from 5.24 on, and takes the older name, too."""
    if name not in {*inspect.signature(model.forward).parameters, "past_key_values"}:
        pytest.skip(f"transformers {transformers.__version__} has no argument `cache`")
    batch = batch_of([text_ids[900:1000]], 2)
    options = {"max_new_tokens": 8, "do_sample": False}
    cache = kvstrata_transformers.cache(model)
    got = model.generate(**batch, **options, **{name: cache})
    assert_same(plain, batch, plain.generate(**batch, **options), got)
    assert cache.rows[0].tokens == got.shape[1] - 1  # the last token was never fed
    cache.close()

    cache = kvstrata_transformers.cache(model)
    with torch.no_grad():
        for ids in batch["input_ids"].split(60, 1):  # no generate(): a pass is what the model's call is
            got = model(ids, use_cache=True, **{name: cache}).logits[:, -1]
            assert cache.rows[0].tokens == cache.columns
        torch.testing.assert_close(got, plain(**batch).logits[:, -1], rtol=0, atol=MARGIN)
    assert cache.columns == 100
    cache.close()


def test_a_held_prompt_is_not_computed_again(plain, model, columns, text_ids):
    batch = batch_of([text_ids[1200:1700]], 2)
    compare(plain, model, batch)
    columns.clear()
    compare(plain, model, batch)
    assert columns[0] == 500 - 480  # whole pages of 32 are held
    assert columns[1:] == [1] * 31


def test_another_cache_goes_the_plain_way(plain, model, text_ids):
    from transformers import DynamicCache
    batch = batch_of([text_ids[:40], text_ids[60:70]], 2)
    want = plain.generate(**batch, max_new_tokens=8, do_sample=False)
    assert torch.equal(want, model.generate(**batch, max_new_tokens=8, do_sample=False, past_key_values=DynamicCache()))
    assert torch.equal(want, model.generate(**batch, max_new_tokens=8, do_sample=False, use_cache=False))


def test_a_pass_that_fails_leaves_the_cache_as_it_was(plain, model, text_ids):
    cache = kvstrata_transformers.cache(model)
    hook = model.model.layers[7].register_forward_pre_hook(lambda *_: 1 / 0)
    batch = batch_of([text_ids[2000:2100]], 2)
    with pytest.raises(ZeroDivisionError):
        model.generate(**batch, past_key_values=cache, max_new_tokens=8)
    hook.remove()
    got = model.generate(**batch, past_key_values=cache, max_new_tokens=8, do_sample=False)
    assert_same(plain, batch, plain.generate(**batch, max_new_tokens=8, do_sample=False), got)
    cache.close()
    assert cache.columns == 0
