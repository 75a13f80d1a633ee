# SPDX-License-Identifier: Apache-2.0
"""Each field that is left out of identities: another value leaves the identity and the keys as they are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from kvstrata.identity import HARMLESS
from kvstrata.torch_identity import HARMLESS_ATTRIBUTES
from kvstrata_transformers.identity import ModelIdentity
from small_models import KINDS, equal, keys_and_values, model_of, original

OTHER: dict[str, Any] = {
    "_name_or_path": "elsewhere", "_commit_hash": "abc", "transformers_version": "4.0", "architectures": ["Other"],
    "_attn_implementation": "eager", "_attn_implementation_internal": "eager", "use_cache": False,
    "output_attentions": True, "_output_attentions": True, "output_hidden_states": True, "return_dict": False,
    "id2label": {0: "a"}, "label2id": {"a": 0}, "problem_type": "regression", "initializer_range": 0.5,
    "bos_token_id": 7, "eos_token_id": 8, "_post_init_done": False}


def test_each_has_a_value_here():
    assert OTHER.keys() == HARMLESS.keys()


@pytest.mark.parametrize("name", sorted(HARMLESS))
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_moe"])
def test_a_field_changes_nothing(kind: str, name: str):
    model = model_of(kind)
    live = ModelIdentity(model)
    before = live.now()
    keys = keys_and_values(model)
    vars(model.config)[name] = copy.deepcopy(OTHER[name])
    assert live.now() == before == ModelIdentity(model).now()
    if name not in ("return_dict", "output_attentions", "_output_attentions"):  # other outputs, of which keys are none
        assert equal(keys_and_values(model), keys)


@pytest.mark.parametrize("name", sorted(HARMLESS))
def test_a_field_at_construction_changes_nothing(name: str):
    if name.startswith("_") or name == "initializer_range":
        pytest.skip("no argument, or it draws other weights")
    assert ModelIdentity(model_of("llama", **{name: OTHER[name]})).now() == ModelIdentity(original("llama")).now()


def test_attributes_change_nothing():
    for kind in KINDS:
        model = model_of(kind)
        before = ModelIdentity(model).now()
        for module in (model, model.base_model):
            vars(module).update({name: "another value" for name in HARMLESS_ATTRIBUTES
                                 if not name.startswith(("gradient", "_gradient", "generation_config"))})
        assert ModelIdentity(model).now() == before, kind
        assert equal(keys_and_values(model), keys_and_values(original(kind)))


def test_checkpointing_and_generation_change_nothing():
    model = model_of("llama")
    before = ModelIdentity(model).now()
    for module in model.modules():
        module.gradient_checkpointing, module._gradient_checkpointing_func = True, torch.utils.checkpoint.checkpoint
    model.generation_config.temperature = 0.3
    assert ModelIdentity(model).now() == before
    assert equal(keys_and_values(model), keys_and_values(original("llama")))
