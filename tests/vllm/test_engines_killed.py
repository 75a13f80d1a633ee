# SPDX-License-Identifier: Apache-2.0
"""vLLM and transformers on one prompt of one daemon, and one of the two is killed by SIGKILL in the middle: the other's
tokens are those of plain transformers, and the daemon has each page once, whoever computed it."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kvstrata.daemon import Daemon

from conftest import ROOT, SEED, SHARED, assert_same, command_of

TOKENS, LAYERS, PAGE = 8, 30, 32
SHARING: dict[str, Any] = {"extra": {"digest": SHARED}}
LAST_PAGES = 4  # that a sequence has for tokens to come; prompts have more
PATIENCE = 60  # seconds until the daemon has noticed a death


def start(command: list[str]) -> subprocess.Popen[str]:
    paths = [*sys.path, str(ROOT / "integrations" / "kvstrata_transformers" / "src")]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})


def tell(process: subprocess.Popen[str], what: Any) -> None:
    assert process.stdin is not None
    print(json.dumps(what), file=process.stdin, flush=True)


def answer(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the process ended with {process.wait()}"
    return json.loads(line)


class Books:
    """What the daemon has, by its CLI; `pages`: how many whole ones it should have cached."""

    def __init__(self, socket: str) -> None:
        self.socket, self.pages = socket, 0

    def says(self, *verb: str) -> dict[str, Any]:
        said = subprocess.run([str(ROOT / "build" / "bin" / "kvstrata"), "--socket", self.socket, *verb, "-o", "json"],
                              capture_output=True, text=True)
        assert said.returncode == 0, said.stdout + said.stderr
        return json.loads(said.stdout)

    def used(self) -> int:
        """Pages of both pools."""
        page_bytes, = {model["page_bytes"] for model in self.says("model", "ls")["models"]}
        return sum(pool["used_bytes"] for pool in self.says("status")["pools"]) // page_bytes

    def await_one_of_each(self, sessions: int) -> None:
        """Nobody's pages are there but those of the prompts, once, when so many sessions are left."""
        until = time.monotonic() + PATIENCE
        while True:
            status = self.says("status")
            now = status["sessions"], status["prefix_pages"], self.used()
            if now == (sessions, self.pages, self.pages):
                break
            assert time.monotonic() < until, f"(sessions, cached, used) {now}, not {(sessions, self.pages, self.pages)}"
            time.sleep(0.05)
        assert self.says("audit")["clean"]


@pytest.fixture
def books() -> Iterator[Books]:
    with Daemon() as daemon:
        yield Books(daemon.socket)


@pytest.fixture
def transformers(folder: pathlib.Path, books: Books) -> Iterator[subprocess.Popen[str]]:
    with start([sys.executable, str(pathlib.Path(__file__).with_name("transformers_engine.py")), str(folder),
                books.socket]) as process:
        assert answer(process)["ready"]
        yield process
        process.stdin.close()


def questions(text_ids: list[int], number: int) -> list[list[int]]:
    """That share no page."""
    random = np.random.default_rng(SEED + number)
    begins = random.permutation(len(text_ids) // 130)[:number] * 130
    return [text_ids[b:b + int(random.integers(200, 330))] for b in begins]


def ask(process: subprocess.Popen[str], prompt: list[int], **options: Any) -> dict[str, Any]:
    """transformers, which nobody kills."""
    tell(process, {"prompt": prompt, "tokens": TOKENS, **options})
    said = answer(process)
    assert answer(process)["ended"] == 0
    return said


def whole_pages(prompt: list[int]) -> int:
    """Of a prompt with what was generated; the last token is never computed."""
    return (len(prompt) + TOKENS - 1) // PAGE


def test_transformers_is_killed(folder, text_ids, amount, books, transformers, tmp_path):
    """vLLM goes on; in every other case both are on the prompt, and transformers has committed it, when it dies."""
    first, *prompts = questions(text_ids, amount(50) + 1)
    random = np.random.default_rng(SEED)
    calls = ask(transformers, first)["calls"]
    books.pages += whole_pages(first)
    prefill = 4 + 2 * LAYERS  # calls until the prompt is committed
    with start(command_of(tmp_path, folder, "full", None, SHARING | {"socket": books.socket})) as vllm:
        assert answer(vllm) == "ready"
        for number, prompt in enumerate(prompts):
            want = ask(transformers, prompt, plain=True)
            at = int(random.integers(prefill, calls) if number % 2 else random.integers(1, calls))
            print(f"seed {SEED}, moment {number}: {len(prompt)} tokens, killed before call {at} of {calls}")
            tell(transformers, {"prompt": prompt, "tokens": TOKENS, "stop_at": at})
            victim = answer(transformers)["stopped"]
            tell(vllm, {"prompts": [prompt], "tokens": TOKENS})
            got = answer(vllm) if number % 2 else None
            if number % 2:  # its whole pages are transformers', which has no more than its last ones for itself
                assert got[0]["held"] == (len(prompt) - 1) // PAGE * PAGE
                alone = books.used() - books.pages - whole_pages(prompt)
                assert alone <= LAST_PAGES, books.says("seq", "ls")
            os.kill(victim, signal.SIGKILL)
            assert_same([want], got or answer(vllm))
            assert answer(transformers)["ended"] == -signal.SIGKILL
            books.pages += whole_pages(prompt)
            books.await_one_of_each(sessions=2)  # vLLM's worker and scheduler
        vllm.stdin.close()


def test_vllm_is_killed(folder, text_ids, amount, books, transformers, tmp_path):
    """transformers, which has stopped in the middle, goes on. Each of vLLM's deaths costs a start."""
    random = np.random.default_rng(SEED)
    for number, prompt in enumerate(questions(text_ids, amount(5))):
        want = ask(transformers, prompt, plain=True)
        at, dies = int(random.integers(1, 400)), int(random.integers(TOKENS * LAYERS))
        print(f"seed {SEED}, moment {number}: {len(prompt)} tokens, dies before attention {dies}, the other is at {at}")
        tell(transformers, {"prompt": prompt, "tokens": TOKENS, "stop_at": at})
        assert "stopped" in answer(transformers)
        with start(command_of(tmp_path, folder, "full", None, SHARING | {"socket": books.socket})) as vllm:
            assert answer(vllm) == "ready"
            tell(vllm, {"prompts": [prompt], "tokens": TOKENS, "die_at": dies})
            assert vllm.wait(PATIENCE) == -signal.SIGKILL
        tell(transformers, "go on")
        got = answer(transformers)
        assert answer(transformers)["ended"] == 0
        assert_same([want], [got])
        books.pages += whole_pages(prompt)
        books.await_one_of_each(sessions=0)
