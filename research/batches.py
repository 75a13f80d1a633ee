# SPDX-License-Identifier: Apache-2.0
"""Training batches of retrieval tasks: a function of (seed, step, row length), made by processes ahead of the GPU.

A row is one context of generated.py with several questions, each a turn of a chat; the first is asked as RULER asks.
Only answers are learned. So a row of 20,000 tokens gives up to 24 answers, where RULER's form gives one.

Standard library, numpy and tokenizers: workers do not load torch.
"""

from __future__ import annotations

import ast
import functools
import os
import pathlib
import random
import re
import sys
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import generated  # noqa: E402
import words  # noqa: E402
from chat import Asked, Chat  # noqa: E402
from generated import Drawn, Needles, sentences_of  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Prose besides made sentences. Not the texts that our measurements read (licences, Python's language reference).
STDLIB = ("argparse", "asyncio/base_events", "collections/__init__", "concurrent/futures/_base", "contextlib",
          "csv", "ctypes/util", "datetime", "decimal", "difflib", "doctest", "email/message", "enum", "fractions",
          "functools", "heapq", "imaplib", "inspect", "ipaddress", "locale", "logging/__init__", "mailbox",
          "multiprocessing/pool", "optparse", "os", "pathlib", "pickletools", "random", "shutil", "smtplib",
          "socket", "ssl", "statistics", "string", "subprocess", "tarfile", "tempfile", "threading", "traceback",
          "turtle", "typing", "unittest/case", "unittest/mock", "urllib/request", "uuid", "warnings",
          "zipfile/__init__")
SLACK = 0.02  # share of a row's length that it may be shorter by


class Batch(NamedTuple):
    """Rows of equal length. `ids` [rows, length] int32, padded with the end marker behind the last answer. Answer
    tokens, flat: `places` [n] is the flat index of the position that says the token, `targets` [n] the token,
    `weights` [n] sums to 1 over the batch, `tasks` [n] an index of TASKS. A row of k questions weighs sqrt(k): more
    than one of a single question, less than k of them. `used`: tokens without padding."""
    ids: np.ndarray
    places: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    tasks: np.ndarray
    used: int


@dataclass(frozen=True)
class Mix:
    """What rows are made of. `share`: how often; `make`: (units, draw, essay) to a context with its questions."""
    name: str
    share: float
    make: Callable[[int, random.Random, Sequence[str]], Drawn]


def _exact(task: str) -> Callable[[int, random.Random, Sequence[str]], Drawn]:
    return lambda units, draw, essay: generated.drawn(task, units, draw, essay)


def _crowd(units: int, draw: random.Random, essay: Sequence[str]) -> Drawn:
    """Many needles in noise or an essay; keys with one value or with several; questions of one key or of several."""
    values, queries = draw.choice(((1, 1), (1, 1), (1, 4), (4, 1), (2, 2), (1, 3), (3, 1)))
    keys = draw.randint(queries, max(queries, 24 // values))
    value = draw.choice(("number", "number", "uuid"))
    haystack = draw.choice(("noise", "essay", "essay", "essay"))
    asked = draw.randint(1, 12 if value == "number" else 5)
    return generated.niah(Needles(haystack, value=value, keys=keys, values=values, queries=queries, asked=asked),
                          max(units, 4), draw, essay)


def _lines(units: int, draw: random.Random, essay: Sequence[str]) -> Drawn:
    return generated.niah(Needles("needles", asked=draw.randint(4, 24)), units, draw, essay)


def _uuids(units: int, draw: random.Random, essay: Sequence[str]) -> Drawn:
    return generated.niah(Needles("needles", key="uuid", value="uuid", asked=draw.randint(2, 6)), units, draw, essay)


def _chains(units: int, draw: random.Random, essay: Sequence[str]) -> Drawn:
    chains = draw.choice((1, 1, 2, 3, 4))
    return generated.vt(units, draw, chains=chains, hops=draw.choice((2, 3, 4, 4, 4)))


MIXES = (Mix("lines", 0.28, _lines), Mix("crowd", 0.28, _crowd), Mix("vt", 0.16, _chains), Mix("uuids", 0.07, _uuids),
         Mix("fwe", 0.06, _exact("fwe")), Mix("cwe", 0.03, _exact("cwe")), Mix("single", 0.04, _exact("niah_single_1")),
         Mix("single", 0.03, _exact("niah_single_2")), Mix("single", 0.05, _exact("niah_single_3")))
TASKS = tuple(dict.fromkeys(mix.name for mix in MIXES))


def _docstrings(path: pathlib.Path) -> list[str]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return []
    nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))]
    return [text for node in nodes if (text := ast.get_docstring(node))]


