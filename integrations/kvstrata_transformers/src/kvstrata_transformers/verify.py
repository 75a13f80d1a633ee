# SPDX-License-Identifier: Apache-2.0
"""Hits verified live: of a share of them, pages that were found are computed anew and compared.

KVSTRATA_VERIFY=0.01 in the environment of enable() takes a hundredth of hits; what comes of it is told to the daemon. Of
such a prompt the first page, and one at random under plan `full`, are compared: the plain model runs over the prompt up to
the page's end, and its keys and values have to be the daemon's. (Under other plans later pages may hold a decoded answer,
whose keys are what the plan attended.) In fp32 they may differ by 1e-5 of the largest value of their layer. In 16 bits
they may differ by FACTOR times what two plain runs differ by, one of which takes the prompt in pieces of a page, and by
that many units in the last place.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import random
from dataclasses import dataclass, field
from typing import Any

import torch
from kvstrata.errors import error_of
from transformers.cache_utils import Cache

import kvstrata

from .rows import Row
from .served import Served

RELATIVE = 1e-5
FACTOR = 4.0

_log = logging.getLogger("kvstrata_transformers")
_TORCH = {kvstrata.DType.F32: torch.float32, kvstrata.DType.F16: torch.float16, kvstrata.DType.BF16: torch.bfloat16}


@dataclass
class Verifier:
    """share: of hits, 0 to 1. Draws from a generator of its own."""

    model: Any
    served: Served
    every_page: bool
    share: float
    _random: random.Random = field(default_factory=random.Random)

    @classmethod
    def from_environment(cls, model: Any, served: Served, plan: str) -> Verifier | None:
        """ValueError: KVSTRATA_VERIFY is no share."""
        text = os.environ.get("KVSTRATA_VERIFY") or "0"
        try:
            share = float(text)
        except ValueError:
            share = math.nan
        if not 0 <= share <= 1:
            raise ValueError(f"KVSTRATA_VERIFY is {text!r}; it is a share of hits, 0 to 1")
        return cls(model, served, plan == "full", share) if share else None

    def check(self, rows: list[Row]) -> None:
        """Checks some of the rows just opened. DataLoss HIT_MISMATCH: what is held is not what the model computes."""
        for row in rows:
            if row.sequence.held and self._random.random() < self.share:
                self._check(row)

    def _check(self, row: Row) -> None:
        entries, _ = row.sequence.page_table()
        tokens = row.sequence.model.page_tokens
        last = row.sequence.held // tokens - 1
        pages = sorted({0, self._random.randint(0, last)}) if self.every_page and last >= 0 else [0]
        wanted, spread = self._computed(row.prompt[:(pages[-1] + 1) * tokens], tokens)
        for page in pages:
            if entries[page].address:  # else a codec alone has it
                held = _page(entries[page], row.sequence.model, self.model.device)
                text = self._apart(held, wanted[..., page * tokens:(page + 1) * tokens, :], spread)
                row.sequence.report_verified(page * tokens, tokens, text is None)
                if text is not None:
                    raise _mismatch(f"page {page} of a held prompt is not what the model computes: {text}")

    def _computed(self, ids: list[int], page: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [layer][K|V][KV head][token][dim] of the plain model, and by how much they may differ
        [layer]."""
        prompt = torch.tensor([ids], device=self.model.device)
        whole = self._run([prompt])
        size = whole.abs().flatten(1).amax(1)
        if self.model.dtype == torch.float32:
            return whole, RELATIVE * size
        pieces = (whole - self._run(list(prompt.split(page, 1)))).abs().flatten(1).amax(1)
        return whole, FACTOR * (pieces + torch.finfo(self.model.dtype).eps * size)

    @torch.no_grad()
    def _run(self, pieces: list[torch.Tensor]) -> torch.Tensor:
        cache: Cache | None = None
        for ids in pieces:
            named = {} if cache is None else {name: cache}
            # Not by a call: hooks of the decoder itself may change what arrives, and such a pass is not served.
            output = self.model.base_model.forward(input_ids=ids, use_cache=True, **named)
            name, cache = next((name, value) for name, value in output.items() if isinstance(value, Cache))
        assert cache is not None
        layers = [cache.layers[layer] for layer in self.served.pages_of]
        return torch.stack([torch.stack([layer.keys[0], layer.values[0]]) for layer in layers]).float()

    def _apart(self, held: torch.Tensor, wanted: torch.Tensor, allowed: torch.Tensor) -> str | None:
        """By how much they differ where that is more than rounding [layer]; None: nowhere."""
        apart = (held.float().to(wanted.device) - wanted).abs().flatten(1).amax(1)
        if bool((apart <= allowed).all()):  # not so of NaN
            return None
        layer = int((apart / allowed).nan_to_num(math.inf).argmax())
        number = list(self.served.pages_of)[layer]
        return f"layer {number} differs by {apart[layer]:.3g}, and {allowed[layer]:.3g} is rounding"


def _mismatch(text: str) -> kvstrata.KvstrataError:
    _log.error("HIT_MISMATCH: %s", text)
    return error_of(15, "HIT_MISMATCH", f"{text}; whatever computes differently needs a digest of its own: enable(model, "
                    "digest=...), or disable(model)")


def _page(entry: kvstrata.PageTableEntry, model: kvstrata.Model, device: torch.device) -> torch.Tensor:
    """A copy [layer][K|V][KV head][slot][dim] of a page, wherever it lies."""
    shape = (model.layers, 2, model.kv_heads, model.page_tokens, model.head_dim)
    dtype = _TORCH[model.dtype]
    bytes_ = math.prod(shape) * dtype.itemsize
    if entry.tier == 0 and device.type == "cuda":
        memory = _OnGpu({"shape": (bytes_,), "typestr": "|u1", "data": (entry.address, True), "version": 3})
        raw = torch.as_tensor(memory, device=device).clone()
    else:
        raw = torch.frombuffer(bytearray(ctypes.string_at(entry.address, bytes_)), dtype=torch.uint8)
    return raw.view(dtype).view(shape)


@dataclass
class _OnGpu:
    """Memory of a GPU, as torch and numba take it."""

    __cuda_array_interface__: dict[str, Any]
