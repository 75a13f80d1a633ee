# SPDX-License-Identifier: Apache-2.0
"""What adapters of torch engines share: which attention pages can serve, and a model as the daemon knows it.

Needs torch, which the rest of this package does not.
"""

from __future__ import annotations

import os
import pathlib
from dataclasses import dataclass

import torch

from .session import Model, Session
from .tensors import TORCH_NAMES, DType

HEAD_DIMS = (64, 128, 256)
PAGE_DTYPES = {getattr(torch, name): dtype for dtype, name in TORCH_NAMES.items()}


@dataclass
class Geometry:
    """What an adapter finds in its engine's attention layers. scale: of a query's products with keys."""

    name: str
    digest: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    scale: float
    dtype: DType
    boundary_tokens: list[int]

    def register(self, session: Session) -> Model:
        return session.register_model(self.name[:63], self.digest, layers=self.layers, query_heads=self.query_heads,
                                      kv_heads=self.kv_heads, head_dim=self.head_dim, dtype=self.dtype,
                                      boundary_tokens=self.boundary_tokens,
                                      scale=registered_scale(self.scale, self.head_dim))


def registered_scale(scale: float, head_dim: int) -> float:
    """0 where it is 1 / sqrt(head_dim) but for rounding, so that engines that round otherwise share a model."""
    return 0.0 if abs(scale * head_dim ** 0.5 - 1) < 1e-6 else scale


def folder_of(name: str, revision: str | None = None) -> pathlib.Path:
    """The folder of a model that is loaded; name: it, or one in the hub's cache. Asks no network."""
    if os.path.isdir(name):
        return pathlib.Path(name)
    from huggingface_hub import snapshot_download
    return pathlib.Path(snapshot_download(name, revision=revision, local_files_only=True))
