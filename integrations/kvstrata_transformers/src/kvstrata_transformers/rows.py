# SPDX-License-Identifier: Apache-2.0
"""Rows of a batch as sequences of the daemon: opened for their prompts, reported on, forked.

A row is private where its keys and values are no function of its tokens: nobody finds it, and it finds nothing.
Threads: one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

import kvstrata

from .columns import Columns, has_hole
from .series import Head, surprisals

if TYPE_CHECKING:
    from .engine import Attachment

ODD_POSITIONS = ("position_ids are not 0, 1, 2, ... over each row's tokens; leave them out of generate(), or derive them "
                 "from attention_mask in a loop of your own")
HOLES = "attention_mask has holes; leave out of the prompt what it hides"


@dataclass
class Row:
    """A row of the batch. needs: its plan's; tokens: committed, held ones included; surprisal [prompt]: if the plan
    needs it; private: no other sequence finds it."""

    sequence: kvstrata.Sequence
    needs: kvstrata.Need
    prompt: list[int]
    tokens: int
    surprisal: npt.NDArray[np.float32] | None
    private: bool
    done: bool = False  # the prompt is complete, and the daemon knows

    def fork(self) -> Row:
        surprisal = None if self.surprisal is None else self.surprisal.copy()
        return replace(self, sequence=self.sequence.fork(), surprisal=surprisal)

    def advance(self, states: torch.Tensor, head: Head) -> None:
        """A pass has committed tokens; states [tokens][size] are their last ones."""
        self.tokens += len(states)
        if self.done:
            return
        if self.surprisal is not None:
            begin = self.tokens - len(states) + 1
            following = self.prompt[begin:self.tokens + 1]
            self.surprisal[begin:begin + len(following)] = surprisals(head, states[:len(following)], following)

    def complete(self) -> None:
        """The prompt is complete."""
        if self.surprisal is not None:
            begin = self.sequence.held + 1 if self.sequence.held else 0
            self.sequence.report(begin, surprisal=self.surprisal[begin:])
        self.sequence.prefill_done()
        self.done = True


@dataclass(frozen=True)
class Prompts:
    """What one generate()'s passes bring as prompts: ids and mask [batch][columns], None: not known, all tokens.
    last_wanted: as of Columns."""

    ids: torch.Tensor | None
    mask: torch.Tensor | None
    last_wanted: int | None

    def over(self, first: Columns) -> Columns:
        """The whole prompts if the first pass is of them, repeated by row; else what it brings."""
        if self.ids is None:
            return replace(first, last_wanted=self.last_wanted)
        mask = torch.ones_like(self.ids) if self.mask is None else self.mask
        repeats = max(1, len(first.ids) // len(self.ids))
        ids, real = (x.cpu().repeat_interleave(repeats, 0) for x in (self.ids, mask.bool()))
        n = min(first.ids.shape[1], ids.shape[1])
        pairs = ((ids, first.ids), (real, first.real))
        if not all(torch.equal(a[:, :n], b[:, :n]) for a, b in pairs):
            ids, real = first.ids, first.real
        return Columns(ids, real, first.odd, self.last_wanted)


def opened(attachment: Attachment, prompts: Columns, plans: list[tuple[str, kvstrata.Need]], windows: bool,
           warn: Callable[[str], None]) -> Iterator[Row]:
    """A row for each of the batch. plans: one for a row each. windows: the model has layers of transformers' own."""
    for ids, real, odd, (plan, needs) in zip(prompts.ids, prompts.real, prompts.odd.tolist(), plans):
        prompt = ids[real].tolist()
        why = attachment.private or (ODD_POSITIONS if odd else HOLES if has_hole(real) else None)
        if why is not None:
            warn(f"a sequence is kept to itself, and finds nothing that is held: {why}")
        # What is held for a layer of ours is not there for a layer of transformers' own.
        known = [] if windows else prompt
        only_reported = kvstrata.Need.SURPRISAL in needs
        sequence = attachment.open(plan, known, only_reported=only_reported, private=why is not None,
                                   max_held=_most_held(len(prompt), prompts.last_wanted))
        yield Row(sequence, needs, prompt, sequence.held,
                  np.zeros(len(prompt), np.float32) if only_reported else None, why is not None)


def _most_held(prompt: int, last_wanted: int | None) -> int:
    """max_held of an open: what is held has no results. 0: no limit, the daemon leaves the last token out anyway."""
    if last_wanted == 1:
        return 0
    return 1 if last_wanted is None else max(1, prompt - last_wanted)