@functools.cache
def prose() -> tuple[tuple[str, ...], ...]:
    """Sentences of this project's documents, and of docstrings of Python's library: read once a process."""
    documents = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]
    library = pathlib.Path(os.__file__).parent
    docstrings = [text for name in STDLIB for text in _docstrings(library / f"{name}.py")]
    return tuple(tuple(s for text in texts for part in re.split(r"\n\s*\n", text) for s in sentences_of(part)
                       if 20 < len(s) < 400 and "|" not in s and "<|" not in s) for texts in (documents, docstrings))


def essay_of(draw: random.Random) -> list[str]:
    """Sentences from a random place on: made ones, documents, docstrings; line breaks gone in half of them."""
    kind = draw.randrange(4)
    texts = [found for found in prose() if len(found) > 100]
    if kind < 2 or not texts:
        return words.sentences(draw, 2048)
    text = draw.choice(texts)
    begin = draw.randrange(len(text))
    found = [*text[begin:], *text[:begin]][:2048]
    return [" ".join(s.split()) for s in found] if kind == 2 else found


def _conversation(chat: Chat, one: Drawn) -> tuple[list[int], list[range]]:
    turns = [Asked((one.context if i == 0 else "") + question.text, question.begun, ", ".join(question.outputs))
             for i, question in enumerate(one.questions)]
    return chat.conversation(one.system, turns)


def row(chat: Chat, name: str, length: int) -> tuple[list[int], list[range], str]:
    """Ids, answers, task; `length` tokens at most and little less. `name` seeds it. A task that does not fit gives way
    to needles, which fit from 256 tokens on."""
    draw = random.Random(name)
    mix = draw.choices(MIXES, [mix.share for mix in MIXES])[0]
    essay, seed = essay_of(draw), draw.getrandbits(64)
    for make, task in ((mix.make, mix.name), (_exact("niah_single_2"), "single")):
        try:
            ids, answers = generated.fitted(
                lambda units: _conversation(chat, make(units, random.Random(seed), essay)), lambda made: len(made[0]),
                length, least=2, slack=round(SLACK * length))
            return ids, answers, task
        except ValueError:
            continue
    raise ValueError(f"no task fits into {length} tokens")


def batch(chat: Chat, seed: int, step: int, rows: int, length: int) -> Batch:
    """The same for the same arguments, whatever was made before."""
    made = [row(chat, f"{seed}/{step}/{i}", length) for i in range(rows)]
    ids = np.full((rows, length), chat.end, np.int32)
    places, targets, weights, tasks = [], [], [], []
    total = sum(len(answers) ** 0.5 for _, answers, _ in made)
    for i, (tokens, answers, task) in enumerate(made):
        ids[i, :len(tokens)] = tokens
        for answer in answers:
            places += [i * length + at - 1 for at in answer]
            targets += [tokens[at] for at in answer]
            weights += [1 / (total * len(answers) ** 0.5 * len(answer))] * len(answer)
            tasks += [TASKS.index(task)] * len(answer)
    return Batch(ids, np.array(places, np.int64), np.array(targets, np.int64), np.array(weights, np.float32),
                 np.array(tasks, np.int64), sum(len(tokens) for tokens, _, _ in made))


