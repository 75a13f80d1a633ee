# SPDX-License-Identifier: Apache-2.0
"""Random models of a few architectures with two layers, and what they compute."""

from __future__ import annotations

import copy
import functools
import inspect
import pathlib
import tempfile
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 120, "max_position_embeddings": 256,
         "initializer_range": 0.15, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# By architecture: what it has that others lack.
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "granite": {"attention_multiplier": 0.2, "residual_multiplier": 0.7, "embedding_multiplier": 2.0},
    "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 32,
                    "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1},
    "smollm3": {"no_rope_layers": [1, 0], "use_sliding_window": False},
    "gpt_neox": {"rotary_pct": 0.5},
}


def config_of(kind: str, **changes: Any) -> Any:
    return CONFIG_MAPPING[kind](**copy.deepcopy({**SIZES, **KINDS[kind], **changes}))


def built(config: Any, seed: int = 1, dtype: torch.dtype = torch.float32) -> Any:
    """A model of a configuration; its norms are not the ones that they begin with."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn_like(parameter)
    return model


@functools.cache
def original(kind: str) -> Any:
    """Nobody changes it."""
    return built(config_of(kind))


def model_of(kind: str, **changes: Any) -> Any:
    """A copy of original(kind), or a model of a changed configuration with the same weights where they have the same
    shapes."""
    if not changes:
        return copy.deepcopy(original(kind))
    model = built(config_of(kind, **changes))
    state = model.state_dict()
    same = {name: value for name, value in original(kind).state_dict().items()
            if name in state and state[name].shape == value.shape}
    model.load_state_dict(same, strict=False)
    return model


@functools.cache
def folder_of(kind: str) -> pathlib.Path:
    """A saved model, gone when the process ends."""
    kept = tempfile.TemporaryDirectory(prefix="kvstrata-identity-")
    _FOLDERS.append(kept)
    original(kind).save_pretrained(kept.name)
    return pathlib.Path(kept.name)


_FOLDERS: list[Any] = []


def keys_and_values(model: Any, tokens: int = 24) -> list[torch.Tensor]:
    """Keys and values of a plain forward over fixed ids, layer by layer."""
    ids = torch.arange(3, 3 + tokens)[None] * 7 % 117 + 3
    cache = DynamicCache()
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.no_grad():
        model(ids, **{name: cache}, use_cache=True)
    return [x for layer in cache.layers for x in (layer.keys, layer.values)]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    """But for rounding in their dtype."""
    if [x.shape for x in a] != [x.shape for x in b] or [x.dtype for x in a] != [x.dtype for x in b]:
        return False
    return all(torch.allclose(x, y, rtol=0, atol=64 * torch.finfo(x.dtype).eps * float(x.abs().max()))
               for x, y in zip(a, b))
