#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""RULER's tasks generated at any length by its rules, from a seed, with no download.

    research/generated.py TASK LENGTH [--seed N] [--samples N] [--tokenizer FOLDER] [--essay FILE]

prints JSON lines of the form of RULER's files: `index`, `input` (a chat in Llama-3's template, with what the
assistant's turn begins with), `outputs` (reference strings), `length` (tokens of `input`). As there, an answer scores
the share of `outputs` that it contains.

Two things differ from RULER. Words are made by rule (words.py), and so is the essay, unless a text is given.
`outputs` of niah_multivalue are in the order of the text (RULER's are in that of drawing), which is the one that a
model can know.

Everything that a sample has follows from (task, seed, length, count, essay), on every machine.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import re
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import words  # noqa: E402

T = TypeVar("T")
Count = Callable[[str], int]  # tokens of a text

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DEPTHS = [round(i * 100 / 39) for i in range(40)]  # percent of the text; where RULER's needles lie
HELPFUL = "You are a helpful assistant"
ESSAY_SENTENCES = 4096  # made ones, about 60,000 tokens; then they come again


class Question(NamedTuple):
    """`begun`: what the assistant's turn begins with; `outputs`: what an answer has to contain."""
    text: str
    begun: str
    outputs: tuple[str, ...]


class Drawn(NamedTuple):
    """A context and what may be asked about it. `context`: the user's turn up to the question."""
    system: str
    context: str
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Needles:
    """What a needle-in-a-haystack task draws. RULER's have one question; `asked` more are for training, where each is
    another turn about the same context."""
    haystack: str  # noise | essay | needles
    key: str = "word"  # or uuid
    value: str = "number"  # with 7 digits; or uuid
    keys: int = 1
    values: int = 1  # for each key
    queries: int = 1  # keys in a question
    asked: int = 1

    @property
    def many(self) -> bool:
        return self.values * self.queries > 1


NIAH = {"niah_single_1": Needles("noise"), "niah_single_2": Needles("essay"),
        "niah_single_3": Needles("essay", value="uuid"),
        "niah_multikey_1": Needles("essay", keys=4), "niah_multikey_2": Needles("needles"),
        "niah_multikey_3": Needles("needles", key="uuid", value="uuid"), "niah_multivalue": Needles("essay", values=4),
        "niah_multiquery": Needles("essay", keys=4, queries=4)}


def sentences_of(text: str) -> list[str]:
    """An essay's units."""
    return [s for s in re.split(r"(?<=[.!?])\s+", text.strip()) if s]


def _drawn(kind: str, draw: random.Random) -> str:
    if kind == "uuid":
        return str(uuid.UUID(int=draw.getrandbits(128), version=4))
    return words.key(draw) if kind == "word" else str(draw.randrange(1_000_000, 10_000_000))


def _distinct(kind: str, count: int, draw: random.Random, taken: set[str]) -> list[str]:
    """None of them is in `taken`, which has them afterwards."""
    found: list[str] = []
    while len(found) < count:
        one = _drawn(kind, draw)
        if one not in taken:
            taken.add(one)
            found.append(one)
    return found


def _listed(keys: Sequence[str]) -> str:
    return keys[0] if len(keys) == 1 else ", ".join(keys[:-1]) + ", and " + keys[-1]


def needle_question(value: str, keys: Sequence[str], outputs: Sequence[str]) -> Question:
    """RULER's words, which differ where one string or several are asked for."""
    names = _listed(keys)
    if len(outputs) == 1:
        return Question(f"What is the special magic {value} for {names} mentioned in the provided text?",
                        f" The special magic {value} for {names} mentioned in the provided text is", tuple(outputs))
    return Question(f"What are all the special magic {value}s for {names} mentioned in the provided text?",
                    f" The special magic {value}s for {names} mentioned in the provided text are", tuple(outputs))


def _hidden(essay: Sequence[str], units: int, needles: Sequence[str], draw: random.Random) -> str:
    """Needles between an essay's sentences, at depths of which each is taken once."""
    text = [essay[i % len(essay)] for i in range(units)]
    places = sorted(len(text) * depth // 100 for depth in draw.sample(DEPTHS, len(needles)))
    parts: list[str] = []
    for begin, end, needle in zip([0, *places], places, needles):
        parts += [" ".join(text[begin:end]), needle]
    return " ".join([*parts, " ".join(text[places[-1]:])])


def niah(recipe: Needles, units: int, draw: random.Random, essay: Sequence[str]) -> Drawn:
    """Errors: ValueError, more needles than depths in an essay."""
    taken: set[str] = set()
    keys = _distinct(recipe.key, recipe.keys, draw, taken)
    pairs = [(key, value) for key in keys for value in _distinct(recipe.value, recipe.values, draw, taken)]
    draw.shuffle(pairs)
    if recipe.haystack == "needles":
        others = list(zip(_distinct(recipe.key, units, draw, taken), _distinct(recipe.value, units, draw, taken)))
        own = set(draw.sample(range(units + len(pairs)), len(pairs)))
        order = [iter(others), iter(pairs)]
        pairs = [next(order[i in own]) for i in range(units + len(pairs))]
        if recipe.asked > len(keys):
            keys = keys + draw.sample([key for key, _ in others], min(len(others), recipe.asked - len(keys)))
    needles = [f"One of the special magic {recipe.value}s for {key} is: {value}." for key, value in pairs]
    if recipe.haystack == "essay":
        if len(needles) > len(DEPTHS):
            raise ValueError(f"{len(needles)} needles in an essay; it has {len(DEPTHS)} places")
        text = _hidden(essay, units, needles, draw)
    else:
        lines = units if recipe.haystack == "noise" else 0
        own = set(draw.sample(range(lines + len(needles)), len(needles)))
        each = iter(needles)
        text = "\n".join(next(each) if i in own else NOISE for i in range(lines + len(needles)))
    values_of: dict[str, list[str]] = {}
    for key, value in pairs:
        values_of.setdefault(key, []).append(value)
    groups = [draw.sample(keys, recipe.queries) if recipe.queries < len(keys) else keys[:recipe.queries]]
    left = [key for key in keys if key not in groups[0]]
    groups += [[key] for key in left[:recipe.asked - 1]]
    questions = tuple(needle_question(recipe.value, group, [v for key in group for v in values_of[key]])
                      for group in groups)
    what = f"Some special magic {recipe.value}s are" if recipe.many else f"A special magic {recipe.value} is"
    ending = f"{recipe.value}s" if recipe.many else recipe.value
    begin = (f"{what} hidden within the following text. Make sure to memorize it. I will quiz you about the {ending} "
             "afterwards.\n")
    return Drawn(HELPFUL if recipe.many else HELPFUL.replace("are", "is"), begin + text + "\n", questions)


VT = "Memorize and track the chain(s) of variable assignment hidden in the following text."


def _chains(draw: random.Random, chains: int, hops: int, letters: int) -> list[tuple[str, list[str]]]:
    """(value, names) of each; names are upper-case letters."""
    names: dict[str, None] = {}
    while len(names) < chains * (hops + 1):
        names["".join(draw.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=letters))] = None
    each = iter(names)
    values = draw.sample(range(10_000, 100_000), chains)
    return [(str(value), [next(each) for _ in range(hops + 1)]) for value in values]


def _scattered(chains: list[tuple[str, list[str]]], units: int, draw: random.Random) -> str:
    """Assignments among `units` lines of noise; those of one chain in its order."""
    before: list[list[str]] = [[] for _ in range(units)]
    for value, names in chains:
        said = [f"VAR {names[0]} = {value}", *(f"VAR {b} = VAR {a} " for a, b in zip(names, names[1:]))]
        for place, text in zip(sorted(draw.sample(range(units), len(said))), said):
            before[place].append(text)
    return " ".join(part for parts in before for part in (*parts, NOISE + "\n"))


def vt(units: int, draw: random.Random, chains: int = 1, hops: int = 4) -> Drawn:
    """Variable tracking, with RULER's solved example of 10 lines before it. One question a chain."""
    units = max(units, hops + 1)
    shown = _chains(draw, 1, hops, 3)
    example = _scattered(shown, 2 * (hops + 1), draw)
    found = _chains(draw, chains, hops, 5)
    text = _scattered(found, units, draw)

    def begun(value: str) -> str:
        return ("Answer: According to the chain(s) of variable assignment in the text above, "
                f"{hops + 1} variables are assgined the value {value}, they are: ")  # RULER's spelling

    value, names = shown[0]
    solved = (f"Question: Find all variables that are assigned the value {value} in the text {begun(value)} "
              f"{' '.join(names)}")
    return Drawn(HELPFUL, f" {VT} {example} {solved}\n\n\n\n{VT}\n\n{text}\n", tuple(
        Question(f"Question: Find all variables that are assigned the value {value} in the text above.",
                 " " + begun(value), tuple(names)) for value, names in found))


def _listing(common: Sequence[str], times: int, rare: Sequence[str], rare_times: int, draw: random.Random) -> str:
    text = [word for word in common for _ in range(times)] + [word for word in rare for _ in range(rare_times)]
    draw.shuffle(text)
    return " ".join(f"{i}. {word}" for i, word in enumerate(text, 1))


def cwe(units: int, draw: random.Random, common: int = 10) -> Drawn:
    """The `common` words that are listed 30 times, among `units` that are there 3 times; after a small solved
    example."""
    pool: dict[str, None] = {}
    while len(pool) < 2 * common + 20 + units:
        pool[draw.choice((*words.ADJECTIVES, *words.NOUNS)) if len(pool) < 400 else words.made_word(draw)] = None
    order = list(pool)
    shown, own, few, rare = (order[:common], order[common:2 * common], order[2 * common:2 * common + 20],
                             order[2 * common + 20:])
    begin = ("Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones "
             "that appear most often.\n")
    ask = f"Question: What are the {common} most common words in the above list?"
    answer = f" Answer: The top {common} words that appear most often in the list are:"
    solved = " ".join(f"{i}. {word}" for i, word in enumerate(shown, 1))
    example = f"{begin}{_listing(shown, 3, few, 1, draw)}\n{ask}{answer} {solved}\n"
    return Drawn(HELPFUL, f"{example}{begin}{_listing(own, 30, rare, 3, draw)}\n", (Question(ask, answer, tuple(own)),))


def fwe(units: int, draw: random.Random, alpha: float = 2.0) -> Drawn:
    """Coded words of 6 letters, the k-th as often as k^-alpha says; the first is written as dots."""
    coded: dict[str, None] = {"...": None}
    while len(coded) < 2000:
        coded["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=6))] = None
    total = sum(k ** -alpha for k in range(1, 100_000))
    text = [word for k, word in enumerate(coded, 1) for _ in range(int(units * k ** -alpha / total))]
    draw.shuffle(text)
    return Drawn(HELPFUL, "Read the following coded text and track the frequency of each coded word. Find the three "
                 f"most frequently appeared coded words. {' '.join(text)}\n", (Question(
                     "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three most "
                     "frequently appeared words in the above coded text?",
                     " Answer: According to the coded text above, the three most frequently appeared words are:",
                     tuple(list(coded)[1:4])),))


TASKS = (*NIAH, "vt", "cwe", "fwe")


def drawn(task: str, units: int, draw: random.Random, essay: Sequence[str], asked: int = 1) -> Drawn:
    """RULER's task with `units` of its haystack; `asked` matters where a needle haystack has more to ask. Errors:
    KeyError, no such task."""
    others = {"vt": vt, "cwe": cwe, "fwe": fwe}
    if task in others:
        return others[task](units, draw)
    return niah(replace(NIAH[task], asked=asked), units, draw, essay)


def fitted(make: Callable[[int], T], size: Callable[[T], int], length: int, least: int = 8, slack: int = 0) -> T:
    """make(units) for the most units with which it is at most `length` long; with slack, for some with which it is at
    most that much shorter. `size` must grow with units. Errors: ValueError, `least` units are too long."""
    low, best = least, make(least)
    begin = size(best)
    if begin > length:
        raise ValueError(f"{least} units have {begin} tokens; at most {length} are asked for")
    a_unit = max(1e-3, (size(make(least + 56)) - begin) / 56)
    guess, high = low + int((length - slack / 2 - begin) / a_unit), 0  # high: too long, or not known
    while high == 0 or high - low > 1:
        at = guess if guess > low and (high == 0 or guess < high) else (low + high) // 2 if high else 2 * low
        made = make(at)
        tokens = size(made)
        if tokens > length:
            high = at
        else:
            low, best = at, made
            if length - tokens <= slack and slack:
                break
        guess = at + int((length - tokens) / a_unit)  # nearly linear: two or three guesses, then halves
        if high and not low < guess < high:
            guess = (low + high) // 2
    return best


def made_essay(seed: int | str) -> list[str]:
    """Sentences by grammar."""
    return words.sentences(random.Random(f"essay/{seed}"), ESSAY_SENTENCES)


def prompt_text(one: Drawn, question: Question) -> str:
    """In Llama-3's template, as RULER's files have it: no line breaks behind its headers."""
    return (f"<|begin_of_text|><|start_header_id|>system<|end_header_id|>{one.system}<|eot_id|>"
            f"<|start_header_id|>user<|end_header_id|>{one.context}{question.text}<|eot_id|>"
            f"<|start_header_id|>assistant<|end_header_id|>{question.begun}")


def sample(task: str, seed: int | str, length: int, count: Count, essay: Sequence[str] | None = None, slack: int = 0
           ) -> dict:
    """The task at `length` tokens at most, with one question; `essay`: sentences; slack: of fitted(). Errors:
    KeyError, no such task; ValueError, the task does not fit."""
    text = made_essay(seed) if essay is None else essay
    one = fitted(lambda units: drawn(task, units, random.Random(f"{task}/{seed}"), text),
                 lambda made: count(prompt_text(made, made.questions[0])), length, slack=slack)
    said = prompt_text(one, one.questions[0])
    return {"input": said, "outputs": list(one.questions[0].outputs), "length": count(said)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("length", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--samples", type=int, default=25)
    parser.add_argument("--tokenizer", type=pathlib.Path, help="a folder with tokenizer.json; else 4 bytes a token")
    parser.add_argument("--essay", type=pathlib.Path)
    args = parser.parse_args()

    def count(text: str) -> int:
        return len(text.encode()) // 4
    if args.tokenizer:
        from tokenizers import Tokenizer
        encode = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json")).encode

        def count(text: str) -> int:  # noqa: F811
            return len(encode(text, add_special_tokens=False).ids)
    essay = sentences_of(args.essay.read_text()) if args.essay else None
    for i in range(args.samples):
        print(json.dumps({"index": i, **sample(args.task, f"{args.seed}/{i}", args.length, count, essay)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
