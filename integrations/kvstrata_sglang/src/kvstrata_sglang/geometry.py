# SPDX-License-Identifier: Apache-2.0
"""The model as the daemon knows it, and what is refused before SGLang serves anything."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from kvstrata.torch_identity import LoadedModel
from kvstrata.torch_model import HEAD_DIMS, PAGE_DTYPES, Geometry

import kvstrata

# Attributes of SGLang's modules that do not change keys or values, each with the reason.
_HARMLESS = {
    **dict.fromkeys(("pp_group", "tp_group", "kv_tp_group", "attn_tp_group", "moe_tp_group"),
                    "which processes compute together; how many there are is in the settings"),
    **dict.fromkeys(("_forward_method", "_original_forward_method", "_compiled_native", "is_torch_compile"),
                    "which kernel the first pass chose, which differ by rounding"),
    **dict.fromkeys(("attn_boundary", "ffn_boundary"), "how layers hand over between processes"),
}
_RESUM_EVERY = 4096  # looks between sums of all tensors in the background, which take cores from the engine
_NEVER_MET = kvstrata.Need.SURPRISAL | kvstrata.Need.ENTROPY


class Unsupported(ValueError):
    """SGLang was asked for something that kvstrata does not serve; it does not start."""


@dataclass
class Options:
    """From the environment: SGLang has no flag for what a plugin wants to know. socket None: the default; digest None:
    the identity of the model as it is loaded."""

    plan: str
    socket: str | None
    digest: str | None

    @staticmethod
    def of_environment() -> Options:
        return Options(os.environ.get("KVSTRATA_PLAN") or "full", os.environ.get("KVSTRATA_SOCKET") or None,
                       os.environ.get("KVSTRATA_DIGEST") or None)


def needs_of(options: Options) -> kvstrata.PlanNeeds:
    """What its plan needs. kvstrata.Unavailable: no daemon; InvalidArgument: no such plan."""
    with kvstrata.attach(options.socket, client_name="sglang start") as session:
        return session.plan_needs(options.plan)


def refuse(problems: tuple[tuple[bool, str], ...],
           flags: str = "--attention-backend and --radix-cache-backend") -> None:
    """Unsupported with the first that is wrong: (wrong, setting and value). flags: that name kvstrata."""
    problem = next((text for wrong, text in problems if wrong), None)
    if problem:
        raise Unsupported(f"{problem}; change it, take {flags} away, or start with KVSTRATA_DISABLE=1")


def never_served(runner: Any) -> tuple[tuple[bool, str], ...]:
    """What in SGLang's configuration is never served, whatever kvstrata does: (whether it is so, text)."""
    from sglang.srt.runtime_context import get_disagg, get_lora, get_parallel, get_spec
    parallel, model = get_parallel(), runner.model_config
    sizes = ("tp_size", "pp_size", "dp_size", "attn_cp_size", "dcp_size")
    return (*((getattr(parallel, name) > 1, f"{name} is {getattr(parallel, name)}; one process is served")
              for name in sizes),
            (get_spec().speculative_algorithm is not None,
             f"speculative_algorithm is {get_spec().speculative_algorithm}"),
            (bool(get_lora().enable_lora),
             "LoRA is on; adapters change keys, and pages go by the base model's weights"),
            (get_disagg().disaggregation_mode != "null", f"disaggregation_mode is {get_disagg().disaggregation_mode}"),
            (bool(model.is_multimodal), "the model takes more than text"),
            (bool(model.is_encoder_decoder), "the model has an encoder"),
            (not model.is_generation, "the model generates nothing"),
            (bool(runner.use_mla_backend), "its attention is MLA"),
            (runner.kv_cache_dtype != model.dtype, f"kv_cache_dtype is {runner.kv_cache_dtype}, the model's dtype "
             f"{model.dtype}; pages hold the model's"))


