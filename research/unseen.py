#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prompts for a model that no setting was chosen by, in one file for `research --own`.

    research/unseen.py --model FOLDER --lengths 4096 8192 --out FILE.jsonl.xz [--samples 6] [--seed 20261130] [--tasks DIR]

Each of generated.py's tasks at each length, in the model's own tokens, with room for the answer. With --tasks also the
last questions (qa_*) and news of its files, whose first samples settings were chosen by. Every task's first prompt comes
before any second one, so that a run that is stopped has all of them; of these the shortest come first.
"""

from __future__ import annotations

import argparse
import json
import lzma
import pathlib
import sys
from collections.abc import Iterator

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import generated  # noqa: E402
import tasks  # noqa: E402

OF_FILES = {"qa": 25, "multi_news": 100}  # samples that a file has, by the beginning of its task's name


def of_files(folder: pathlib.Path, number: int) -> Iterator[dict]:
    """The sample that is `number` from the end of each file."""
    for name in tasks.DIGESTS:
        count = next((count for task, count in OF_FILES.items() if name.split("/")[-1].startswith(task)), 0)
        if count and (folder / f"{name}.jsonl.xz").exists():
            with lzma.open(folder / f"{name}.jsonl.xz", "rt", encoding="utf-8") as lines:
                at = count - 1 - number
                yield {"key": f"{name}/{at}", **json.loads(list(lines)[at])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--lengths", type=int, nargs="+", required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--samples", type=int, default=6)
    parser.add_argument("--seed", type=int, default=20261130)
    parser.add_argument("--tasks", type=pathlib.Path)
    args = parser.parse_args()
    from tokenizers import Tokenizer
    encode = Tokenizer.from_file(str(args.model / "tokenizer.json")).encode

    def count(text: str) -> int:
        return len(encode(text).ids)
    with lzma.open(args.out, "wt", preset=9, encoding="utf-8") as file:
        for i in range(args.samples):
            found = list(of_files(args.tasks, i)) if args.tasks else []
            for length in args.lengths:
                for task in generated.TASKS:
                    made = generated.sample(task, f"{args.seed}/{i}", length - tasks.ANSWER_TOKENS, count, slack=length // 20)
                    found.append({"key": f"generated/{length}/{task}/{i}", **made})
            texts = sorted((json.dumps(sample) for sample in found), key=len)
            file.writelines(text + "\n" for text in texts)
            print(f"{i + 1}/{args.samples}: {len(found)} prompts", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
