#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What each plan loses and reads on a real trace, and kvstrata's own plan at equal bytes.

    bench/fidelity.py [--document NAME | --trace FILE] [--steps N] [--json-out FILE] [--commit HASH]
                      [--date DATE]

Without --trace SmolLM2-135M-Instruct reads a document (7.7K tokens, four layers recorded) into
build/DOCUMENT.safetensors, once: the GPL-3 text, what Python documents of its language, or one of four that no rule was
made by (TEXTS). Replays every preset,
each plan at a tenth of the tokens, and beside each paper's preset `bits` with the budget that makes it read as many
bytes a step (attention and selection): where its index fits into them.
Everything goes through `kvstrata replay` on a daemon of its own.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import pathlib
import pydoc_data.topics
import subprocess
import sys
import sysconfig

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "integrations" / "kvstrata" / "src"), str(ROOT / "integrations" / "kvstrata_numpy" / "src")]

from kvstrata.daemon import Daemon  # noqa: E402
from kvstrata.machine import device_name  # noqa: E402

CLI = ROOT / "build" / "bin" / "kvstrata"
# Recorded layers. The last four came when the rule of `bits` stood.
DOCUMENTS = {"gpl-3": "0,9,19,29", "pydoc": "3,12,21,27", "code": "2,10,18,28", "licence": "1,7,16,25",
             "table": "5,13,20,26", "docstrings": "4,11,22,29"}
LAYERS, KV_HEADS, ROW_PAIR = 4, 3, 256  # the trace's; bytes of a key and a value of 64 x bf16
ALWAYS = 4 + 64                         # tokens that bits always attends
PRESETS = ["quest", 'chess{trigger = "every"}', "tokenselect", "sentencekv", "sekv{max_loss = 1}", "mosaickv{max_loss = 1}"]


def _library(name: str) -> str:
    return pathlib.Path(sysconfig.get_path("stdlib"), name).read_text()


def _docstrings(name: str) -> str:
    described = (ast.FunctionDef, ast.ClassDef, ast.Module)
    return "\n\n".join(ast.get_docstring(node) or "" for node in ast.walk(ast.parse(_library(name))) if isinstance(node, described))


TEXTS = {"pydoc": lambda: "\n\n".join(body for _, body in sorted(pydoc_data.topics.topics.items())),
         "code": lambda: _library("argparse.py"),
         "licence": lambda: "".join(pathlib.Path("/usr/share/common-licenses", name).read_text()
                                    for name in ("MPL-1.1", "LGPL-2.1")),
         "table": lambda: _library("html/entities.py"),
         "docstrings": lambda: _docstrings("turtle.py") + _docstrings("difflib.py")}


def tenth(tokens: int) -> dict[str, str]:
    """Each plan at a tenth of the tokens."""
    n = tokens // 10
    return {"quest": f"quest{{budget = {n // 16 * 16}}}",
            "chess": 'chess{trigger = "every", window = 4, rho = [0.5, 0.5, 0.3]}',
            "tokenselect": f"tokenselect{{k = {n - 192}, n_init = 64, n_local = 128}}",
            "sentencekv": f"sentencekv{{tau = {n - 64}}}",
            "sekv": "sekv{max_loss = 1, rows_share = 0.1}",
            "mosaickv": "mosaickv{max_loss = 1, share = 0.1}",
            "bits": f"bits{{budget = {n - ALWAYS}}}"}


def trace_of(document: str, *, reading: bool = False) -> pathlib.Path:
    """The document's trace; recorded if it is not there (two minutes). reading: most of it as decode steps."""
    path = ROOT / "build" / f"{document}{'-reading' if reading else ''}.safetensors"
    if path.exists():
        return path
    path.parent.mkdir(exist_ok=True)
    tokens = ["--tokens", "2048", "--steps", "5888", "--read"] if reading else ["--tokens", "7936", "--steps", "128"]
    command = [sys.executable, "-m", "kvstrata_numpy.trace", "--out", str(path), *tokens, "--tail", "64",
               "--layers", DOCUMENTS[document]]
    if document in TEXTS:
        text = path.with_name(f"{document}.txt")
        text.write_text(TEXTS[document]())
        command += ["--doc", str(text)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path[:2])})
    return path


