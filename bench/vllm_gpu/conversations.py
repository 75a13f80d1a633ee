# SPDX-License-Identifier: Apache-2.0
"""A trace of conversations: each has a system prompt that others share, a document of its own, and turns.

Turn by turn all conversations go on, so that between two turns of one lie the prompts of all others. A cache that is
smaller than all of them has forgotten it by then. A turn's prompt is all that was said before, with the answers as they were
generated, and a question. The seed is fixed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

SEED = 20261128


@dataclass(frozen=True)
class Shape:
    """In tokens, but for counts. systems: how many system prompts the conversations share among them."""

    conversations: int = 48
    turns: int = 3
    systems: int = 4
    system: int = 1024
    document: int = 7000
    question: int = 160
    answer: int = 64
    at_once: int = 8


@dataclass
class Conversation:
    said: list[int] = field(default_factory=list)


class Trace:
    """next_prompt() and answered() in turns, until there is none."""

    def __init__(self, shape: Shape, words: int) -> None:
        self.shape = shape
        self._draw, self._words = random.Random(SEED), words
        systems = [self._tokens(shape.system) for _ in range(shape.systems)]
        self._all = [Conversation([*systems[i % shape.systems], *self._tokens(shape.document)])
                     for i in range(shape.conversations)]
        self._questions = [[self._tokens(shape.question) for _ in self._all] for _ in range(shape.turns)]
        self._next = 0
        self._open: set[int] = set()

    def _tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(10, self._words) for _ in range(count)]

    def next_prompt(self) -> tuple[int, list[int]] | None:
        """The number of a request and its prompt; None: the conversation whose turn it is has not been answered yet, or
        there is none."""
        turn, which = divmod(self._next, self.shape.conversations)
        if turn == self.shape.turns or which in self._open:
            return None
        self._open.add(which)
        self._next += 1
        conversation = self._all[which]
        conversation.said += self._questions[turn][which]
        return self._next - 1, list(conversation.said)

    def answered(self, number: int, tokens: list[int]) -> None:
        which = number % self.shape.conversations
        self._open.discard(which)
        self._all[which].said += tokens

    @property
    def over(self) -> bool:
        return self._next == self.shape.turns * self.shape.conversations and not self._open
