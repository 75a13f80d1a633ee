# SPDX-License-Identifier: Apache-2.0
"""The attention functions that an enabled model calls, and tensors in the order in which the binding takes them.

Keys that a cache of kvstrata's has marked are attended in pages. All others are attended as the model did before it was
enabled: there is a name for each way that it may have been.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

NAME, NAME_OVER_EAGER = "kvstrata", "kvstrata_eager"
NAMES = (NAME, NAME_OVER_EAGER)

Attention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


def name_over(plain: str) -> str:
    """The name of the attention whose plain way is `plain`. What is neither sdpa nor eager has sdpa's."""
    return NAME_OVER_EAGER if plain == "eager" else NAME


def tag(key: torch.Tensor, cache: Any) -> torch.Tensor:
    """Marks keys as those of a cache's open pass: transformers does not hand the cache to the attention function."""
    key.kvstrata_cache = cache  # type: ignore[attr-defined]
    return key


def _over(plain_of: Callable[[torch.nn.Module], Attention]) -> Attention:
    """query [batch][heads][new][dim]; gives [batch][new][heads][dim]. Keys of another cache: the plain attention."""
    @torch.compiler.disable
    def attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                  attention_mask: torch.Tensor | None, **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        cache = getattr(key, "kvstrata_cache", None)
        if cache is None:
            return plain_of(module)(module, query, key, value, attention_mask, **options)
        if torch.is_grad_enabled() and query.requires_grad:
            raise RuntimeError("attention over kvstrata's pages has no gradient; call the model under torch.no_grad()")
        return cache.attend(module.layer_idx, query), None

    return attention


def _eager_of(module: torch.nn.Module) -> Attention:
    """Each architecture has its own, beside its attention."""
    return sys.modules[type(module).__module__].eager_attention_forward


def register() -> None:
    """Names the attention functions to transformers; again is harmless. Masks serve what is not in pages."""
    AttentionInterface.register(NAME, _over(lambda module: sdpa_attention_forward))
    AttentionMaskInterface.register(NAME, sdpa_mask)
    AttentionInterface.register(NAME_OVER_EAGER, _over(_eager_of))
    AttentionMaskInterface.register(NAME_OVER_EAGER, eager_mask)


def tokens_first(x: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
    """[batch][heads][new][dim] as [tokens][heads][dim], row after row. real: which of batch * new are tokens of a step;
    None: all, and then a view where batch or new is 1."""
    flat = x.transpose(1, 2).flatten(0, 1)
    return flat if real is None else flat.index_select(0, real.to(x.device))
