# SPDX-License-Identifier: Apache-2.0
"""The model as the daemon knows it, and what is refused before vLLM serves anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from kvstrata import torch_model
from kvstrata.torch_identity import Identity
from kvstrata.torch_model import HEAD_DIMS, PAGE_DTYPES
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

import kvstrata

_NEVER_MET = kvstrata.Need.SURPRISAL | kvstrata.Need.ENTROPY


class Unsupported(ValueError):
    """vLLM was asked for something that kvstrata does not serve; it does not start."""


@dataclass
class Options:
    """Of kv_connector_extra_config. socket None: KVSTRATA_SOCKET, else the default; digest None: the identity of
    the model as it is loaded."""

    plan: str = "full"
    socket: str | None = None
    digest: str | None = None

    @staticmethod
    def of(config: Any) -> Options:
        given, known = dict(config.kv_transfer_config.kv_connector_extra_config), {"plan", "socket", "digest"}
        if unknown := sorted(given.keys() - known):
            raise Unsupported(f"kv_connector_extra_config has {unknown}; known are {sorted(known)}")
        return Options(**given)


@dataclass
class Geometry(torch_model.Geometry, KVConnectorHandshakeMetadata):
    """What a worker found in its layers, for the scheduler to register the same model. private: Identity's."""

    private: str | None = None

    @property
    def identity(self) -> Identity:
        return Identity(self.digest, self.private)


def refuse_other_connectors(config: Any) -> None:
    """Of --attention-backend CUSTOM. Unsupported: --kv-transfer-config names another connector than owned mode's."""
    name = config.kv_transfer_config.kv_connector
    if name != "KvstrataOwnedConnector":
        raise Unsupported("--attention-backend is CUSTOM, which decodes from the daemon's pages, and "
                          f"--kv-transfer-config names {name}: name KvstrataOwnedConnector to decode from pages, or take "
                          "--attention-backend away to have kvstratad below vLLM's own cache")


def refuse(config: Any) -> None:
    """Of owned mode. Unsupported, with the setting and its value."""
    transfer = config.kv_transfer_config
    _refuse(((config.attention_config.backend is None or config.attention_config.backend.name != "CUSTOM",
              "--attention-backend is not CUSTOM, so keys and values would be vLLM's own: pass it, or name "
              "KvstrataConnector, which serves those"),
             *_never_served(config),
             (config.device_config.device_type == "cuda" and config.model_config.dtype is torch.float32,
              "the model is fp32 on a GPU, where pages are 16-bit; pass --dtype float16 or bfloat16"),
             (config.scheduler_config.async_scheduling, "async scheduling is on; pass --no-async-scheduling"),
             (transfer.kv_load_failure_policy != "fail",
              f"kv_load_failure_policy is {transfer.kv_load_failure_policy!r}; what a daemon that died had is computed "
              "anew without end: \"fail\"")), "--attention-backend CUSTOM and --kv-transfer-config")


def _never_served(config: Any) -> tuple[tuple[bool, str], ...]:
    model, parallel = config.model_config, config.parallel_config
    return ((parallel.world_size > 1, f"world_size is {parallel.world_size}; one worker is served"),
            (parallel.data_parallel_size > 1, f"data_parallel_size is {parallel.data_parallel_size}"),
            (config.speculative_config is not None, "speculative decoding is on"),
            (config.lora_config is not None,
             "LoRA is on; adapters change keys, and pages go by the base model's weights"),
            (model.is_multimodal_model, "the model takes more than text"),
            (model.enable_prompt_embeds, "prompt embeds are on; kvstrata finds prompts by their ids"),
            (model.use_mla, "its attention is MLA"),
            (config.cache_config.cache_dtype not in ("auto", "float16", "bfloat16"),
             f"--kv-cache-dtype is {config.cache_config.cache_dtype}"))


def _refuse(problems: tuple[tuple[bool, str], ...], flags: str) -> None:
    problem = next((text for wrong, text in problems if wrong), None)
    if problem:
        raise Unsupported(f"{problem}; change it, take {flags} away, or start with KVSTRATA_DISABLE=1")


def geometry_of(config: Any, layers: list[Any], identity: Identity, needs: kvstrata.PlanNeeds | None = None
                ) -> Geometry:
    """Of vLLM's attention layers. needs: of the plan; None: it is `full`. Reads the tokenizer if the plan goes by
    sentences."""
    shapes = {(layer.impl.num_heads, layer.impl.num_kv_heads, layer.impl.head_size, layer.impl.scale)
              for layer in layers}
    if len(shapes) != 1:
        raise Unsupported(f"(query heads, KV heads, head_dim, scale) differ by layer: {sorted(shapes)}")
    query_heads, kv_heads, head_dim, scale = shapes.pop()
    flags = kvstrata.Need(0) if needs is None else needs.flags
    if needs is not None and (missing := flags & _NEVER_MET):
        names = ", ".join(str(need.name) for need in missing)
        raise Unsupported(f"the plan needs {names} of the engine, which vLLM does not give:\n{needs.text}")
    model = config.model_config
    return Geometry(model.hf_text_config.model_type, identity.digest, len(layers), query_heads, kv_heads, head_dim,
                    scale, PAGE_DTYPES[model.dtype],
                    _boundary_tokens(model) if kvstrata.Need.BOUNDARY in flags else [], identity.private)


def _boundary_tokens(model: Any) -> list[int]:
    from kvstrata.sentences import boundary_tokens
    from transformers import AutoTokenizer
    return boundary_tokens(AutoTokenizer.from_pretrained(model.tokenizer, revision=model.tokenizer_revision))
