#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The demo: a language model reads a document into kvstratad's memory and answers under every plan.

    DOC=path ASK="question" integrations/demo.py [--socket PATH] [--json-out FILE [--commit HASH] [--date DATE]]

Starts a kvstratad of its own, attaches SmolLM2-135M-Instruct (fetched once, checked), prefills the
document once, and for each plan opens the same prompt (a prefix hit), writes an answer, and compares the
plan with `full` on full's own tokens. Ends with a table and a picture. --socket or KVSTRATA_SOCKET uses a
running daemon, KVSTRATA_MODEL another Llama-family GGUF, DEMO_OUT the picture's folder. --json-out keeps
the table as suite `demo` (docs/results.md).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import sys
import textwrap
import time
from dataclasses import dataclass, field

# BLAS threads that spin between two products would take the cores from the attention in between.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "kvstrata" / "src"), str(HERE / "kvstrata_numpy" / "src"), str(HERE / "kvstrata")]

import generate_stubs  # noqa: E402

generate_stubs.generate_if_stale()

import numpy as np  # noqa: E402

import kvstrata  # noqa: E402
import kvstrata.grpc  # noqa: E402
from kvstrata.daemon import Daemon  # noqa: E402
from kvstrata.machine import device_name  # noqa: E402
from kvstrata_numpy import picture  # noqa: E402
from kvstrata_numpy.cache import DaemonCache  # noqa: E402
from kvstrata_numpy.download import DownloadError, model_path  # noqa: E402
from kvstrata_numpy.engine import Engine  # noqa: E402
from kvstrata_numpy.gguf_file import Array, GgufError  # noqa: E402
from kvstrata_numpy.llama import log_softmax  # noqa: E402
from kvstrata_numpy.progress import bar  # noqa: E402
from kvstrata_numpy.shadow import ShadowCache  # noqa: E402
from kvstrata_numpy.tokenizer import Stream  # noqa: E402

DOCUMENT = "/usr/share/common-licenses/GPL-3"
QUESTION = "What is this document about, and what does it allow people to do?"
ANSWER = 48  # tokens
SLACK = 16   # tokens: text cut between two tokens may be cut otherwise the next time


@dataclass
class Row:
    """What a plan did."""

    name: str
    text: str                                        # the plan with its options
    tokens: list[int] = field(default_factory=list)  # its own answer
    step_ms: list[float] = field(default_factory=list)
    status: str = ""
    device_bytes: int = 0
    host_bytes: int = 0
    tokens_read: float = 0
    bytes_read: float = 0                            # a step, all layers, selection included
    recall: float = 0
    recall_low: float = 0                            # 5th percentile
    error: float = 0
    agreement: float = 0
    kl: float = 0                                    # next-token distributions against full's, nats
    logits: list[Array] = field(default_factory=list)  # teacher-forced, of full's answer
    pages: list[Array] = field(default_factory=list)