def attention_layers(model: torch.nn.Module) -> list[Any]:
    """SGLang's attention layers, in order. Unsupported: one that is more than causal attention over all tokens."""
    from sglang.srt.layers.radix_attention import RadixAttention
    layers = sorted((m for m in model.modules() if isinstance(m, RadixAttention)), key=lambda layer: layer.layer_id)
    if [layer.layer_id for layer in layers] != list(range(len(layers))):
        raise Unsupported(f"attention layers are numbered {[layer.layer_id for layer in layers]}, so some of the "
                          "model's are of another kind")
    for layer in layers:
        check_layer(layer)
    return layers


def check_layer(layer: Any) -> None:
    """Unsupported, with what the layer has."""
    plain = {"logit_cap": 0, "sliding_window_size": -1, "is_cross_attention": False, "pos_encoding_mode": "NONE",
             "use_irope": False, "k_scale": None, "v_scale": None, "xai_temperature_len": -1,
             "v_head_dim": layer.head_dim}
    for name, value in plain.items():
        if getattr(layer, name) != value:
            raise Unsupported(f"attention layer {layer.layer_id} has {name} {getattr(layer, name)}; served is {value}")
    if layer.attn_type.value != "decoder" or layer.head_dim not in HEAD_DIMS:
        raise Unsupported(f"attention layer {layer.layer_id} is {layer.attn_type.value} with head_dim "
                          f"{layer.head_dim}; served are decoders with {HEAD_DIMS}")


_runner: weakref.ref[Any] | None = None


def remember(runner: Any) -> None:
    """SGLang's ModelRunner of this process, whose model is loaded."""
    global _runner
    _runner = weakref.ref(runner)


def runner_here() -> Any:
    """None: there is none."""
    return None if _runner is None else _runner()


def loaded_model(runner: Any, digest: str | None) -> LoadedModel:
    """The model as SGLang holds it: fused, quantised, post-processed. digest: one that the user names, or None. Reads
    all tensors (docs/identity.md has the cost)."""
    from sglang.srt.runtime_context import get_model, get_parallel
    model, parallel = runner.model_config, get_parallel()
    settings = {"kv_cache_dtype": str(runner.kv_cache_dtype), "quantization": get_model().quantization,
                "tensor_parallel": [parallel.tp_rank, parallel.tp_size]}
    root = runner.model
    inner = [part for name in ("model", "lm_head") if isinstance(part := getattr(root, name, None), torch.nn.Module)]
    return LoadedModel(root, engine="sglang", config=model.hf_text_config, dtype=str(model.dtype), settings=settings,
                       given=digest, transparent=[root, *inner], trusted=("sglang",), harmless=_HARMLESS,
                       resum_every=_RESUM_EVERY)


def geometry_of(runner: Any, digest: str, needs: kvstrata.PlanNeeds | None = None) -> Geometry:
    """The geometry of SGLang's model. needs: the plan's; None: `full`. Reads the tokenizer for plans by sentences."""
    layers, model = attention_layers(runner.model), runner.model_config
    shapes = {(layer.tp_q_head_num, layer.tp_k_head_num, layer.head_dim, layer.scaling) for layer in layers}
    if len(shapes) != 1:
        raise Unsupported(f"(query heads, KV heads, head_dim, scale) differ by layer: {sorted(shapes)}")
    query_heads, kv_heads, head_dim, scale = shapes.pop()
    flags = kvstrata.Need(0) if needs is None else needs.flags
    if needs is not None and (missing := flags & _NEVER_MET):
        names = ", ".join(str(need.name) for need in missing)
        raise Unsupported(f"the plan needs {names} of the engine, which SGLang does not give:\n{needs.text}")
    return Geometry(model.hf_text_config.model_type, digest, len(layers), query_heads, kv_heads, head_dim,
                    float(scale), PAGE_DTYPES[model.dtype],
                    _boundary_tokens(runner) if kvstrata.Need.BOUNDARY in flags else [])


def _boundary_tokens(runner: Any) -> list[int]:
    from kvstrata.sentences import boundary_tokens
    from sglang.srt.runtime_context import get_server_args
    from transformers import AutoTokenizer
    path = get_server_args().tokenizer_path or runner.model_config.model_path
    return boundary_tokens(AutoTokenizer.from_pretrained(path))
