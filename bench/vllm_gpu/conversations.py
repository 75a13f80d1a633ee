# SPDX-License-Identifier: Apache-2.0
"""A trace of conversations: each has a system prompt that others share, a document of its own, and turns.

Turn by turn all conversations go on, so that between two turns of one lie the prompts of all others. A cache that is
smaller than all of them has forgotten it by then. For one of several engines turns come in an order drawn at random, so
that what is held grows with the memory. A turn's prompt is all that was said before, with the answers as they were
generated, and a question. The seed is fixed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

SEED = 20261128


@dataclass(frozen=True)
class Shape:
    """In tokens, but for counts. systems: how many system prompts the conversations share among them; engine: whose
    conversations they are, 0 where there is one; common: part of the documents that are those of all engines."""

    conversations: int = 48
    turns: int = 3
    systems: int = 4
    system: int = 1024
    document: int = 7000
    question: int = 160
    answer: int = 64
    at_once: int = 8
    engine: int = 0
    common: float = 0.0

    @property
    def longest(self) -> int:
        """Tokens of a conversation with its last answer."""
        return self.system + self.document + self.turns * (self.question + self.answer)


@dataclass
class Conversation:
    said: list[int] = field(default_factory=list)


class Trace:
    """next_prompt() and answered() in turns, until there is none."""

    def __init__(self, shape: Shape, words: int) -> None:
        self.shape, self._words = shape, words
        systems = [self._tokens(f"system {i}", shape.system) for i in range(shape.systems)]
        self._all = [Conversation([*systems[i % shape.systems], *self._document(i)]) for i in range(shape.conversations)]
        self._order = [*range(shape.conversations)] * shape.turns
        if shape.engine:
            random.Random(f"{SEED}/{shape.engine}/order").shuffle(self._order)
        self._next = 0
        self._open: dict[int, int] = {}  # by request: the conversation

    def _tokens(self, name: str, count: int) -> list[int]:
        draw = random.Random(f"{SEED}/{name}")
        return [draw.randrange(10, self._words) for _ in range(count)]

    def _document(self, number: int) -> list[int]:
        mine = number >= self.shape.common * self.shape.conversations
        return self._tokens(f"document {number}" + (f" of {self.shape.engine}" if mine else ""), self.shape.document)

    def next_prompt(self) -> tuple[int, list[int]] | None:
        """The number of a request and its prompt; None: the conversation whose turn it is has not been answered yet, or
        there is none."""
        if self._next == len(self._order) or (which := self._order[self._next]) in self._open.values():
            return None
        number, self._next = self._next, self._next + 1
        self._open[number] = which
        said = self._all[which].said
        said += self._tokens(f"question {number} of {self.shape.engine}", self.shape.question)
        return number, list(said)

    def answered(self, number: int, tokens: list[int]) -> None:
        self._all[self._open.pop(number)].said += tokens

    def is_first(self, number: int) -> bool:
        """Whether it is the first turn of its conversation."""
        return self._order[number] not in self._order[:number]

    @property
    def over(self) -> bool:
        return self._next == len(self._order) and not self._open
