# SPDX-License-Identifier: Apache-2.0
"""What a plan loses in steps over vLLM's own blocks, measured on a few of them while the engine runs.

Once a second a sequence that the plan chooses for is sampled. Its step keeps the queries, which costs a replay nothing;
behind the step some layers attend with them once more, by the plan and in full. Nothing waits for the GPU: what has come
of it is taken in a later step. Threads: the worker's.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence

import torch
from kvstrata.block_attention import BlockAttention, BlockShape
from kvstrata.chunks import LayerRecall
from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.attention.backend import CommonAttentionMetadata

_log = logging.getLogger("vllm.kvstrata")

EVERY_SECONDS, LOG_SECONDS = 1.0, 60.0
_TOKENS_AT_ONCE = 1 << 18  # that all layers of a sample read: some tenths of a millisecond


class BlockAudit:
    """attention: bound, of layers that the model numbers so."""

    def __init__(self, attention: BlockAttention, plan: str, shape: BlockShape, numbers: Sequence[int]) -> None:
        self._attention, self._plan, self._numbers = attention, plan, numbers
        heads, layers = shape.query_heads, len(numbers)
        self._rows = torch.empty(layers, 2, heads, shape.head_dim, pin_memory=PIN_MEMORY)
        self._lse = torch.empty(layers, 2, heads, pin_memory=PIN_MEMORY)
        self._due, self._log_due = time.monotonic(), time.monotonic() + LOG_SECONDS
        self._sampled = 0  # tokens of the sequence that the last step sampled; 0: none
        self._next = random.randrange(layers)
        self._measured: tuple[list[int], torch.cuda.Event] | None = None  # places of layers, and when they are there
        self._untold: dict[int, LayerRecall] = {}
        self._unsaid: dict[int, LayerRecall] = {}

    def sample(self, common: CommonAttentionMetadata, decodes: int) -> int | None:
        """Which of the rows in front the step that begins is to keep the queries of."""
        upper, prompts = common.seq_lens_cpu_upper_bound, common.is_prefilling
        self._sampled = 0
        if self._measured is not None or upper is None or time.monotonic() < self._due:
            return None
        rows = [row for row in range(min(decodes, len(upper))) if int(upper[row]) > self._attention.min_tokens
                and not (prompts is not None and row < len(prompts) and bool(prompts[row]))]
        if not rows:
            return None
        self._due = time.monotonic() + EVERY_SECONDS
        row = random.choice(rows)
        self._sampled = int(upper[row])
        return row

    def measure(self, stream: torch.cuda.Stream) -> None:
        """Behind a step, on its stream: takes what has come, and measures if the step was sampled."""
        self._take()
        if not self._sampled:
            return
        layers = len(self._numbers)
        count = max(1, min(layers, _TOKENS_AT_ONCE // self._sampled))
        places = [(self._next + i) % layers for i in range(count)]
        self._next, self._sampled = (self._next + count) % layers, 0
        for place in places:
            self._attention.audit(place, self._rows[place].data_ptr(), self._lse[place].data_ptr(), stream.cuda_stream)
        there = torch.cuda.Event()
        there.record(stream)
        self._measured = places, there

    def losses(self) -> list[LayerRecall]:
        """Since the last call."""
        untold, self._untold = self._untold, {}
        return list(untold.values())

    def _take(self) -> None:
        if self._measured is None or not self._measured[1].query():
            return
        places, self._measured = self._measured[0], None
        for place in places:
            found = loss_of(self._numbers[place], self._rows[place], self._lse[place])
            if found is not None:
                add(self._untold, found)
                add(self._unsaid, found)
        if self._unsaid and time.monotonic() >= self._log_due:
            self._log_due, said, self._unsaid = time.monotonic() + LOG_SECONDS, self._unsaid, {}
            _log.info("plan %s: %s", self._plan, in_words(list(said.values())))


def loss_of(number: int, rows: torch.Tensor, lse: torch.Tensor) -> LayerRecall | None:
    """What is lost in one layer. rows [2][heads][head_dim], lse [2][heads]: the plan's, then full attention's. None: some of it is not
    finite."""
    recall = torch.exp(lse[0] - lse[1]).clamp(max=1.0)
    error = (rows[0] - rows[1]).norm(dim=1) / rows[1].norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
    if not bool(torch.isfinite(recall).all() and torch.isfinite(error).all()):
        return None
    return LayerRecall(number, len(recall), float(recall.mean()), float(recall.min()), float(error.mean()))


def add(losses: dict[int, LayerRecall], found: LayerRecall) -> None:
    """To what is known of its layer."""
    had = losses.get(found.layer)
    if had is None:
        losses[found.layer] = found
        return
    samples = had.samples + found.samples
    share = found.samples / samples
    losses[found.layer] = LayerRecall(found.layer, samples, had.recall + share * (found.recall - had.recall),
                                      min(had.least, found.least), had.error + share * (found.error - had.error))


def in_words(losses: Sequence[LayerRecall]) -> str:
    samples = sum(loss.samples for loss in losses)
    recall = sum(loss.samples * loss.recall for loss in losses) / samples
    error = sum(loss.samples * loss.error for loss in losses) / samples
    worst = min(losses, key=lambda loss: loss.recall)
    return (f"it attended {recall:.4f} of full attention's mass ({worst.recall:.4f} in layer {worst.layer}, of a head at "
            f"least {min(loss.least for loss in losses):.4f}), outputs were off by {error:.4f}; measured on {samples} heads "
            f"of {len(losses)} layers")
