"""torch tensors as the binding takes them."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch


def as_array(x: torch.Tensor) -> npt.NDArray[Any]:
    """A view of a CPU tensor; bf16 as bit patterns."""
    x = x.detach()
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()
