# SPDX-License-Identifier: Apache-2.0
"""A model that changes while it is enabled: nothing of what it was is hit, and hits come back when it does."""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kvstrata.daemon import Daemon, find_daemon
from transformers import AutoModelForCausalLM

import kvstrata
import kvstrata_transformers
from served_models import answer, assert_same, columns_of, compare, ids_of, pair, small

peft = pytest.importorskip("peft")
PROMPT = ids_of(70, 1)
HELD = 70 - 64


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon() as started:
        yield started


def in_place(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(1.5)


def through_data(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight.data *= 1.5


def replaced(model: Any) -> None:
    model.model.layers[0].mlp = copy.deepcopy(model.model.layers[1].mlp)


def setting(model: Any) -> None:
    model.model.layers[0].input_layernorm.variance_epsilon = 0.5


CHANGES = [in_place, through_data, replaced, setting]


@pytest.mark.parametrize("change", CHANGES)
def test_what_changed_is_not_hit(daemon: Daemon, change: Any):
    plain, model = pair(daemon)
    compare(plain, model, PROMPT)
    assert compare(plain, model, PROMPT)[0] == HELD
    for each in (plain, model):
        change(each)
    assert compare(plain, model, PROMPT)[0] == 70
    assert compare(plain, model, PROMPT)[0] == HELD  # by what the model is now


def test_changes_that_leave_no_trace_are_declared(daemon: Daemon):
    """One number that no sample looks at."""
    plain, model = pair(daemon)
    compare(plain, model, PROMPT)
    for each in (plain, model):
        each.model.layers[0].mlp.up_proj.weight.detach().numpy()[77, 33] += 5
    kvstrata_transformers.changed(model)
    assert compare(plain, model, PROMPT)[0] == 70
    assert compare(plain, model, PROMPT)[0] == HELD
    with pytest.raises(ValueError, match="not enabled"):
        kvstrata_transformers.changed(plain)


def test_a_model_that_is_what_it_was_hits_again(daemon: Daemon):
    plain, model = pair(daemon)
    compare(plain, model, PROMPT)
    weight = model.model.layers[0].mlp.up_proj.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.add_(1)
        answer(model, PROMPT)
        weight.copy_(kept)
    assert compare(plain, model, PROMPT)[0] == HELD


def test_a_name_given_again_behind_a_change(daemon: Daemon):
    """The name stands for what it named first, whatever was given in between."""
    plain, model = small(), small()

    def enabled(digest: str) -> int:
        kvstrata_transformers.enable(model, socket=daemon.socket, digest=digest)
        return compare(plain, model, PROMPT)[0]

    assert enabled("one") == 70 and enabled("one") == HELD
    for each in (plain, model):
        in_place(each)
    assert enabled("two") == 70 and enabled("one") == 70 and enabled("two") == HELD and enabled("one") == HELD


@pytest.mark.parametrize("name", ["", "n" * 80, "ä" * 40, b"abc", 7])
def test_names_that_are_none(daemon: Daemon, name: Any):
    model = small()
    with pytest.raises(kvstrata.InvalidArgument, match="DIGEST: digest=.*1 to 79 bytes"):
        kvstrata_transformers.enable(model, socket=daemon.socket, digest=name)
    kvstrata_transformers.enable(model, socket=daemon.socket, digest="ä" * 39)


def test_the_document(daemon: Daemon):
    _, model = pair(daemon)
    before = kvstrata_transformers.document(model)
    setting(model)
    after = kvstrata_transformers.document(model)
    assert {key for key in before if before[key] != after[key]} == {"modules"} and json.dumps(after)


def test_a_used_cache_of_what_the_model_was(daemon: Daemon):
    plain, model = pair(daemon)
    caches = [kvstrata_transformers.cache(model) for _ in range(2)]
    turns = [answer(model, PROMPT, past_key_values=cache).sequences for cache in caches]
    unused = kvstrata_transformers.cache(model)
    for each in (plain, model):
        in_place(each)
    with pytest.raises(kvstrata.FailedPrecondition, match="CACHE_LOST: the model has changed"):
        answer(model, torch.cat([turns[0], ids_of(9, 2)], 1), past_key_values=caches[0])
    with torch.no_grad(), pytest.raises(kvstrata.FailedPrecondition, match="CACHE_LOST"):
        model(input_ids=ids_of(1, 2), past_key_values=caches[1])
    assert caches[0].rows[0].sequence.tokens == 77  # it lives, under what the model was
    assert_same(answer(plain, PROMPT), answer(model, PROMPT, past_key_values=unused))


@pytest.mark.parametrize("where", ["model.layers.0.mlp", "model.embed_tokens", "model.layers.1.self_attn.k_proj"])
def test_hooks_make_it_private(daemon: Daemon, where: str):
    plain, model = pair(daemon)
    compare(plain, model, PROMPT)
    cache = kvstrata_transformers.cache(model)
    answer(model, ids_of(40, 3), past_key_values=cache)
    hooks = [each.get_submodule(where).register_forward_hook(lambda module, args, output: output * 1.5)
             for each in (plain, model)]
    with pytest.warns(UserWarning, match="kept to itself"):
        assert compare(plain, model, PROMPT)[0] == 70
    assert compare(plain, model, PROMPT)[0] == 70  # nor does it find itself
    with torch.no_grad(), pytest.raises(kvstrata.FailedPrecondition, match="CACHE_LOST"):
        model(input_ids=ids_of(1, 4), past_key_values=cache)
    for hook in hooks:
        hook.remove()
    assert compare(plain, model, PROMPT)[0] == HELD


def test_a_private_cache_goes_on_whatever_the_model_becomes(daemon: Daemon):
    from transformers import DynamicCache
    plain, model = pair(daemon)
    hooks = [each.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output * 1.5)
             for each in (plain, model)]
    theirs, ours = DynamicCache(config=plain.config), kvstrata_transformers.cache(model)
    want, got = answer(plain, PROMPT, past_key_values=theirs), answer(model, PROMPT, past_key_values=ours)
    assert_same(want, got)
    for hook in hooks:
        hook.remove()
    more = torch.cat([want.sequences, ids_of(20, 5)], 1)
    assert_same(answer(plain, more, past_key_values=theirs), answer(model, more, past_key_values=ours))
    assert compare(plain, model, more)[0] == more.shape[1]


def test_autocast_is_private(daemon: Daemon):
    plain, model = pair(daemon)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.warns(UserWarning, match="autocast"):
        answer(model, PROMPT)
    assert compare(plain, model, PROMPT)[0] == 70


def test_training_mode_with_dropout_is_private(daemon: Daemon):
    plain, model = pair(daemon, attention_dropout=0.5)
    model.train()
    with pytest.warns(UserWarning, match="kept to itself|gradient"):
        answer(model, PROMPT)
    model.eval()
    assert compare(plain, model, PROMPT)[0] == 70


def with_adapters(model: Any) -> Any:
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
        model = peft.get_peft_model(model, config, name) if seed == 0 else (model.add_adapter(name, config), model)[1]
    return model.eval()


def test_adapters_switched_scaled_disabled_and_merged(daemon: Daemon):
    plain, model = with_adapters(small()), with_adapters(small())
    kvstrata_transformers.enable(model, socket=daemon.socket)
    inner = model.get_base_model()

    def both(computed: int) -> None:
        with columns_of(inner) as columns:
            got = answer(model, PROMPT)
        assert_same(answer(plain, PROMPT), got)
        assert columns[0] == computed

    for name, computed in (("a", 70), ("b", 70), ("a", HELD), ("b", HELD)):
        for each in (plain, model):
            each.set_adapter(name)
        both(computed)
    for each in (plain, model):
        each.base_model.model.model.layers[0].self_attn.q_proj.scaling["b"] *= 3
    both(70)
    with plain.disable_adapter(), model.disable_adapter():
        both(70)
    for each in (plain, model):
        each.merge_adapter()
    both(70)


def test_two_models_that_are_the_same_share(daemon: Daemon):
    plain, model = pair(daemon)
    compare(plain, model, PROMPT)
    _, other = pair(daemon)
    assert compare(plain, other, PROMPT)[0] == HELD
    _, another = pair(daemon, rms_norm_eps=0.01)
    assert compare(small(rms_norm_eps=0.01), another, PROMPT)[0] == 70


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_two_loads_of_a_checkpoint_share(daemon: Daemon, tmp_path: Any, kind: str):
    """Weights of experts are fused while they are loaded."""
    experts = {"head_dim": 128, "num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 64,
               "decoder_sparse_step": 1}
    small(kind, **(experts if kind == "qwen3_moe" else {})).save_pretrained(tmp_path)
    plain, first, second = (AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval() for _ in range(3))
    for model, computed in ((first, 70), (second, HELD)):
        kvstrata_transformers.enable(model, socket=daemon.socket)
        assert compare(plain, model, PROMPT)[0] == computed


def test_a_digest_of_the_callers(daemon: Daemon):
    plain, model = pair(daemon, enable={"digest": "mine"})
    compare(plain, model, PROMPT)
    _, other = pair(daemon, enable={"digest": "mine"})
    assert compare(plain, other, PROMPT)[0] == HELD
    in_place(other), in_place(plain)
    assert compare(plain, other, PROMPT)[0] == 70  # what changed since is another model


def test_live_sessions_do_not_pile_up(daemon: Daemon):
    _, model = pair(daemon)
    caches = []
    for _ in range(4):
        in_place(model)
        caches.append(kvstrata_transformers.cache(model))
        answer(model, PROMPT, 2, past_key_values=caches[-1])
    ctl = find_daemon().removesuffix("d")
    said = subprocess.run([ctl, "--socket", daemon.socket, "session", "ls", "-o", "json"], check=True, capture_output=True)
    assert len(json.loads(said.stdout)["sessions"]) == 1
