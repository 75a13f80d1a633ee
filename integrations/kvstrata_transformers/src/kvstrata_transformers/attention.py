"""The attention function and mask that models with kvstrata enabled use; other caches than ours get sdpa."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "kvstrata"
# The attribute of a key tensor that says whose it is: attention functions are not given the cache.
CACHE = "kvstrata_cache"


def attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
              attention_mask: torch.Tensor | None, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """query [batch][heads][new][dim] -> [batch][new][heads][dim]."""
    cache = getattr(key, CACHE, None)
    if cache is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return cache.attend(module.layer_idx, query), None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
