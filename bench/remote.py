#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a remote tier saves a second node, and what it costs where it brings nothing: time to first token.

    remote.py --json-out FILE [--tokens N] [--prompts N] [--nothing] [--commit HASH] [--date DATE]

--nothing: the last two rows alone.

Nodes are daemons with a disk of their own and nothing else in common but a redis-server on loopback. The numpy engine
(SmolLM2-135M) prefills a document of about 8K tokens in the first; when the server has all of it, the same prompt comes to a
second node. Then prompts of 288 tokens that nobody has, each to three nodes in random order: without a remote tier, with
one, and with one whose server is gone (a first prompt opens its breaker). A time begins before the sequence is opened and
ends with the logits of the prompt's last token. Ratios are medians over prompts.

remote/other_node  the second node's time against the first one's (must: a tenth)
remote/nothing     with a remote tier against without (must: 2 % more at most)
remote/gone        with a server that is gone against without (must: 2 % more at most)
"""
import argparse
import contextlib
import json
import os
import pathlib
import random
import shutil
import socket
import statistics
import subprocess
import tempfile
import time

os.environ.setdefault("OPENBLAS_NUM_THREADS", "2")

from reuse import DOCUMENT, ROOT, first_token  # noqa: E402  puts the packages below on the path

import kvstrata  # noqa: E402
from engine_bench import THREADS, row, write_result  # noqa: E402
from kvstrata.daemon import Daemon  # noqa: E402
from kvstrata_numpy.download import model_path  # noqa: E402
from kvstrata_numpy.engine import Engine  # noqa: E402

WRITTEN_WITHIN = 120  # seconds
CHUNK = 288  # tokens of a prompt that nobody has; remote.min_tokens are 256


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextlib.contextmanager
def redis_server(folder):
    """An address. Debian's redis-tools has the server's program under another name."""
    port = free_port()
    server = subprocess.Popen(["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder],
                              executable=shutil.which("redis-server") or shutil.which("redis-check-rdb"),
                              stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 10
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"redis-server does not listen on {port}")
            time.sleep(0.01)
        yield f"127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


@contextlib.contextmanager
def node(folder, address=None):
    """A daemon with an empty disk and, at `address`, a remote tier; and a session of it."""
    options = ["--set", f"disk.path={tempfile.mkdtemp(dir=folder)}", "--set", "disk.budget_bytes=2GiB"]
    if address:
        options += ["--set", f"remote.redis={address}", "--set", f"remote.secret_file={folder}/secret",
                    "--set", "remote.write=all"]
    with Daemon(*options) as daemon, kvstrata.attach(daemon.socket, threads=THREADS) as session:
        yield daemon, session


def prefill(engine, session, ids):
    engine.attach(session)
    return first_token(engine, lambda: engine.open("full", ids), ids)


def wait_until_written(daemon):
    """Until nothing waits to go to the server, and something has gone."""
    deadline = time.monotonic() + WRITTEN_WITHIN
    while time.monotonic() < deadline:
        text = subprocess.run([ROOT / "build/bin/kvstrata", "--socket", daemon.socket, "tier", "ls", "-o", "json"],
                              check=True, stdout=subprocess.PIPE, text=True).stdout
        remote = json.loads(text)["remotes"][0]
        if remote["written"] and not remote["waiting"]:
            return remote
        time.sleep(0.1)
    raise TimeoutError(f"not all is written after {WRITTEN_WITHIN} s: {remote}")


def other_node(engine, folder, ids):
    with redis_server(folder) as address:
        with node(folder, address) as (daemon, session):
            first = prefill(engine, session, ids)
            written = wait_until_written(daemon)
        with node(folder, address) as (daemon, session):
            second = prefill(engine, session, ids)
    assert first[1] == second[1], "the first tokens differ"
    assert first[2] == 0 and second[2] > 0.98 * len(ids), f"held {first[2]}, then {second[2]} tokens"
    print(f"first node {first[0]:.0f} ms, second {second[0]:.0f} ms ({second[2]} of {len(ids)} tokens; "
          f"{written['written']} values, {written['written_bytes'] / 1e6:.0f} MB)", flush=True)
    return first[0], second[0]


def nothing_to_reuse(engine, folder, ids, prompts):
    """Milliseconds [prompts] without a remote tier, with one, and with one that is gone. Nodes take turns, since a
    machine's speed changes within seconds."""
    with redis_server(folder) as address, node(folder) as (_, without), node(folder, address) as (_, with_one), \
            node(folder, f"127.0.0.1:{free_port()}") as (_, gone):
        prefill(engine, gone, ids[:512])
        times = {session: [] for session in (without, with_one, gone)}
        for i in range(prompts):
            chunk = random.sample(ids, CHUNK)
            first_tokens = set()
            for session in random.sample(list(times), len(times)):
                elapsed, token, held = prefill(engine, session, chunk)
                assert held == 0, f"{held} tokens are held of a new prompt"
                times[session].append(elapsed)
                first_tokens.add(token)
            assert len(first_tokens) == 1, "the first tokens differ"
            print(f"prompt {i}: without, with, gone: " + ", ".join(f"{x[-1]:.0f}" for x in times.values()), flush=True)
    return [times[session] for session in (without, with_one, gone)]


def paired(name, values, base_name, base, must):
    """A row whose ratio is the median over pairs."""
    return {**row(name, "ms", values, base_name, base, must),
            "ratio": statistics.median(b / v for v, b in zip(values, base, strict=True))}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json-out")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--nothing", action="store_true")
    parser.add_argument("--commit", default="uncommitted")
    parser.add_argument("--date", default="")
    args = parser.parse_args()
    engine = Engine.load(model_path())
    ids = engine.tokenizer.encode(pathlib.Path(DOCUMENT).read_text())[:args.tokens]
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        secret = pathlib.Path(folder, "secret")
        secret.touch(mode=0o600)
        secret.write_text(os.urandom(32).hex() + "\n")
        rows = []
        if not args.nothing:
            first, second = other_node(engine, folder, ids)
            rows.append(row("remote/other_node", "ms", [second], "the node that computed it", [first], 10))
        without, with_one, gone = nothing_to_reuse(engine, folder, ids, args.prompts)
    rows += [paired("remote/nothing", with_one, "no remote tier", without, 0.98),
             paired("remote/gone", gone, "no remote tier", without, 0.98)]
    write_result(args, "remote", f"SmolLM2-135M, plan full; {len(ids)} tokens, and {args.prompts} prompts of {CHUNK}; one "
                 "redis-server on loopback", rows)


if __name__ == "__main__":
    main()
