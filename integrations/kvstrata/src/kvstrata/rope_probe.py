# SPDX-License-Identifier: Apache-2.0
"""Whether a rotary embedding turns a token by its position alone, found by trying.

    reason = depends_on_length(lambda positions: rotary(x, positions[None])[0], limits=[4096])

Where the turn depends on how long the whole prompt is (RoPE types `dynamic` and `longrope` in transformers), a prefix's
keys are not a function of the prefix, and nobody else may find them. Needs torch. Threads: one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

_PREFIX = 64
_DENSE = 8192  # positions of a pass without gaps, for rotaries that go by how many there are


def depends_on_length(turn: Callable[[torch.Tensor], torch.Tensor], limits: Iterable[int], device: str | torch.device
                      = "cpu") -> str | None:
    """None: it does not; else what was seen.

    turn(positions [n]) gives [..., n, anything], or a state that stays: it is called with short prompts, and with longer
    ones that end at, behind and far behind each of `limits` (positions from which a rotary may go another way), and what
    the first 64 positions get is compared.
    """
    short = torch.arange(_PREFIX, device=device)
    want = turn(short).float()
    for end in sorted({bound for limit in limits for bound in (limit, limit + 1, 2 * limit)}):
        if end <= _PREFIX:
            continue
        gapped = torch.cat([short, torch.tensor([end - 1], device=device)])
        for positions in (gapped, torch.arange(min(end, _DENSE), device=device)):
            if not _close(want, turn(positions).float()[..., :_PREFIX, :]):
                return f"the first {_PREFIX} positions turn otherwise in a prompt of {end} tokens"
            if not _close(want, turn(short).float()):
                return f"the first {_PREFIX} positions turn otherwise after a prompt of {end} tokens"
    return None


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-3)