def text_rows(chat: Chat, seed: int, step: int, rows: int, length: int) -> np.ndarray:
    """Plain text, [rows, length] int32: what a model must say as it did before."""
    draw = random.Random(f"text/{seed}/{step}")
    found = []
    for _ in range(rows):
        ids: list[int] = []
        while len(ids) < length:
            ids += chat.encode(" ".join(essay_of(draw)[:length // 8]) + "\n\n")
        found.append(ids[:length])
    return np.array(found, np.int32)


_chat: Chat | None = None  # a worker's


def _begin_worker(folder: pathlib.Path) -> None:
    global _chat
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes are parallel
    _chat = Chat(folder)
    prose()


def _work(seed: int, step: int, rows: int, length: int) -> Batch:
    assert _chat is not None
    return batch(_chat, seed, step, rows, length)


class Prompt(NamedTuple):
    """`ids`: up to where the answer begins; `outputs`: references."""
    ids: list[int]
    outputs: list[str]


def _held_out(task: str, length: int, samples: int) -> list[Prompt]:
    """Prompts of RULER's own form. Their seeds are those of no training row, whose names begin with a number."""
    assert _chat is not None
    chat = _chat
    found = [generated.sample(task, f"held-out/{length}/{i}", length, lambda text: len(chat.encode(text)),
                              slack=round(SLACK * length)) for i in range(samples)]
    return [Prompt(chat.of_ruler(sample), sample["outputs"]) for sample in found]


class Later:
    """A call that a pool begins when it is told to; result() makes it here if it was not."""

    def __init__(self, call: Callable[[], list[Prompt]]) -> None:
        self._call, self._future = call, None

    def begin(self, pool: ProcessPoolExecutor) -> None:
        self._future = pool.submit(self._call)

    def result(self) -> list[Prompt]:
        return self._future.result() if self._future else self._call()


class Ahead:
    """Batches of successive steps; `workers` processes make the next ones meanwhile (0: this one, when asked). Start it
    before CUDA is: processes are forked. One thread uses it; close() ends the workers."""

    def __init__(self, folder: pathlib.Path, seed: int, workers: int, ahead: int) -> None:
        self._folder, self._seed, self._ahead = folder, seed, ahead if workers else 1
        self._made: deque[tuple[int, int, int, Future[Batch] | None]] = deque()
        self._later: deque[Later] = deque()
        self._pool = ProcessPoolExecutor(workers, get_context("fork"), _begin_worker, (folder,)) if workers else None
        if self._pool:
            self._pool.submit(int).result()  # forks all of them now
        else:
            _begin_worker(folder)

    def take(self, step: int, shape: Callable[[int], tuple[int, int]]) -> Batch:
        """This step's batch. shape: (rows, length) of a step, asked as its making begins."""
        self.prepare(step, shape)
        if step % 8 == 0:
            self.begin_held_out(1)
        at, rows, length, future = self._made.popleft()
        if at != step:
            raise ValueError(f"batch {step} is asked for after {at - 1}")
        try:
            if future is not None:
                return future.result()
        except BrokenExecutor:  # a worker was killed; going on slowly is better than not at all
            print("batches: a worker died; batches are made in this process from now on", file=sys.stderr, flush=True)
            self._pool = None
            _begin_worker(self._folder)
        if _chat is None:
            _begin_worker(self._folder)
        return _work(self._seed, step, rows, length)

    def prepare(self, step: int, shape: Callable[[int], tuple[int, int]]) -> None:
        """Begins with what is not asked for yet, of this step and those behind it."""
        for later in range(self._made[-1][0] + 1 if self._made else step, step + self._ahead):
            rows, length = shape(later)
            self._made.append((later, rows, length, self._submit(later, rows, length)))

    def _submit(self, step: int, rows: int, length: int) -> Future[Batch] | None:
        try:
            return self._pool.submit(_work, self._seed, step, rows, length) if self._pool else None
        except BrokenExecutor:
            return None

    def held_out(self, tasks: Sequence[str], lengths: Sequence[int], samples: int) -> list[tuple[str, int, Later]]:
        """(task, length, prompts). One of them begins with every eighth batch, so that batches do not wait for them."""
        found = [(task, length, Later(functools.partial(_held_out, task, length, samples)))
                 for length in lengths for task in tasks]
        self._later.extend(later for _, _, later in found)
        return found

    def begin_held_out(self, most: int | None = None) -> None:
        """Begins the next ones, all without `most`."""
        while self._pool and self._later and most != 0:
            self._later.popleft().begin(self._pool)
            most = None if most is None else most - 1

    def close(self) -> None:
        if self._pool:
            self._pool.shutdown(wait=False, cancel_futures=True)