def plans(prompt: int) -> list[Row]:
    """An eighth of the prompt for each sparse plan; whole pages of 16."""
    budget = max(128, prompt // 8 // 32 * 32)
    chess = ("page = 16, rho = [0.5, 0.5, 0.25], sinks = 1, "
             f"window = {budget // 32}, trigger = \"every\", every = 1, min_tokens = 0")
    return [Row("full", "full"),
            Row("window", f"window{{n_sink = 4, n_recent = {budget - 4}, min_tokens = 0}}"),
            Row("quest", f"quest{{page = 16, budget = {budget}, min_tokens = 0}}"),
            Row("chess", f"chess{{{chess}}}"),
            Row("tokenselect", f"tokenselect{{k = {budget - 192}, n_init = 64, n_local = 128, min_tokens = 0}}"),
            Row("sentencekv", f"sentencekv{{tau = {budget - 64}, min_tokens = 0}}"),
            Row("sekv", "sekv{rows_share = 0.25, local = 128, min_tokens = 0}"),
            Row("mosaickv", "mosaickv{keep = 48, max_loss = 1, truncate = false, share = 0.125, min_tokens = 0}"),
            Row("bits", f"bits{{budget = {budget}, min_tokens = 0}}"),
            Row("strata", "strata{min_tokens = 0}")]  # everything, finely where it matters


def prompt_of(engine: Engine, document: str, question: str) -> tuple[list[int], int]:
    """Token ids of the chat turn, and how many tokens of the document are in it."""
    ask = lambda text: engine.tokenizer.chat([("user", f"{text}\n\n{question}")])
    ids = engine.tokenizer.encode(document)
    room = engine.llama.config.context - len(ask("")) - ANSWER - SLACK
    if room < 1:
        raise SystemExit(f"demo: the question alone has {len(ask(''))} tokens; "
                         f"the model takes {engine.llama.config.context}")
    kept = ids[:room]
    return ask(document if len(kept) == len(ids) else engine.tokenizer.decode(kept)), len(kept)


def prefill(engine: Engine, ids: list[int], surprisal: Array) -> DaemonCache:
    """The one full prefill; its sequence stays open, so the pages stay. Fills surprisal [len(ids)]."""
    cache = engine.open("full", ids)
    begin = time.perf_counter()
    with bar("prefill", "token") as progress:
        engine.prefill(cache, ids, progress, surprisal)
    seconds = time.perf_counter() - begin
    share = cache.seconds / seconds
    print(f"prefill: {len(ids)} tokens in {seconds:.1f} s ({len(ids) / seconds:.0f} tokens/s), "
          f"{share:.0%} of it in attention over what was read before"
          f"{': that is what dominates' if share > 0.5 else ''}", flush=True)
    return cache


def write_answer(engine: Engine, row: Row, ids: list[int], surprisal: Array,
                 client: kvstrata.grpc.Client) -> None:
    """The plan's own answer, shown as it comes, timed a token."""
    cache = engine.open(row.text, ids)
    print(f"\n{row.name}: {cache.tokens} of {len(ids)} prompt tokens are held already\n  ", end="", flush=True)
    logits = engine.prefill(cache, ids, known=surprisal)
    cache.sequence.settle()  # spans and packed segments are built behind decode; here they are waited for
    stream, ended = Stream(engine.tokenizer), False
    begin = time.perf_counter()
    for token in engine.decode(cache, logits, ANSWER, stop=False):
        row.tokens.append(token)
        ended = ended or token in engine.tokenizer.stops()
        print("" if ended else stream.add(token).replace("\n", "\n  "), end="", flush=True)
        now = time.perf_counter()
        row.step_ms.append((now - begin) * 1e3)
        begin = now
    print(flush=True)
    row.step_ms = row.step_ms[1:]  # the first token's logits are the prefill's
    row.status = cache.sequence.status
    mine = [s for s in client.sequences() if s.sequence == cache.sequence.handle]
    row.device_bytes, row.host_bytes = mine[0].device_bytes, mine[0].host_bytes
    cache.close()


def divergence(truth: list[Array], got: list[Array]) -> float:
    """Mean KL(truth || got) in nats."""
    total = 0.0
    for a, b in zip(truth, got):
        p, q = log_softmax(a[None].astype(np.float64))[0], log_softmax(b[None].astype(np.float64))[0]
        total += float((np.exp(p) * (p - q)).sum())
    return total / len(truth)


def compare(engine: Engine, session: kvstrata.Session, row: Row, reference: Row,
            ids: list[int], surprisal: Array) -> None:
    """Feeds full's answer under the plan, with `full` beside it on the same queries."""
    with contextlib.ExitStack() as stack:
        pair = []
        for text in (row.text, "full"):
            cache = engine.open(text, ids)
            stack.callback(cache.close)
            engine.prefill(cache, ids, known=surprisal)
            cache.sequence.settle()
            pair.append(cache)
        shadow = ShadowCache(session, *pair)
        progress = stack.enter_context(bar(row.name, "token"))
        same, answer = 0, reference.tokens
        for t, token in enumerate(answer[:-1]):
            row.logits.append(engine.step(shadow, token))
            same += int(row.logits[-1].argmax()) == answer[t + 1]
            progress(t + 1, len(answer) - 1)
    recall, error = np.stack(shadow.recalls), np.stack(shadow.errors)
    row.tokens_read = statistics.fmean(shadow.tokens_read)
    row.bytes_read = statistics.fmean(shadow.bytes_read)
    row.recall, row.recall_low = float(recall.mean()), float(np.percentile(recall, 5))
    row.error, row.agreement = float(error.mean()), same / (len(answer) - 1)
    row.kl = divergence(reference.logits, row.logits)
    if row is not reference:
        row.logits.clear()
    row.pages = shadow.pages


def megabytes(n: int) -> str:
    return f"{n / 1e6:.1f} MB"


def table(rows: list[Row], context: int) -> str:
    head = ["plan", "KV tokens read", "MB read", "mass recall", "5 % worst", "output error", "KL", "top-1 as full", "ms a token",
            "device", "host"]
    body = [[r.name, f"{r.tokens_read:.0f} ({r.tokens_read / context:.0%})", f"{r.bytes_read / 1e6:.1f}",
             f"{r.recall:.3f}",
             f"{r.recall_low:.3f}", f"{r.error:.3f}", f"{r.kl:.3f}", f"{r.agreement:.0%}",
             f"{statistics.median(r.step_ms):.0f}", megabytes(r.device_bytes), megabytes(r.host_bytes)]
            for r in rows]
    widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
    line = lambda cells: "  ".join([cells[0].ljust(widths[0]),
                                    *(x.rjust(w) for x, w in zip(cells[1:], widths[1:]))])
    return "\n".join([line(head), "  ".join("-" * w for w in widths), *map(line, body)])


def write_results(path: str, rows: list[Row], context: int, commit: str, date: str) -> None:
    kept = [{"id": f"demo/{r.name}", "plan": r.name, "tokens": context, "batch": 1,
             "value": statistics.median(r.step_ms), "unit": "ms", "n": len(r.step_ms),
             "accuracy": {"KV tokens read a step": r.tokens_read, "MB_read": r.bytes_read / 1e6, "mass_recall": r.recall,
                          "mass_recall_p5": r.recall_low, "output_error": r.error, "KL": r.kl,
                          "top-1_as_full": r.agreement, "ms_a_token": statistics.median(r.step_ms),
                          "device_MB": r.device_bytes / 1e6, "host_MB": r.host_bytes / 1e6}}
            for r in rows]
    result = {"suite": "demo", "device": device_name(), "commit": commit, "date": date,
              "command": "make demo", "ceilings": {}, "rows": kept,
              "context": {"notes": "SmolLM2-135M-Instruct Q4_1 on the GPL-3 text; " + "; ".join(r.text for r in rows)}}
    pathlib.Path(path).write_text(json.dumps(result, indent=1) + "\n")


def read_document(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError as error:
        raise SystemExit(f"demo: DOC={path}: {error.strerror}; give the path of a text file") from error
    if not text.strip():
        raise SystemExit(f"demo: DOC={path} is empty; give the path of a text file")
    return text


def run(engine: Engine, socket: str, document: str, question: str, out: pathlib.Path) -> tuple[list[Row], int]:
    with (kvstrata.attach(socket, client_name="demo", timeout_ms=30000) as session,
          kvstrata.grpc.Client(socket) as client):
        engine.attach(session)
        ids, kept = prompt_of(engine, document, question)
        status = client.status()
        print(f"kvstratad {status.version} ({status.backend}) holds the keys and values of "
              f"{engine.llama.config.name}; {kept} tokens of the document, prompt of {len(ids)}\n"
              f"question: {question}", flush=True)
        surprisal = np.zeros(len(ids), np.float32)
        prompt = prefill(engine, ids, surprisal)
        rows = plans(len(ids))
        for row in rows:
            write_answer(engine, row, ids, surprisal, client)
        print("\nEach plan again on the tokens of full's answer, with full beside it:", flush=True)
        for row in rows:
            compare(engine, session, row, rows[0], ids, surprisal)
        prompt.close()
    print(f"\n{table(rows, len(ids) + ANSWER)}\n")
    for row in rows:
        print(textwrap.shorten(f"{row.name}: {row.text}", 160)
              + (f" [{row.status}]" if row.status != "ok" else ""))
    out.mkdir(parents=True, exist_ok=True)
    target = out / "pages.png"
    picture.draw(target, [(f"{r.name}: {r.tokens_read:.0f} tokens a step, mass recall {r.recall:.3f}", r.pages)
                          for r in rows], prompt.sequence.model.page_tokens)
    print(f"\npages that each step read: {target.resolve()}")
    return rows, len(ids) + ANSWER


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--socket", default=os.environ.get("KVSTRATA_SOCKET"))
    parser.add_argument("--pre-rope", action="store_true",
                        help="hand over keys and queries before rotary embedding; the daemon's side rotates")
    parser.add_argument("--json-out")
    parser.add_argument("--commit", default="uncommitted")
    parser.add_argument("--date", default="")
    args = parser.parse_args()
    begin = time.perf_counter()
    document = read_document(os.environ.get("DOC") or DOCUMENT)
    question = os.environ.get("ASK") or QUESTION
    with bar("load", "layer") as progress:
        engine = Engine.load(model_path(), progress, args.pre_rope)
    with contextlib.ExitStack() as stack:
        socket = args.socket or stack.enter_context(Daemon()).socket
        rows, context = run(engine, socket, document, question,
                            pathlib.Path(os.environ.get("DEMO_OUT", "demo-output")))
    if args.json_out:
        write_results(args.json_out, rows, context, args.commit, args.date)
    print(f"whole run: {time.perf_counter() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (GgufError, DownloadError, kvstrata.KvstrataError) as problem:
        sys.exit(f"demo: {problem}")
    except KeyboardInterrupt:
        sys.exit(130)
