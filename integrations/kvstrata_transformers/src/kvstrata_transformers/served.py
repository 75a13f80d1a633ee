# SPDX-License-Identifier: Apache-2.0
"""Which models are served, and which of their layers.

Full attention layers are served. Sliding window layers beside them stay in transformers' own cache. Everything else is
refused before anything is changed, by the name that the configuration or the weights have for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from kvstrata.torch_model import HEAD_DIMS, PAGE_DTYPES

import kvstrata

class Unsupported(ValueError):
    """The model has something that kvstrata does not serve; nothing was changed."""


@dataclass(frozen=True)
class Served:
    """Geometry of the served layers. pages_of: model layer -> layer of the registered model; windows: of the others,
    model layer -> tokens."""

    query_heads: int
    kv_heads: int
    head_dim: int
    scale: float
    dtype: kvstrata.DType
    pages_of: dict[int, int]
    windows: dict[int, int]


def served(model: Any) -> Served:
    """Errors: Unsupported, with the field and its value."""
    config = model.config.get_text_config(decoder=True)
    if problem := _problem(model, config):
        raise Unsupported(f"{type(model).__name__}: {problem}; leave the model on its plain path")
    types = _layer_types(config)
    full = [i for i, kind in enumerate(types) if kind == "full_attention"]
    geometry = {_geometry(layer, config) for i, layer in _attention_layers(model) if i in full}
    if len(geometry) != 1:
        raise Unsupported(f"{type(model).__name__}: (query heads, KV heads, head_dim, scale) differ by layer: "
                          f"{sorted(geometry)}; leave the model on its plain path")
    query_heads, kv_heads, head_dim, scale = geometry.pop()
    if head_dim not in HEAD_DIMS:
        raise Unsupported(f"{type(model).__name__}: head_dim is {head_dim}; served are {HEAD_DIMS}")
    return Served(query_heads, kv_heads, head_dim, scale, PAGE_DTYPES[model.dtype],
                  {layer: i for i, layer in enumerate(full)},
                  {i: config.sliding_window for i, kind in enumerate(types) if kind == "sliding_attention"})


def _problem(model: Any, config: Any) -> str | None:
    """What is in the way, or None."""
    value = lambda name: getattr(config, name, None)
    kinds = sorted(set(_layer_types(config)) - {"full_attention", "sliding_attention"})
    return next((text for wrong, text in (
        (config is not model.config, f"{config.model_type} is a part of it; token ids alone must say what it reads"),
        (config.is_encoder_decoder, "is_encoder_decoder is True; decoders alone are served"),
        (not getattr(model, "_supports_attention_backend", False),
         "its attention does not go through AttentionInterface"),
        (model.dtype not in PAGE_DTYPES, f"dtype is {model.dtype}; pages are float32, float16 or bfloat16"),
        (value("kv_lora_rank"), f"kv_lora_rank is {value('kv_lora_rank')} (MLA)"),
        (value("attn_logit_softcapping"), f"attn_logit_softcapping is {value('attn_logit_softcapping')}"),
        (value("alibi") or value("position_embedding_type") == "alibi", "its positions are ALiBi's"),
        (any(name.endswith("sinks") for name, _ in model.named_parameters()), "its attention has sinks"),
        (value("num_kv_shared_layers") or value("kv_sharing_modes"), "layers share keys and values"),
        (value("use_bidirectional_attention"), "use_bidirectional_attention is True"),
        (value("is_causal") is False, "is_causal is False"),
        (kinds, f"layer_types has {kinds}; served are full_attention, beside sliding_attention"),
        ("full_attention" not in _layer_types(config),
         f"all layers have a sliding window of {value('sliding_window')}; nothing is left to serve"),
    ) if wrong), None)


def _layer_types(config: Any) -> list[str]:
    if types := getattr(config, "layer_types", None):
        return list(types)
    window = getattr(config, "sliding_window", None) is not None
    return ["sliding_attention" if window else "full_attention"] * config.num_hidden_layers


def _attention_layers(model: Any) -> list[tuple[int, torch.nn.Module]]:
    return [(module.layer_idx, module) for module in model.modules()
            if hasattr(module, "layer_idx") and hasattr(module, "scaling")]


def _geometry(layer: Any, config: Any) -> tuple[int, int, int, float]:
    """From the weights where the projections are apart: a configuration need not name each layer's heads."""
    head_dim = layer.head_dim
    heads = [projection.out_features // head_dim if (projection := getattr(layer, name, None)) is not None else number
             for name, number in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads))]
    return heads[0], heads[1], head_dim, float(layer.scaling)
