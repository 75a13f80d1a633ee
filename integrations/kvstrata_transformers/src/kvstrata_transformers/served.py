"""Which layers of a model kvstrata serves, from its configuration; what it does not is refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

HEAD_DIMS = (64, 128, 256)


class Unsupported(ValueError):
    """The model needs something that kvstrata does not serve; the message names it."""


@dataclass(frozen=True)
class Served:
    """layers: the engine's numbers of those that kvstrata serves, ascending. scale: of logits; 0: 1/sqrt(head_dim).
    window: of the layers that stay in the engine; 0: there are none."""

    layers: tuple[int, ...]
    query_heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int


def served(model: Any) -> Served:
    """Unsupported names what stands in the way."""
    config = model.config.get_text_config()
    name = type(model).__name__
    _refuse(name, config)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    other = set(kinds) - {"full_attention", "sliding_attention"}
    if other:
        raise Unsupported(f"{name} has layers of type {sorted(other)}; kvstrata serves full_attention, and leaves "
                          "sliding_attention to the engine")
    layers = tuple(i for i, kind in enumerate(kinds) if kind == "full_attention")
    if not layers:
        raise Unsupported(f"{name} has sliding windows in all layers (sliding_window {config.sliding_window}): "
                          "nothing is left to serve")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim not in HEAD_DIMS:
        raise Unsupported(f"{name} has head_dim {head_dim}; kvstrata serves {', '.join(map(str, HEAD_DIMS))}")
    own = getattr(config, "query_pre_attn_scalar", None)
    scale = float(own) ** -0.5 if own and own != head_dim else 0.0
    window = int(config.sliding_window) if len(layers) < len(kinds) else 0
    return Served(layers, config.num_attention_heads, config.num_key_value_heads, head_dim, scale, window)


def _refuse(name: str, config: Any) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise Unsupported(f"{name} has cross attention; kvstrata serves decoders")
    if getattr(config, "attn_logit_softcapping", None):
        raise Unsupported(f"{name} caps logits (attn_logit_softcapping {config.attn_logit_softcapping})")
    if getattr(config, "alibi", False):
        raise Unsupported(f"{name} biases logits by position (ALiBi)")
    if getattr(config, "kv_lora_rank", None):
        raise Unsupported(f"{name} stores latents (MLA, kv_lora_rank {config.kv_lora_rank})")
    if config.model_type in ("gpt_oss",):
        raise Unsupported(f"{name} has attention sinks")
    if isinstance(config.num_key_value_heads, (list, tuple)):
        raise Unsupported(f"{name} has other numbers of heads in other layers")
    windowed = getattr(config, "use_sliding_window", None)
    if windowed is None:
        windowed = getattr(config, "sliding_window", None)
    if windowed and getattr(config, "layer_types", None) is None:
        raise Unsupported(f"{name} has a sliding window of {config.sliding_window} in all layers")
