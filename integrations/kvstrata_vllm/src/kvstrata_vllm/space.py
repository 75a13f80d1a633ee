# SPDX-License-Identifier: Apache-2.0
"""Which engines share chunks: those of one space, whose name is a sum of all that a chunk's bytes go by.

That is the model's identity and the epoch (kvstrata/epoch.py), how vLLM names blocks, and how it lays them out.
Whatever is in doubt is part of the name: two engines that differ in it only share nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

from kvstrata.identity import canonical_json, digest_of
from kvstrata.torch_identity import Identity

RULE = "kvstrata chunks 1"
# Fields of vLLM's specs of caches that a rank has a part of.
_DIVIDED = ("num_kv_heads", "num_head_slots", "state_content_bytes", "page_size_padded")


def combined(identities: Mapping[int, Identity]) -> Identity:
    """The identity of all ranks, which are one model's parts. A digest that a user names is every rank's."""
    digests = [identities[rank].digest for rank in sorted(identities)]
    private = next((of.private for of in identities.values() if of.private is not None), None)
    return Identity(digests[0] if len({*digests}) == 1 else digest_of({"ranks": digests}), private)


def space_of(epoch: str, layout: Mapping[str, Any]) -> bytes:
    """32 bytes. epoch: Epoch.digest; layout: of layout_of, and what workers say of theirs."""
    return hashlib.sha256(canonical_json({"rule": RULE, "epoch": epoch, **layout}).encode()).digest()


def layout_of(config: Any, kv_cache_config: Any, offloading: Any, row_bytes: int) -> dict[str, Any]:
    """config: vLLM's; offloading: what it makes of that for a spec. Where ranks write what does not depend on their
    number (canonical layout), that number is left out."""
    from vllm import __version__
    from vllm.v1.core.kv_cache_utils import get_none_hash_seed
    parallel, cache = offloading.parallel, offloading.cache
    shared = offloading.canonical_layout and parallel.is_parallelism_agnostic
    draft = config.speculative_config
    return {"vllm": __version__, "hash": [config.cache_config.prefix_caching_hash_algo, get_none_hash_seed()],
            "tokens_per_hash": cache.tokens_per_hash, "blocks_per_chunk": cache.blocks_per_chunk, "row": row_bytes,
            "dtype": offloading.model.dtype, "layout": offloading.kv_cache_layout,
            "canonical": offloading.canonical_layout, "replicated": offloading.replicated_layout,
            "groups": [[group.group_id, group.tokens_per_block, sorted(group.layer_names),
                        _spec(kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec, shared)]
                       for group in offloading.groups],
            "ranks": None if shared else [parallel.world_size, parallel.tp_size, parallel.pp_size, parallel.pcp_size,
                                          parallel.dcp_size],
            "draft": None if draft is None else [str(draft.method), str(draft.model), draft.num_speculative_tokens]}


def _spec(spec: Any, shared: bool) -> str:
    """vLLM's, of a group's layers."""
    fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    return f"{type(spec).__name__} " + " ".join(f"{name}={value}" for name, value in sorted(fields.items())
                                                if not (shared and name in _DIVIDED))


def backends_of(config: Any, layers: list[str]) -> list[str]:
    """How a worker's layers lay out their blocks, as far as that does not show in their specs."""
    named = config.compilation_config.static_forward_context
    return sorted({_backend(named[name]) for name in layers if name in named})


def _backend(layer: Any) -> str:
    attends = type(getattr(layer, "impl", layer)).__qualname__
    return f"{attends} {getattr(layer, 'isa', '')}".strip()
