#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What `max_missed` holds, and what it reads against a fixed budget that holds as much, on ten documents.

    bench/missed.py [--missed X] [--limit X] [--documents NAME,..] [--json-out FILE] [--commit HASH] [--date DATE]

SmolLM2-135M-Instruct reads 4800 tokens of a document and then the next 64 as decode steps; all layers are recorded
into build/missed/DOCUMENT.safetensors, once (2 minutes each, 115 MB). `bits{max_missed = X}` decodes these steps
on a daemon of its own while `kvstrata audit --recall` measures every one: 1 - recall is what it missed, a mean over
layers, query heads and steps. The smallest `budget` (in steps of 32 tokens) that misses at most --limit, by replay, is
what it is compared with, by the bytes that choosing and attending read.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import pydoc_data.topics
import random
import subprocess
import sys
import sysconfig

from fidelity import ROOT, Daemon, device_name, read_bytes, replay

import kvstrata
from kvstrata.grpc import Client
from kvstrata_numpy import trace as traces

PROMPT, STEPS = 4800, 64
LICENCES = pathlib.Path("/usr/share/common-licenses")
STANDARD = pathlib.Path(sysconfig.get_path("stdlib"))
COARSE = (128, 256, 512, 1024, 1536, 2048, 3072, 4096)
FINE = 32


def table() -> str:
    """Made up, the same every time."""
    draw = random.Random(1)
    rows = ["day,station,temperature,pressure,wind,rain"]
    for i in range(400):
        rows.append(f"{i // 3 + 1},{('north', 'coast', 'ridge')[i % 3]},{draw.gauss(11, 6):.1f},"
                    f"{draw.gauss(1013, 9):.0f},{draw.expovariate(1 / 14):.1f},{max(0, draw.gauss(-1, 4)):.1f}")
    return "\n".join(rows)


def texts(*paths: pathlib.Path) -> str:
    return "\n".join(path.read_text() for path in paths)


DOCUMENTS = {
    "gpl-3": lambda: texts(LICENCES / "GPL-3"),
    "gfdl-1.3": lambda: texts(LICENCES / "GFDL-1.3"),
    "mpl-1.1": lambda: texts(LICENCES / "MPL-1.1"),
    "topics": lambda: "\n\n".join(body for _, body in sorted(pydoc_data.topics.topics.items())),
    "argparse": lambda: texts(STANDARD / "argparse.py"),
    "turtle": lambda: texts(STANDARD / "turtle.py"),
    "operations": lambda: texts(ROOT / "docs" / "operations.md"),
    "shm_layout": lambda: texts(ROOT / "docs" / "shm_layout.md"),
    "selectors": lambda: texts(*sorted((ROOT / "kernels" / "select").glob("*.cc"))),
    "table": table,
}


def trace_of(document: str) -> pathlib.Path:
    """The document's trace; recorded if it is not there."""
    path = ROOT / "build" / "missed" / f"{document}.safetensors"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    text = path.with_suffix(".txt")
    text.write_text(DOCUMENTS[document]()[:60000])
    subprocess.run([sys.executable, "-m", "kvstrata_numpy.trace", "--out", str(path), "--tokens", str(PROMPT),
                    "--steps", str(STEPS), "--read", "--tail", "64", "--doc", str(text)], check=True,
                   env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path[:2])})
    return path


def audited(socket: str, path: pathlib.Path, plan: str) -> tuple[float, list[float]]:
    """What the plan misses, by an audit of every step: the mean, and the mean of each layer."""
    trace = traces.read(path)
    shape = trace[f"k.{trace.layers[0]}"].shape
    with kvstrata.Session(socket) as session, Client(socket) as client:
        model = session.register_model(
            name="recorded", digest=trace.metadata["digest"], layers=len(trace.layers),
            query_heads=int(trace.metadata["query_heads"]), kv_heads=shape[1], head_dim=shape[2],
            page_tokens=int(trace.metadata["page_tokens"]))
        with session.open(model, plan) as sequence:
            feed(session, sequence, trace, 0, trace.prompt)
            sequence.prefill_done()
            answers = client.audit_recall(sequence.handle, 1, trace.steps, timeout=600)
            next(answers)
            for t in range(trace.prompt, trace.prompt + trace.steps):
                feed(session, sequence, trace, t, t + 1)
            *_, last = answers
    if (last.steps, last.dropped_steps) != (trace.steps, 0):
        raise SystemExit(f"{path}: {last.steps} of {trace.steps} steps were sampled, {last.dropped_steps} dropped")
    return 1 - last.all.recall.mean, [1 - row.recall.mean for row in last.layers]


