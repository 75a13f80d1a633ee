# SPDX-License-Identifier: Apache-2.0
"""A daemon that has everything an operator can list: a disk, a live session of a model with a long name, sequences,
a pin, a quota; and `kvstrata` beside it as a shell and as a terminal see it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import pty
import re
import select
import struct
import subprocess
import tempfile
import termios
import time
from collections.abc import Iterator

import numpy as np
from toy import DIM, HEADS, KV_HEADS, LAYERS, Toy

import kvstrata
from kvstrata.daemon import Daemon, find_daemon

DEADLINE_S = 60
MODEL = "meta-llama/Llama-3.1-70B-Instruct, fine-tuned on long documents"
PLAN = "summaries_of_long_documents"
LONG_FOLDER = "the-disk-tier-of-a-node-that-has-a-name-as-long-as-those-of-kubernetes-pods"
TOKENS = 200


class Program:
    """`kvstrata` of the daemon's socket."""

    def __init__(self, socket: str) -> None:
        self.path = str(pathlib.Path(find_daemon()).with_name("kvstrata"))
        self.environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
        self.environment["KVSTRATA_SOCKET"] = socket

    def run(self, *words: str, codes: tuple[int, ...] = (0,), **environment: str) -> str:
        """What it wrote to stdout."""
        done = subprocess.run([self.path, *words], env={**self.environment, **environment}, capture_output=True,
                              text=True, timeout=DEADLINE_S, stdin=subprocess.DEVNULL, check=False)
        assert done.returncode in codes, (words, done)
        return done.stdout

    def names(self, *words: str) -> list[str]:
        return self.run(*words, "-o", "name").splitlines()

    def on_terminal(self, *words: str, columns: int) -> list[str]:
        """Lines that it writes to a terminal so wide."""
        leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        with subprocess.Popen([self.path, *words], env=self.environment, stdin=subprocess.DEVNULL, stdout=follower,
                              stderr=subprocess.DEVNULL) as process:
            os.close(follower)
            data, end = b"", time.monotonic() + DEADLINE_S
            while select.select([leader], [], [], max(0, end - time.monotonic()))[0]:
                try:
                    data += os.read(leader, 65536)
                except OSError:  # EIO: nobody writes any more
                    break
            os.close(leader)
        assert process.returncode == 0, words
        return data.decode().replace("\r\n", "\n").splitlines()

    def lists(self) -> list[list[str]]:
        """Every verb that prints a list: all nouns' `ls`, found in their help, and these."""
        nouns = re.findall(r"^  (\w+) ", self.run("--help").split("Subcommands:")[1], re.MULTILINE)
        found = [[noun, "ls"] for noun in nouns if re.search(r"^  ls ", self.run(noun, "--help"), re.MULTILINE)]
        assert len(found) >= 10, found
        keys = self.names("value", "ls", "--limit", "2")
        return [*found, ["config", "show"], ["events"], ["explain"], ["evict", "--dry-run"],
                ["value", "verify", *keys]]


@contextlib.contextmanager
def operated() -> Iterator[tuple[Program, kvstrata.Sequence]]:
    """The program, and a sequence of plan PLAN whose tokens are on disk and pinned."""
    seed = 20261126
    print(f"seed {seed}")
    toy = Toy(np.random.default_rng(seed), TOKENS)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvs-operated-"))
        daemon = stack.enter_context(Daemon(
            "--set", f"disk.path={folder}/{LONG_FOLDER}", "--set", "disk.budget_bytes=16MiB", "--set",
            "disk.segment_bytes=1MiB", "--set", f"plans.{PLAN}=quest{{budget = 1024}}"))
        program = Program(daemon.socket)
        session = stack.enter_context(kvstrata.attach(daemon.socket, client_name="an engine with a long name"))
        model = session.register_model(MODEL, toy.digest, layers=LAYERS, query_heads=HEADS, kv_heads=KV_HEADS,
                                       head_dim=DIM, page_tokens=16)
        for plan in ("full", PLAN):
            sequence = stack.enter_context(session.open(model, plan))
            toy.feed(session, sequence, 0, TOKENS)
            sequence.prefill_done()
        program.run("pin", "add", "--seq", str(sequence.handle))
        program.run("quota", "set", "uid:1000", "sessions", "9")
        yield program, sequence
