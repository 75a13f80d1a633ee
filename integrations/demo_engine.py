# SPDX-License-Identifier: Apache-2.0
"""What the demos in others' engines share: the prompt, a process for each engine, and the end.

Threads: the main one's.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import kvstrata
from kvstrata.daemon import Daemon
from kvstrata_numpy import hugging_face
from kvstrata_numpy.download import DownloadError

DOCUMENT = "/usr/share/common-licenses/GPL-3"
QUESTION = "What is this document about, and what does it allow people to do?"
PLANS = ("full", os.environ.get("PLAN") or "bits{budget = 256, min_tokens = 0}")
PROMPT = 2048  # tokens of the document
ANSWER = 48


def turn_of(tokenizer: Any) -> list[dict[str, str]]:
    """The user's: the document's first tokens, and the question."""
    document = pathlib.Path(os.environ.get("DOC") or DOCUMENT).read_text(errors="replace")
    kept = tokenizer.decode(tokenizer(document).input_ids[:PROMPT])
    return [{"role": "user", "content": f"{kept}\n\n{os.environ.get('ASK') or QUESTION}"}]


def prompt_of(tokenizer: Any) -> list[int]:
    return tokenizer.apply_chat_template(turn_of(tokenizer), add_generation_prompt=True)["input_ids"]


def model_folder() -> pathlib.Path:
    folder = hugging_face.cached()
    print(f"MODEL is {folder}", flush=True)
    return folder


@contextlib.contextmanager
def socket_of_daemon() -> Iterator[str]:
    with contextlib.ExitStack() as stack:
        yield os.environ.get("KVSTRATA_SOCKET") or stack.enter_context(Daemon()).socket


def arguments(text: str | None) -> argparse.Namespace:
    """run: what one of the demo's processes is told; None: it is the demo."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args()


def in_processes(file: str, text: str | None, run: Callable[[pathlib.Path, str, str], None], words: Iterable[str]) -> None:
    """`run(folder, word, socket)` for each word, in a process of its own that runs `file`."""
    if of_one := arguments(text).run:
        return run(pathlib.Path(of_one[0]), of_one[1], of_one[2])
    folder = model_folder()
    with socket_of_daemon() as socket:
        for word in words:
            subprocess.run([sys.executable, file, "--run", str(folder), word, socket], check=True)


def leave(main: Callable[[], None]) -> None:
    """Runs it, and says what went wrong in a line."""
    try:
        main()
    except (DownloadError, OSError, kvstrata.KvstrataError, subprocess.CalledProcessError) as problem:
        sys.exit(f"demo: {problem}")
    except KeyboardInterrupt:
        sys.exit(130)
