# SPDX-License-Identifier: Apache-2.0
"""Prompts with reference answers, from task files that a folder holds.

A folder DIR has ruler/<length>/<task>.jsonl.xz and longbench/multi_news.jsonl.xz, as RULER and LongBench write them. They
are not part of this repository. task_files.json has the digest of each, so that results of two machines are of the same
prompts. A file that is not there is left out, by name.

Own files are read beside them: FILE.jsonl or FILE.jsonl.xz in RULER's form, and FILE.txt, a text of which every window is
a prompt and the words behind it are the reference.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import lzma
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

DIGESTS = json.loads((pathlib.Path(__file__).parent / "task_files.json").read_text())
GROUPS = {"niah": "needles", "qa": "questions", "vt": "variables", "fwe": "frequent words", "cwe": "common words",
          "multi": "summaries"}  # groups of tasks, by the first word of their names
TURN = re.compile(r"<\|start_header_id\|>(\w+)<\|end_header_id\|>(.*?)(?=<\|eot_id\|>|<\|start_header_id\|>|\Z)", re.DOTALL)
SUMMARY = "Write a one-page summary of all news.\n\n{}\n\nSummary:"
ANSWER_TOKENS = 128  # tokens of a reference answer that count; summaries have more
NEW_TOKENS = 32      # that a greedy answer may have at least; and twice those of the reference
WINDOW_TOKENS = 4096  # tokens of a text's window, about: it is cut by characters, which all tokenizers have alike
CHARACTERS_A_TOKEN = 4

Tokens = Callable[[str], list[int]]


class Prompt(NamedTuple):
    """key: folder/length/task/number of its sample. begun: what the assistant's turn begins with."""

    key: str
    system: str
    asked: list[tuple[str, str]]
    begun: str
    outputs: list[str]

    @property
    def task(self) -> str:
        return self.key.split("/")[-2]

    @property
    def reference(self) -> str:
        """All outputs, or of a question, whose outputs are one answer in other words, the first."""
        outputs = self.outputs[:1] if self.task.startswith("qa_") else self.outputs
        return (" " if self.begun else "") + ", ".join(outputs)

    def score(self, answer: str) -> float:
        return score(self.task, answer, self.outputs)

    @property
    def is_scored(self) -> bool:
        """Summaries and texts are judged by their loss alone."""
        return not self.key.startswith(("longbench/", "text/"))


def score(task: str, answer: str, outputs: Sequence[str]) -> float:
    """RULER's: the share of the outputs that the answer has; of a question (qa_*), whether it has one of them."""
    found = [output.lower() in answer.lower() for output in outputs]
    return float(any(found)) if task.startswith("qa_") else sum(found) / len(found)


def group_of(key: str) -> str:
    """The group of a prompt's key: its length, and what kind of task it is."""
    *where, task, _ = key.split("/")
    word = task.split("_")[0]
    return f"{where[-1]} {GROUPS.get(word, word)}"


def prompts(folder: pathlib.Path, counts: dict[str, int], left_out: Callable[[str], None], first: int = 0) -> list[Prompt]:
    """counts: prompts a task, by the beginning of a file's name ("ruler/4096/": 25); the longest that fits counts. They begin
    with sample `first` of each file. Every task's first prompt comes before any second one. left_out gets the name of each
    known file that is not there.

    Errors: SystemExit, a file is not the one that its name says.
    """
    ranked: list[tuple[int, Prompt]] = []
    for name, digest in DIGESTS.items():
        fitting = [prefix for prefix in counts if name.startswith(prefix)]
        count = counts[max(fitting, key=len)] if fitting else 0
        if count:
            path = folder / f"{name}.jsonl.xz"
            if path.exists():
                ranked += enumerate(_read(path, name, digest, range(first, first + count)))
            else:
                left_out(name)
    return [prompt for _, prompt in sorted(ranked, key=lambda pair: pair[0])]


