# SPDX-License-Identifier: Apache-2.0
"""What the columns of a forward pass are: tokens or padding, at which positions, and which of them somebody wants.

transformers has one length for all rows of a batch, counted in columns. A token's index in its row is the number of
tokens before it there, whatever columns lie between. Everything here is in host memory, and pure. Threads: any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


class NotServed(ValueError):
    """A forward pass that pages cannot serve. generate() on a cache of its own then runs without them."""


@dataclass(frozen=True)
class Columns:
    """New columns of a batch. ids [batch][new]; real [batch][new]: tokens, not padding; odd [batch]: rows with a token
    whose position is not its index; last_wanted: of so many last columns results are wanted, None: of all."""

    ids: torch.Tensor
    real: torch.Tensor
    odd: torch.Tensor
    last_wanted: int | None

    def indices(self, before: torch.Tensor) -> torch.Tensor:
        """[batch][new]: of each token in its row; before [batch] tokens that came earlier."""
        return before[:, None] + self.real.cumsum(1) - 1


def new_columns(kwargs: Mapping[str, Any], known: torch.Tensor, last_wanted: int | None) -> Columns:
    """The columns of a pass with these arguments behind those known [batch][columns], which say where tokens are.

    NotServed: the arguments say what pages cannot; ValueError: they contradict the columns that are there.
    """
    ids = kwargs["input_ids"].cpu()
    real = _real(ids, kwargs.get("attention_mask"), known)
    columns = Columns(ids, real, torch.zeros(len(ids), dtype=torch.bool), last_wanted)
    positions = _positions(kwargs.get("position_ids"), ids, known.shape[1])
    odd = (positions != columns.indices(known.sum(1))) & real
    return Columns(ids, real, odd.any(1), last_wanted)


def _real(ids: torch.Tensor, mask: Any, known: torch.Tensor) -> torch.Tensor:
    """[batch][new] from a mask [batch][all columns so far], which has to agree with the columns known."""
    if mask is None:
        if not known.all():
            raise ValueError("attention_mask is None, and the cache has columns that were padding; pass the mask of all "
                             "columns, as the passes before did")
        return torch.ones_like(ids, dtype=torch.bool)
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise NotServed(f"attention_mask has shape {shape}; kvstrata takes [batch][columns] of 0 and 1")
    mask = mask.bool().cpu()
    past = known.shape[1]
    if mask.shape[1] != past + ids.shape[1]:
        raise ValueError(f"attention_mask has {mask.shape[1]} columns; the cache has {past} and {ids.shape[1]} are new: "
                         "pass the mask of all of them")
    if not torch.equal(mask[:, :past], known):
        raise ValueError("attention_mask says otherwise of columns that the cache has as tokens or padding; give the "
                         "conversation to a new cache")
    return mask[:, past:]


def _positions(given: Any, ids: torch.Tensor, past: int) -> torch.Tensor:
    """[1 or batch][new]; without the caller's the model counts columns. -1, which no token has: not known."""
    if given is None:
        return torch.arange(past, past + ids.shape[1])[None]
    if given.dim() != 2 or given.shape[-1] != ids.shape[1]:
        return torch.full((1, 1), -1)
    return given.cpu()


def has_hole(real: torch.Tensor) -> bool:
    """Whether one row [columns] has padding between its first and its last token."""
    tokens = real.nonzero()[:, 0]
    return len(tokens) > 0 and int(tokens[-1] - tokens[0]) >= len(tokens)


def wanted(kwargs: Mapping[str, Any], config: Any) -> int | None:
    """How many last columns' results are wanted by a call of the model that is not generate()'s; None: all."""
    if kwargs.get("labels") is not None or asked("output_hidden_states", kwargs, config):
        return None
    keep = kwargs.get("logits_to_keep")
    return keep if isinstance(keep, int) and keep > 0 else None


def asked(output: str, kwargs: Mapping[str, Any], config: Any) -> bool:
    """Whether `output` ("output_attentions") is asked for: by name, else by the configuration."""
    given = kwargs.get(output)
    return bool(getattr(config, output, False) if given is None else given)