def feed(session: kvstrata.Session, sequence: kvstrata.Sequence, trace: traces.Trace, first: int, end: int) -> None:
    """Tokens [first, end): a step over the prompt, which asks nothing, or a decode step."""
    with session.step([(sequence, trace["tokens"][first:end])]) as step:
        for at, layer in enumerate(trace.layers):
            step.append(at, trace[f"k.{layer}"][first:end], trace[f"v.{layer}"][first:end])
            if first:
                row = first - trace.prompt + trace.tail
                step.attend(at, trace[f"q.{layer}"][row:row + 1])


def missed_of(report: dict) -> float:
    return 1 - report["mass_recall"]["mean"]


def smallest_budget(socket: str, path: pathlib.Path, limit: float) -> tuple[int, dict]:
    """The smallest fixed budget, a multiple of FINE, that misses at most `limit`, and its report."""
    budgets = COARSE
    while True:
        reports = replay(socket, path, None, [f"bits{{budget = {b}}}" for b in budgets])
        holding = [i for i, r in enumerate(reports) if missed_of(r) <= limit]
        if not holding:
            raise SystemExit(f"{path}: no budget up to {budgets[-1]} misses at most {limit}")
        at = holding[0]
        below = budgets[at - 1] if at > 0 else 0
        if budgets[at] - below <= FINE:
            return budgets[at], reports[at]
        step = max(FINE, (budgets[at] - below) // 8 // FINE * FINE)
        budgets = tuple(range(below + step, budgets[at], step)) + (budgets[at],)
        if at > 0:
            budgets = (below, *budgets)


def compare(socket: str, document: str, missed: float, limit: float) -> list[dict]:
    """A row of what is missed, and one of what is read."""
    path, plan = trace_of(document), f"bits{{max_missed = {missed:g}}}"
    loss, layers = audited(socket, path, plan)
    report = replay(socket, path, None, [plan])[0]
    if abs(missed_of(report) - loss) > 1e-4:
        raise SystemExit(f"{document}: the audit says {loss:.5f}, replay {missed_of(report):.5f}")
    budget, fixed = smallest_budget(socket, path, limit)
    ratio, rival = read_bytes(report) / read_bytes(fixed), f"bits{{budget = {budget}}}"
    rows = [{"id": f"{document}/missed", "plan": plan, "value": loss, "unit": "of attention, audited", "must": limit,
             "better": "smaller", "layers": layers, "baseline": {"name": rival, "value": missed_of(fixed)}},
            {"id": f"{document}/read", "plan": plan, "value": read_bytes(report) / 1e6, "unit": "MB a step",
             "ratio": ratio, "must": 1.1, "better": "smaller", "tokens": report["kv_tokens_per_step"],
             "ms_per_step": report["ms_per_step"]["median"],
             "baseline": {"name": rival, "value": read_bytes(fixed) / 1e6,
                          "ms_per_step": fixed["ms_per_step"]["median"]}}]
    print(f"{document:12} missed {loss:.4f} (layers {min(layers):.4f} .. {max(layers):.4f})  "
          f"{read_bytes(report) / 1e6:6.1f} MB a step; budget {budget:4} misses {missed_of(fixed):.4f} at "
          f"{read_bytes(fixed) / 1e6:6.1f} MB: {ratio:.2f}x", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--missed", type=float, default=0.01)
    parser.add_argument("--limit", type=float, help="that a budget must hold; 1.2 times --missed if not given")
    parser.add_argument("--documents", default=",".join(DOCUMENTS))
    parser.add_argument("--json-out")
    parser.add_argument("--commit", default="uncommitted")
    parser.add_argument("--date", default="")
    args = parser.parse_args()
    limit = args.limit or 1.2 * args.missed
    with Daemon() as daemon:
        rows = [row for document in args.documents.split(",")
                for row in compare(daemon.socket, document, args.missed, limit)]
    worst = max(row["value"] for row in rows if "ratio" not in row)
    most = max(row["ratio"] for row in rows if "ratio" in row)
    print(f"at most {worst:.4f} missed, at most {most:.2f}x the bytes")
    if args.json_out:
        pathlib.Path(args.json_out).write_text(json.dumps(
            {"suite": "missed", "device": device_name(), "commit": args.commit, "date": args.date,
             "command": f"bench/missed.py --missed {args.missed:g}", "ceilings": {},
             "context": {"notes": f"SmolLM2-135M-Instruct, {PROMPT} + {STEPS} tokens, all layers; every step audited"},
             "rows": rows}, indent=1) + "\n")
    return 0 if worst <= limit and most <= 1.1 else 1


if __name__ == "__main__":
    sys.exit(main())
