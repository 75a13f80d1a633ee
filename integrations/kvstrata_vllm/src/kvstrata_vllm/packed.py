# SPDX-License-Identifier: Apache-2.0
"""Weights that vLLM packs into objects of oneDNN on a CPU, whose bytes nobody can read there.

The layer's own weight is empty afterwards. So the sum of what is packed is taken when it is packed, and the object that
vLLM keeps in its place says it: an identity is made of that (loaded.py). Cost: a pass over the weights (tree_hash), in
engines that use kvstrata alone. Threads: the engine's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Packed:
    """In place of vLLM's CPUDNNLGEMMHandler, for those who multiply by it; to an identity it is its shape and sum."""

    __slots__ = ("handler", "handler_tensor", "k", "n", "sum")

    def __init__(self, handler: Any, weight_sum: str) -> None:
        self.handler = handler  # frees the object of oneDNN when it is collected
        self.handler_tensor, self.n, self.k = handler.handler_tensor, handler.n, handler.k
        self.sum = weight_sum

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return Packed, (self.n, self.k, self.sum)


def sum_what_is_packed() -> None:
    """From now on, in this process; again is harmless."""
    from vllm import _custom_ops as ops
    for name in ("create_onednn_mm", "create_onednn_scaled_mm"):
        if not hasattr(create := getattr(ops, name, None), "packs_for") and create is not None:
            setattr(ops, name, _summing(create))


def _summing(create: Callable[..., Any]) -> Callable[..., Packed]:
    def made(weight: torch.Tensor, *others: Any, **more: Any) -> Packed:
        given = [weight, *(x for x in (*others, *more.values()) if isinstance(x, torch.Tensor))]
        return Packed(create(weight, *others, **more), _sum_of(given))

    made.packs_for = create  # type: ignore[attr-defined]
    return made


def _sum_of(tensors: list[torch.Tensor]) -> str:
    """weights come transposed: their memory is that of the transposed."""
    from kvstrata.torch_tree_hash import tensor_sums
    return " ".join(value.hex() for value in tensor_sums(x.t() if x.dim() == 2 else x for x in tensors))