def own_prompts(path: pathlib.Path, count: int) -> list[Prompt]:
    """The first `count` of a file: own/<its name>/N, or a sample's own `key`; of a text text/<tokens>/<its name>/N.

    Errors: SystemExit, the file is not of a known form, or a text is shorter than a window.
    """
    name = path.name.split(".")[0]
    if path.suffix == ".txt":
        found = [_window(f"text/{WINDOW_TOKENS}/{name}/{i}", part) for i, part in enumerate(_parts(path.read_text())[:count])]
        if not found:
            raise SystemExit(f"accuracy: --own {path}: a text has {_WINDOW + _BEHIND} characters or more")
        return found
    if not path.name.endswith((".jsonl", ".jsonl.xz")):
        raise SystemExit(f"accuracy: --own {path}: wanted a name that ends in .jsonl, .jsonl.xz or .txt")
    with (lzma.open if path.suffix == ".xz" else open)(path, "rt", encoding="utf-8") as lines:
        samples = [json.loads(line) for line in itertools.islice(lines, count)]
    return [prompt_of(sample.get("key", f"own/{name}/{i}"), sample) for i, sample in enumerate(samples)]


_WINDOW, _BEHIND = WINDOW_TOKENS * CHARACTERS_A_TOKEN, 2 * ANSWER_TOKENS * CHARACTERS_A_TOKEN


def _parts(text: str) -> list[str]:
    """Windows with what is behind them, which do not overlap."""
    whole = _WINDOW + _BEHIND
    return [text[begin:begin + whole] for begin in range(0, len(text) - whole + 1, whole)]


def _window(key: str, part: str) -> Prompt:
    """Cut at the first space behind the window, which begins the reference as it begins an answer."""
    cut = part.index(" ", _WINDOW)
    return Prompt(key, "", [], part[:cut], [part[cut + 1:]])


def _read(path: pathlib.Path, name: str, digest: str, numbers: range) -> Iterator[Prompt]:
    content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != digest:
        raise SystemExit(f"accuracy: {path} has SHA-256 {found[:16]}..., {name} is {digest[:16]}...; fetch it again, or "
                         "leave it out with --prompts")
    with lzma.open(io.BytesIO(content), "rt", encoding="utf-8") as lines:
        for i, line in enumerate(itertools.islice(lines, numbers.start, numbers.stop), numbers.start):
            yield prompt_of(f"{name}/{i}", json.loads(line))


def prompt_of(key: str, sample: dict[str, Any]) -> Prompt:
    """The prompt in RULER's fields (`input`: a chat in Llama-3's template, `outputs`), or in LongBench's."""
    if "context" in sample:
        return Prompt(key, "", [("user", SUMMARY.format(sample["context"]))], "", sample["answers"])
    turns = TURN.findall(sample["input"])
    begun = turns.pop()[1].strip() if turns and turns[-1][0] == "assistant" else ""
    system = "".join(text.strip() for role, text in turns if role == "system")
    return Prompt(key, system, [(role, text.strip()) for role, text in turns if role != "system"], begun, sample["outputs"])


def ids_of(prompt: Prompt, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Ids of the prompt in the model's own chat template, up to where the answer begins, and of the reference answer. A
    prompt without a turn is its text alone; so are the turns of a model without a template, one behind the other."""
    of: Tokens = lambda text: list(tokenizer(text, add_special_tokens=False).input_ids)
    reference = of(prompt.reference)[:ANSWER_TOKENS]
    if not prompt.asked or tokenizer.chat_template is None:
        turns = [prompt.system, *(text for _, text in prompt.asked), prompt.begun]
        return list(tokenizer("\n".join(turn for turn in turns if turn)).input_ids), reference
    system = [{"role": "system", "content": prompt.system}] if prompt.system else []
    turns = system + [{"role": role, "content": text} for role, text in prompt.asked]
    chat = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return of(chat) + of(prompt.begun), reference
