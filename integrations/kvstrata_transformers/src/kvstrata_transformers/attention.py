# SPDX-License-Identifier: Apache-2.0
"""The attention function that an enabled model calls, and tensors in the order in which the binding takes them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "kvstrata"


def tag(key: torch.Tensor, cache: Any) -> torch.Tensor:
    """Marks keys as those of a cache's open pass: transformers does not hand the cache to the attention function."""
    key.kvstrata_cache = cache  # type: ignore[attr-defined]
    return key


def attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
              attention_mask: torch.Tensor | None, scaling: float | None = None, dropout: float = 0.0,
              **kwargs: Any) -> tuple[torch.Tensor, None]:
    """query [batch][heads][new][dim]; gives [batch][new][heads][dim]. Keys of another cache: sdpa, as without us."""
    cache = getattr(key, "kvstrata_cache", None)
    if cache is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout,
                                      **kwargs)
    if torch.is_grad_enabled() and query.requires_grad:
        raise RuntimeError("attention over kvstrata's pages has no gradient; call the model under torch.no_grad()")
    return cache.attend(module.layer_idx, query), None


def register() -> None:
    """Names `attention` to transformers; again is harmless. The mask serves layers and caches that are not ours."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def tokens_first(x: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
    """[batch][heads][new][dim] as [tokens][heads][dim], row after row. real: which of batch * new are tokens of a step;
    None: all, and then a view where batch or new is 1."""
    flat = x.transpose(1, 2).flatten(0, 1)
    return flat if real is None else flat.index_select(0, real.to(x.device))
