# SPDX-License-Identifier: Apache-2.0
"""Other architectures, small and with random weights: tokens and logits of plain transformers, and what is refused."""

from __future__ import annotations

import copy
import gc
import os
import weakref
from typing import Any

import pytest
import torch
from kvstrata.daemon import Daemon
from transformers import AutoModelForCausalLM, CONFIG_MAPPING

import kvstrata
import kvstrata_transformers
from conftest import SEED, batch_of

SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 500, "max_position_embeddings": 2048,
         "initializer_range": 0.1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
GEMMA = {**SMALL, "num_hidden_layers": 6, "sliding_window": 16, "query_pre_attn_scalar": 144,
         "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2}
MODELS = {"llama": SMALL, "mistral": {**SMALL, "sliding_window": None}, "qwen2": {**SMALL, "num_attention_heads": 2},
          "qwen3": {**SMALL, "head_dim": 128}, "gemma3_text": GEMMA}


def small(kind: str, **changes: Any) -> Any:
    torch.manual_seed(SEED)
    config = CONFIG_MAPPING[kind](**{**MODELS.get(kind, SMALL), **changes})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def prompts(random: Any, *lengths: int) -> dict[str, torch.Tensor]:
    return batch_of([random.integers(3, 500, n).tolist() for n in lengths], 0)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prefill_chunk_size": 20}, {"prompt_lookup_num_tokens": 4}],
                         ids=["greedy", "beams", "chunks", "look-up"])
@pytest.mark.parametrize("kind", MODELS)
def test_same_as_plain(kind: str, options: dict[str, Any], daemon: Daemon, random):
    plain = small(kind)
    model = copy.deepcopy(plain)
    kvstrata_transformers.enable(model, socket=daemon.socket)
    for lengths in ((70,), (70,)) if "prompt_lookup_num_tokens" in options else ((70,), (40, 9, 33)):
        batch = prompts(random, *lengths)
        for _ in range(2):  # the second time behind what is held
            want, got = (each.generate(**batch, **options, do_sample=False, max_new_tokens=24,
                                       return_dict_in_generate=True, output_logits=True) for each in (plain, model))
            assert torch.equal(want.sequences, got.sequences)
            for a, b in zip(want.logits, got.logits):
                torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-3)
    kvstrata_transformers.disable(model)
    assert torch.equal(want.sequences, model.generate(**batch, **options, do_sample=False, max_new_tokens=24))


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_columns_that_are_padding_in_all_rows(kind: str, daemon: Daemon, random):
    plain = small(kind)
    model = copy.deepcopy(plain)
    kvstrata_transformers.enable(model, socket=daemon.socket)
    batch = {name: torch.nn.functional.pad(x, (7, 0)) for name, x in prompts(random, 40, 12).items()}
    want, got = (each.generate(**batch, do_sample=False, max_new_tokens=24) for each in (plain, model))
    assert torch.equal(want, got)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, daemon: Daemon, random):
    plain = small("llama").to(dtype)
    model = copy.deepcopy(plain)
    kvstrata_transformers.enable(model, socket=daemon.socket)
    batch = prompts(random, 50)
    want, got = (each.generate(**batch, do_sample=False, max_new_tokens=1, return_dict_in_generate=True,
                               output_logits=True) for each in (plain, model))
    torch.testing.assert_close(got.logits[0], want.logits[0], rtol=0.05, atol=0.05)


def test_global_layers_alone_are_registered(daemon: Daemon):
    model = small("gemma3_text")
    kvstrata_transformers.enable(model, socket=daemon.socket)
    cache = kvstrata_transformers.cache(model)
    seen: set[int] = set()
    cache.watch = lambda layer, step: seen.add(layer)
    model.generate(torch.tensor([[5, 6, 7]]), past_key_values=cache, max_new_tokens=3)
    assert seen == {2, 5}
    assert cache.rows[0].sequence.model.layers == 2
    kvstrata_transformers.disable(model)


