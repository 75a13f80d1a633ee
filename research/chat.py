# SPDX-License-Identifier: Apache-2.0
"""Chats of SmolLM2 in token ids: of RULER's prompts, of their reference answers, and of several questions about one
text.

The turns of a prompt's Llama-3 template, stripped (tasks.prompt_of), become ChatML, and what the assistant's turn begins
with follows the header. An answer is " " and its references, with ", " between two.
"""

from __future__ import annotations

import json
import lzma
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import Tokenizer

from tasks import prompt_of

START, END = "<|im_start|>", "<|im_end|>"


class Asked(NamedTuple):
    """A user's turn and what the assistant says: `begun` is given, `answer` is what a model is to say."""
    user: str
    begun: str
    answer: str


class Encoder:
    """Text to token ids and back, by a tokenizer.json. Immutable."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


class Chat(Encoder):
    """ChatML. Markers are placed by id; a text that spells one out would be taken for it, and the texts here do not."""

    def __init__(self, folder: pathlib.Path) -> None:
        """Errors: ValueError, the tokenizer has no ChatML markers."""
        super().__init__(folder)
        start, end = (self._tokenizer.token_to_id(marker) for marker in (START, END))
        if start is None or end is None:
            raise ValueError(f"{folder}: no {START} and {END} in the vocabulary")
        self.start, self.end, self._newline = start, end, self.encode("\n")

    def _turn(self, role: str, text: str) -> list[int]:
        return [self.start, *self.encode(f"{role}\n{text.strip()}"), self.end, *self._newline]

    def prompt(self, system: str, user: str, begun: str) -> list[int]:
        """Up to where the answer begins."""
        return [*self._turn("system", system), *self._turn("user", user), self.start, *self.encode("assistant\n"),
                *self.encode(begun.strip())]

    def conversation(self, system: str, turns: Sequence[Asked]) -> tuple[list[int], list[range]]:
        """Ids, and where each answer lies in them, the end marker included."""
        ids, answers = self._turn("system", system), []
        for user, begun, answer in turns:
            ids += [*self._turn("user", user), self.start, *self.encode("assistant\n"), *self.encode(begun.strip())]
            said = [*self.encode(" " + answer), self.end]
            answers.append(range(len(ids), len(ids) + len(said)))
            ids += [*said, *self._newline]
        return ids, answers

    def of_ruler(self, sample: dict) -> list[int]:
        """A prompt of RULER's files (or generated.py's). Errors: ValueError, not one question and the answer's
        begin."""
        prompt = prompt_of("", sample)
        if [role for role, _ in prompt.asked] != ["user"] or not (prompt.system and prompt.begun):
            raise ValueError(f"turns of {[role for role, _ in prompt.asked]}; wanted is one user's, behind a system's, and "
                             "what the assistant's begins with")
        return self.prompt(prompt.system, prompt.asked[0][1], prompt.begun)



def samples(path: pathlib.Path, count: int) -> list[dict]:
    """The first `count` of a .jsonl or .jsonl.xz."""
    opened = lzma.open if path.suffix == ".xz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for _, line in zip(range(count), file)]
