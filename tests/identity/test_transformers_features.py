# SPDX-License-Identifier: Apache-2.0
"""What works with the plain model and touches its cache: it works, or says in one sentence what to do."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kvstrata.daemon import Daemon
from transformers import DynamicCache

import kvstrata_transformers
from served_models import answer, assert_same, columns_of, compare, ids_of, pair, small

peft = pytest.importorskip("peft")


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon() as started:
        yield started


def filled(model: Any, cache: Any, prompt: torch.Tensor) -> Any:
    with torch.no_grad():
        model(input_ids=prompt, past_key_values=cache)
    return cache


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_copies_of_a_filled_cache(daemon: Daemon, kind: str):
    """The idiom of transformers' documentation for prompts with one beginning."""
    changes = {} if kind == "llama" else {"sliding_window": 16, "query_pre_attn_scalar": 64,
                                          "layer_types": ["sliding_attention", "full_attention"]}
    plain, model = pair(daemon, kind=kind, **changes)
    prompt = ids_of(50, 1)
    theirs, ours = filled(plain, DynamicCache(config=plain.config), prompt), filled(model, kvstrata_transformers.cache(model), prompt)
    for seed in (2, 3):
        more = torch.cat([prompt, ids_of(9, seed)], 1)
        want = answer(plain, more, past_key_values=copy.deepcopy(theirs))
        with columns_of(model) as columns:
            got = answer(model, more, past_key_values=copy.deepcopy(ours))
        assert_same(want, got)
        assert columns[0] == 9
    assert ours.columns == 50
    assert copy.deepcopy(kvstrata_transformers.cache(model)).columns == 0


def test_a_copied_model_says_what_to_do(daemon: Daemon):
    _, model = pair(daemon)
    with pytest.raises(TypeError, match=r"disable\(model\)"):
        copy.deepcopy(model)


def test_an_assistant_that_is_enabled(daemon: Daemon):
    plain, model = pair(daemon)
    assistant = small(num_hidden_layers=1)
    kvstrata_transformers.enable(assistant, socket=daemon.socket)
    for helper in (assistant, model):
        want = answer(plain, ids_of(40, 4), 12)
        got = answer(model, ids_of(40, 4), 12, assistant_model=helper)
        assert torch.equal(want.sequences, got.sequences)


def test_a_compiled_model(daemon: Daemon):
    plain, model = pair(daemon)
    model.compile(backend="eager")
    with pytest.warns(UserWarning, match="runs uncompiled"):
        compare(plain, model, ids_of(70, 5))
    assert compare(plain, model, ids_of(70, 5))[0] == 6


def test_a_compiled_model_is_enabled_inside_its_wrapper(daemon: Daemon):
    plain, model = small(), small()
    compiled = torch.compile(model, backend="eager")
    kvstrata_transformers.enable(compiled, socket=daemon.socket)
    compare(plain, model, ids_of(70, 6))
    assert_same(answer(plain, ids_of(70, 6)), answer(compiled, ids_of(70, 6)))
    kvstrata_transformers.disable(compiled)
    assert "generate" not in vars(model)


def adapted(model: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config).eval()


def test_a_peft_model_is_enabled_inside_its_wrapper(daemon: Daemon):
    base, first = small(), adapted(small(), 1)
    kvstrata_transformers.enable(base, socket=daemon.socket)
    answer(base, ids_of(70, 7))
    enabled = adapted(small(), 1)
    kvstrata_transformers.enable(enabled, socket=daemon.socket)
    inner = enabled.get_base_model()
    for computed in (70, 6):
        with columns_of(inner) as columns:
            assert_same(answer(first, ids_of(70, 7)), answer(enabled, ids_of(70, 7)))
        assert columns[0] == computed
    cache = kvstrata_transformers.cache(enabled)
    assert_same(answer(first, ids_of(70, 7)), answer(enabled, ids_of(70, 7), past_key_values=cache))


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_learned_prompts_go_the_plain_way(daemon: Daemon, kind: str):
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=8)
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(peft.get_peft_model(small(), config).eval())
    plain, model = models
    kvstrata_transformers.enable(model, socket=daemon.socket)
    with pytest.warns(UserWarning, match="learned prompts"):
        assert_same(answer(plain, ids_of(40, 8)), answer(model, ids_of(40, 8)))
    with model.disable_adapter():
        assert_same(answer(small(), ids_of(40, 8)), answer(model, ids_of(40, 8)))