def replay(socket: str, trace: pathlib.Path, steps: int | None, plans: list[str]) -> list[dict]:
    """Reports of the plans over the first `steps` steps; None: over all."""
    arguments = [str(CLI), "--socket", socket, "--timeout", "120s", "replay", str(trace), "-o", "json"]
    if steps is not None:
        arguments += ["--steps", str(steps)]
    for plan in plans:
        arguments += ["--plan", plan]
    done = subprocess.run(arguments, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"replay failed: {done.stdout}{done.stderr}")
    return json.loads(done.stdout)["plans"][1:]  # the first is full, the reference


def read_bytes(report: dict) -> float:
    cost = report["cost_per_step"]
    return cost["attend_bytes"] + cost["select_bytes"]


def bits_at(total: float, select: float) -> str:
    """Plan bits with the budget that reads `total` bytes a step, `select` of them to choose; "": none does."""
    budget = int((total - select) / (LAYERS * KV_HEADS * ROW_PAIR)) - ALWAYS
    return f"bits{{budget = {budget}}}" if budget >= 1 else ""


def mean(value: object) -> float | None:
    return value.get("mean") if isinstance(value, dict) else value


def row(identifier: str, report: dict, **more: object) -> dict:
    accuracy = {name: mean(report.get(name)) for name in
                ("mass_recall", "output_error", "selection_error", "codec_error", "oracle_overlap")}
    accuracy = {k: v for k, v in accuracy.items() if v is not None}
    accuracy["KB_a_step_and_layer"] = read_bytes(report) / LAYERS / 1e3
    return {"id": identifier, "plan": report["plan"], "value": accuracy["output_error"], "unit": "relative L2",
            "accuracy": accuracy, "status": report["status"], **more}


def compare(socket: str, trace: pathlib.Path, steps: int) -> list[dict]:
    presets = replay(socket, trace, steps, [*PRESETS, "bits"])
    select = presets[-1]["cost_per_step"]["select_bytes"]
    rivals = [bits_at(read_bytes(p), select) for p in presets[:-1]]
    ours = iter(replay(socket, trace, steps, [r for r in rivals if r]))
    rows = []
    for preset, rival in zip(presets, rivals):
        name = preset["plan"].split("{")[0]
        rows.append(row(f"preset/{name}", preset))
        if rival:
            mine = next(ours)
            rows.append(row(f"preset/{name}/bits at equal bytes", mine,
                            baseline={"name": name, "value": rows[-1]["value"]},
                            ratio=rows[-1]["value"] / mine["output_error"]["mean"], must=1.0))
    rows.append(row("preset/bits", presets[-1]))
    tokens = int(presets[0]["held_tokens"])
    for name, report in zip(tenth(tokens), replay(socket, trace, steps, list(tenth(tokens).values()))):
        rows.append(row(f"10 %/{name}", report))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--document", choices=sorted(DOCUMENTS), default="gpl-3")
    parser.add_argument("--trace", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--json-out")
    parser.add_argument("--commit", default="uncommitted")
    parser.add_argument("--date", default="")
    args = parser.parse_args()
    trace = args.trace or trace_of(args.document)
    with Daemon() as daemon:
        rows = compare(daemon.socket, trace, args.steps)
    for r in rows:
        a = r["accuracy"]
        print(f"{r['id']:44} recall {a['mass_recall']:.3f}  error {a['output_error']:.4f}  "
              f"{a['KB_a_step_and_layer']:8.0f} KB" + (f"  {r['ratio']:.2f}x smaller" if "ratio" in r else ""))
    if args.json_out:
        pathlib.Path(args.json_out).write_text(json.dumps(
            {"suite": "fidelity" if args.document == "gpl-3" else f"{args.document}-fidelity",
             "device": device_name(), "commit": args.commit, "date": args.date,
             "command": f"bench/fidelity.py --document {args.document}", "ceilings": {},
             "context": {"notes": f"SmolLM2-135M-Instruct, {trace.name}, layers {DOCUMENTS[args.document]}, {args.steps} steps; "
                                  + "; ".join(f"{r['id']}: {r['plan']} [{r['status']}]" for r in rows)},
             "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
