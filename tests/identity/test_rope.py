# SPDX-License-Identifier: Apache-2.0
"""Which rotary embeddings give a prefix keys of its own: what the probe says is what a short and a long prompt's keys
say, for each type that transformers has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kvstrata.rope_probe import depends_on_length
from kvstrata_transformers.identity import ModelIdentity, rope_depends_on_length
from small_models import SIZES, config_of, keys_and_values, model_of
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

HALF = SIZES["head_dim"] // 2
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {}, "linear": {"factor": 4.0}, "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {"factor": 4.0, "original_max_position_embeddings": 64, "short_factor": [1.0] * HALF,
                 "long_factor": [1.0 + i for i in range(HALF)]},
    "llama3": {"factor": 4.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "proportional": {"partial_rotary_factor": 0.5}}


def _rope(kind: str) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 1e4, **OPTIONS[kind]}


def test_each_type_is_here():
    assert ROPE_INIT_FUNCTIONS.keys() <= OPTIONS.keys()


@pytest.mark.parametrize("kind", sorted({"default", *ROPE_INIT_FUNCTIONS}))
def test_the_probe_says_what_keys_say(kind: str):
    model = model_of("llama", rope_parameters=_rope(kind))
    short = keys_and_values(model_of("llama", rope_parameters=_rope(kind)), 40)[0]
    differ = [not torch.allclose(short[..., :40, :], keys_and_values(
        model_of("llama", rope_parameters=_rope(kind)), n)[0][..., :40, :], atol=1e-4) for n in (60, 65, 250, 300)]
    assert (rope_depends_on_length(model) is not None) is any(differ)
    assert (kind in ("dynamic", "longrope")) is any(differ)  # so that the walk shows both


def test_such_a_model_is_private_whatever_it_is_named():
    for given in (None, "mine"):
        said = ModelIdentity(model_of("llama", rope_parameters=_rope("dynamic")), given).now().private
        assert "dynamic" in str(said) and "rope_type" in str(said)


def test_the_probe_leaves_the_model_as_it_was():
    model = model_of("llama", rope_parameters=_rope("dynamic"))
    before = model.model.rotary_emb.inv_freq.clone(), model.model.rotary_emb.max_seq_len_cached
    rope_depends_on_length(model)
    assert torch.equal(model.model.rotary_emb.inv_freq, before[0])
    assert model.model.rotary_emb.max_seq_len_cached == before[1]


def test_what_cannot_be_tried_is_private():
    model = model_of("llama")
    for forward in (_three_rows, _by_length):
        model.model.rotary_emb.forward = forward
        assert "could not be tried" in str(ModelIdentity(model).now().private)


def _by_length(x: torch.Tensor, seq_len: int) -> torch.Tensor:
    return x.new_zeros(seq_len)


def _three_rows(x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    height, width, time = position_ids
    return height + width + time


def test_each_layer_type_is_tried():
    """gemma3 has a rotary embedding for its full layers and another for the others."""
    config = config_of("gemma3_text")
    for layer_type in sorted(set(config.layer_types)):
        parameters = {other: {"rope_type": "default", "rope_theta": 1e4} for other in set(config.layer_types)}
        assert rope_depends_on_length(model_of("gemma3_text", rope_parameters=parameters)) is None
        parameters[layer_type] = _rope("dynamic")
        assert rope_depends_on_length(model_of("gemma3_text", rope_parameters=parameters)) is not None, layer_type


def test_what_a_probe_sees():
    def turn(positions: torch.Tensor) -> torch.Tensor:
        return positions[:, None].float()

    assert depends_on_length(turn, [100]) is None
    assert depends_on_length(lambda p: turn(p) * (2 if p.max() >= 150 else 1), [100]) is not None
    assert depends_on_length(lambda p: turn(p) * (2 if len(p) > 100 else 1), [100]) is not None
    seen: list[int] = []

    def with_state(positions: torch.Tensor) -> torch.Tensor:
        answer = turn(positions) * (2 if seen else 1)
        seen.extend([1] if positions.max() > 100 else [])
        return answer

    assert "after a prompt" in str(depends_on_length(with_state, [100]))