def test_gradient_checkpointing_while_training(daemon: Daemon):
    plain, model = pair(daemon)
    for each in (plain, model):
        each.gradient_checkpointing_enable()
    compare(plain, model, ids_of(70, 9))  # not in training mode
    for each in (plain, model):
        each.train()
    with pytest.warns(UserWarning, match="gradient checkpointing"):
        compare(plain, model, ids_of(70, 9))
    with torch.no_grad(), pytest.raises(kvstrata_transformers.NotServed, match=r"model.eval\(\)"):
        model(input_ids=ids_of(10), past_key_values=kvstrata_transformers.cache(model))


def test_embeddings_in_place_of_ids(daemon: Daemon):
    plain, model = pair(daemon)
    prompt = ids_of(70, 10)
    noise = plain.get_input_embeddings()(prompt).detach() + 0.3 * torch.randn(1, 70, 128, generator=torch.Generator().manual_seed(1))
    for batch in ({"input_ids": prompt, "inputs_embeds": noise}, {"inputs_embeds": noise}):
        with pytest.warns(UserWarning, match="inputs_embeds"):
            compare(plain, model, batch)
    assert compare(plain, model, prompt)[0] == 70  # nothing of it is held
    with torch.no_grad(), pytest.raises(kvstrata_transformers.NotServed, match="inputs_embeds"):
        model(inputs_embeds=noise, past_key_values=kvstrata_transformers.cache(model))


def test_an_attention_that_was_changed_is_noticed(daemon: Daemon):
    """Else each layer would attend the new columns alone."""
    _, model = pair(daemon)
    cache = filled(model, kvstrata_transformers.cache(model), ids_of(40, 11))
    model.set_attn_implementation("sdpa")
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"layers \[0, 1\] did not attend"):
        model(input_ids=ids_of(1, 12), past_key_values=cache)
    assert cache.columns == 40


@pytest.mark.parametrize("plan", ["sekv{min_tokens = 0}", "mosaickv{min_tokens = 0}"])
def test_answers_that_can_be_repeated(plan: str):
    """Workers' progress decides what is packed when decoding begins, unless it is waited for."""
    runs = []
    for _ in range(2):
        with Daemon() as anew:
            _, model = pair(anew, plan, enable={"settle": True})
            cache = kvstrata_transformers.cache(model)
            prompt = ids_of(900, 13)
            assert "not there yet" not in filled(model, cache, prompt).rows[0].sequence.status
            more = torch.cat([prompt, ids_of(1, 14)], 1)
            runs.append(answer(model, more, 40, past_key_values=cache).logits)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_a_pass_that_fails_behind_a_hit_leaves_the_cache_as_it_was(daemon: Daemon):
    plain, model = pair(daemon)
    prompt = ids_of(70, 15)
    compare(plain, model, prompt)
    cache = kvstrata_transformers.cache(model)
    for again in ("in generate()", "in a pass of one's own", "not"):
        hook = model.base_model.register_forward_pre_hook(lambda *_: 1 / 0 if again != "not" else None)
        if again == "in a pass of one's own":
            with torch.no_grad(), pytest.raises(ZeroDivisionError):
                model(input_ids=prompt, past_key_values=cache, logits_to_keep=1)
        elif again == "in generate()":
            with pytest.raises(ZeroDivisionError):
                answer(model, prompt, past_key_values=cache)
        else:
            assert_same(answer(plain, prompt), answer(model, prompt, past_key_values=cache))
        hook.remove()


def test_generate_by_keyword_and_by_place(daemon: Daemon):
    plain, model = pair(daemon)
    prompt = ids_of(20, 14)
    assert torch.equal(plain.generate(prompt, None, do_sample=False, max_new_tokens=4),
                       model.generate(prompt, None, do_sample=False, max_new_tokens=4))
    assert model.generate(max_new_tokens=3, do_sample=False).shape == (1, 4)  # from the beginning of text
    with pytest.raises(ValueError, match="not_an_option"):
        model.generate(prompt, not_an_option=torch.ones(1))
