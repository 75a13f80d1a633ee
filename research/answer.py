# SPDX-License-Identifier: Apache-2.0
"""What a plan said behind a prompt, and what it read."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

COUNTED_STEPS = 4  # whose bytes are counted


@dataclass
class Answer:
    """Under a plan. nats: -ln p of each token of the reference; kl: of that token's distribution, nats from the first
    plan's to this one's; said: the greedy answer's tokens; rows, attend_bytes,
    select_bytes: read a step, all layers, the rows as positions a KV head and layer."""

    plan: str
    nats: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    right: bool = True
    said: list[int] = field(default_factory=list)
    status: str = ""
    rows: float = 0
    attend_bytes: float = 0
    select_bytes: float = 0

    @property
    def loss(self) -> float:
        return statistics.fmean(self.nats)
