#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a prefix on disk saves, and what attaching costs where there is none: time to first token.

    reuse.py --json-out FILE [--tokens N] [--rounds N] [--commit HASH] [--date DATE]

A round: the numpy engine (SmolLM2-135M) prefills a document of about 8K tokens into a cache of its own, then, in
a daemon with an empty disk tier, into kvstratad under plan full. The daemon is stopped and another one started on
the same directory, whose files are dropped from the page cache: the same prompt again. A time begins before the
sequence is opened and ends with the logits of the prompt's last token. All three name the same first token.

reuse/disk     the second daemon's time against recomputing (must: a tenth)
reuse/nothing  the first daemon's against the engine's own cache (must: 2 % more at most)
"""
import argparse
import os
import pathlib
import sys
import tempfile
import time

os.environ.setdefault("OPENBLAS_NUM_THREADS", "2")
ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "integrations" / "kvstrata" / "src"),
                str(ROOT / "integrations" / "kvstrata_numpy" / "src")]

import kvstrata  # noqa: E402
from engine_bench import THREADS, row, write_result  # noqa: E402
from kvstrata.daemon import Daemon  # noqa: E402
from kvstrata_numpy.download import model_path  # noqa: E402
from kvstrata_numpy.engine import Engine  # noqa: E402

DOCUMENT = "/usr/share/common-licenses/GPL-3"


def first_token(engine, open_cache, ids):
    """(milliseconds, token, tokens that were held)"""
    begin = time.perf_counter()
    cache = open_cache()
    held = cache.tokens
    logits = engine.prefill(cache, ids)
    elapsed = (time.perf_counter() - begin) * 1e3
    if hasattr(cache, "close"):
        cache.close()
    return elapsed, int(logits.argmax()), held


def attached(engine, directory, ids):
    with Daemon("--set", f"disk.path={directory}", "--set", "disk.budget_bytes=2GiB",
                "--set", "disk.load_timeout=10s") as daemon, \
            kvstrata.attach(daemon.socket, threads=THREADS) as session:
        engine.attach(session)
        return first_token(engine, lambda: engine.open("full", ids), ids)


def drop_from_page_cache(directory):
    for path in pathlib.Path(directory).rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def one_round(engine, ids):
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        directory = os.path.join(folder, "disk")
        own = first_token(engine, lambda: engine.own_cache(len(ids)), ids)
        fresh = attached(engine, directory, ids)
        drop_from_page_cache(directory)
        again = attached(engine, directory, ids)
    assert own[1] == fresh[1] == again[1], "the first tokens differ"
    assert fresh[2] == 0 and again[2] > 0.98 * len(ids), f"held {fresh[2]}, then {again[2]} tokens"
    print(f"own {own[0]:.0f} ms, attached {fresh[0]:.0f} ms, from disk {again[0]:.0f} ms "
          f"({again[2]} of {len(ids)} tokens)", flush=True)
    return own[0], fresh[0], again[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json-out")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--commit", default="uncommitted")
    parser.add_argument("--date", default="")
    args = parser.parse_args()
    engine = Engine.load(model_path())
    ids = engine.tokenizer.encode(pathlib.Path(DOCUMENT).read_text())[:args.tokens]
    own, fresh, again = zip(*(one_round(engine, ids) for _ in range(args.rounds)))
    rows = [row("reuse/disk", "ms", again, "recomputed, attached", fresh, 10),
            row("reuse/nothing", "ms", fresh, "the engine's own cache", own, 0.98)]
    write_result(args, "reuse", f"SmolLM2-135M, {len(ids)} tokens, plan full, medians of {args.rounds} rounds", rows)


if __name__ == "__main__":
    main()