@pytest.mark.parametrize(("kind", "changes", "named"), [
    ("mistral", {"sliding_window": 64}, "sliding window of 64"),
    ("gemma2", {"attn_logit_softcapping": 50.0, "query_pre_attn_scalar": 64}, "attn_logit_softcapping is 50.0"),
    ("gpt_oss", {"num_local_experts": 2}, "sinks"),
    ("deepseek_v3", {"kv_lora_rank": 32}, "kv_lora_rank is 32"),
    ("llama", {"head_dim": 32}, "head_dim is 32"),
    ("bloom", {"n_head": 2, "n_layer": 1}, "AttentionInterface"),
], ids=lambda x: x if isinstance(x, str) else "")
def test_refused_by_name(kind: str, changes: dict[str, Any], named: str):
    model = small(kind, **changes)
    before = model.config._attn_implementation
    with pytest.raises(kvstrata_transformers.Unsupported, match=named):
        kvstrata_transformers.enable(model, socket="/nowhere")
    assert model.config._attn_implementation == before and "generate" not in vars(model)


def test_heads_that_differ_by_layer():
    model = small("llama")
    model.model.layers[1].self_attn.k_proj = torch.nn.Linear(128, 64)
    with pytest.raises(kvstrata_transformers.Unsupported, match="differ by layer"):
        kvstrata_transformers.enable(model)


def test_a_plan_that_is_none(daemon: Daemon):
    model = small("llama")
    with pytest.raises(kvstrata.InvalidArgument, match="budgets"):
        kvstrata_transformers.enable(model, "quest{budgets = 3}", socket=daemon.socket)
    assert "generate" not in vars(model) and not model._forward_hooks


def test_a_compiled_model_in_a_loop_of_ones_own(daemon: Daemon, random):
    """Passes on a cache are cut out of what torch compiles."""
    plain = small("llama")
    model = copy.deepcopy(plain)
    kvstrata_transformers.enable(model, socket=daemon.socket)
    model.compile(backend="eager")
    ids = prompts(random, 70)["input_ids"]
    cache = kvstrata_transformers.cache(model)
    with torch.no_grad():
        for part in ids.split([60, 9, 1], 1):
            logits = model(input_ids=part, past_key_values=cache).logits[:, -1]
        torch.testing.assert_close(logits, plain(input_ids=ids).logits[:, -1], rtol=1e-3, atol=1e-3)
    assert cache.columns == 70


def test_models_are_collected_and_not_copied(daemon: Daemon):
    model = small("llama")
    kvstrata_transformers.enable(model, socket=daemon.socket)
    with pytest.raises(TypeError, match="disable"):
        copy.deepcopy(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_no_gradient(daemon: Daemon):
    model = small("llama")
    kvstrata_transformers.enable(model, socket=daemon.socket)
    with pytest.raises(RuntimeError, match="no_grad"):
        model(input_ids=torch.tensor([[5, 6]]), past_key_values=kvstrata_transformers.cache(model))


def test_disable_and_the_environment(daemon: Daemon, monkeypatch: pytest.MonkeyPatch):
    model = small("llama")
    kvstrata_transformers.enable(model, socket=daemon.socket)
    kvstrata_transformers.enable(model, "window{n_recent = 64}", socket=daemon.socket)  # anew, under another plan
    assert "n_recent = 64" in kvstrata_transformers.cache(model)._plans[0]
    kvstrata_transformers.disable(model)
    kvstrata_transformers.disable(model)
    assert not (model._forward_pre_hooks or model._forward_hooks or model.base_model._forward_hooks)
    with pytest.raises(ValueError, match="not enabled"):
        kvstrata_transformers.cache(model)
    monkeypatch.setitem(os.environ, "KVSTRATA_DISABLE", "1")
    with pytest.warns(UserWarning, match="KVSTRATA_DISABLE=1"):
        kvstrata_transformers.enable(model)
    assert "generate" not in vars(model)
