"""A row of a batch: its sequence, and the series that its plan needs of the model.

Surprisal of prompt tokens comes from the last hidden states through the head, LOGIT_ROWS positions at a time: the
head's matrix once for each prompt token, as training would compute it (for SmolLM2 a fifth of a prefill). Entropy of
generated tokens comes from the logits that generate() uses anyway. Neither is computed unless the plan needs it.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import numpy as np
import torch

import kvstrata
from kvstrata import Need

if TYPE_CHECKING:
    from .enable import Engine

LOGIT_ROWS = 256


class Row:
    def __init__(self, engine: Engine, plan: str, prompt: list[int], share: bool) -> None:
        self.engine, self.prompt = engine, prompt
        self.needs = engine.session.plan_needs(plan).flags
        self.ids: list[int] = []
        self.done = False
        self._next: float | None = None  # surprisal of the token behind the committed ones
        self.sequence = engine.session.open(engine.model, plan, prompt if share else (),
                                            only_reported=Need.SURPRISAL in self.needs)
        self.ids = prompt[:self.sequence.held]

    def keep(self, tokens: int) -> None:
        """Takes back what lies behind the first `tokens`."""
        if tokens >= len(self.ids):
            return
        self.sequence.truncate(tokens)
        del self.ids[tokens:]

    def extend(self, ids: list[int]) -> None:
        """Of the pass that begins."""
        del self.ids[self.sequence.tokens:]
        self.ids += ids

    def committed(self, hidden: torch.Tensor) -> None:
        """hidden [new][size]: of the tokens that the pass has committed."""
        if self.done:
            return
        end = self.sequence.tokens
        if Need.SURPRISAL in self.needs:
            self._report_surprisal(end - len(hidden), hidden)
        if end < len(self.prompt):
            return
        self.done = True
        if Need.PREFILL_DONE in self.needs:
            self.sequence.prefill_done()

    def report_entropy(self, logits: torch.Tensor) -> None:
        """logits [vocabulary] of the token that comes next: the entropy is of the last one's own step."""
        if not self.done or Need.ENTROPY not in self.needs or self.sequence.tokens <= len(self.prompt):
            return
        log_p = torch.log_softmax(logits.float(), -1)
        entropy = -(log_p.exp() * log_p).sum().clamp_min(0)
        self.sequence.report(self.sequence.tokens - 1, entropy=[float(entropy)])

    def continued_by(self, sequence: kvstrata.Sequence) -> Row:
        row = copy.copy(self)
        row.sequence, row.ids = sequence, list(self.ids)
        return row

    def _report_surprisal(self, first: int, hidden: torch.Tensor) -> None:
        """Of positions [first + 1, first + len(hidden)], which these states predict, as far as the prompt goes; they
        are reported once they are committed, so the last one waits for the next pass's."""
        values = [] if self._next is None else [self._next]
        begin = first + 1 - len(values)
        targets = torch.tensor(self.prompt[first + 1:first + 1 + len(hidden)])
        head = self.engine.module.get_output_embeddings()
        for at in range(0, len(targets), LOGIT_ROWS):
            part = targets[at:at + LOGIT_ROWS]
            logits = head(hidden[at:at + len(part)]).float()
            nll = torch.nn.functional.cross_entropy(logits, part, reduction="none")
            values += nll.clamp_min(0).tolist()
        end = self.sequence.tokens
        self._next = values.pop() if begin + len(values) > end else None
        if values:
            self.sequence.report(begin, surprisal=np.asarray(values, np.float32))
