#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes a file of bench/results of rows that calls of run.sh left in $OUT.

    kept.py --suite vllm-gpu-plans --device "NVIDIA H200" --commit COMMIT --date DATE --json-out FILE ROWS.jsonl ...

A row is a part, a case and an engine: the median in milliseconds; and sequences that a GPU holds, with their tokens a
second. Its baseline is the first engine of the same file that
has the case; ratio: the baseline's median over this one's. A row that several files have is the first one's: name those of
the newest commit first.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
from typing import Any

# Names of parts, and what they are called here where that differs: a prompt that nobody holds is "fresh", however it was asked.
PARTS = {name: name for name in ("fresh", "hits", "first", "load", "decode", "steps", "arrive", "shared")} | {"tax": "fresh"}
_ARRIVED = slice(60, 260)  # steps of `arrive` from the prompt's arrival on


def cases_of(rows: list[dict[str, Any]]) -> dict[tuple[Any, ...], dict[str, list[float]]]:
    """Sorted milliseconds by engine, of each (part, tokens, batch); those of conversations have no tokens."""
    cases: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for row in rows:
        if row["part"] in PARTS:
            name = " ".join([PARTS[row["part"]], *([row["kind"]] if row["part"] == "arrive" else [])])
            case = name, row.get("tokens", 0), row.get("batch", 1)
            values = row["steps"][_ARRIVED] if row["part"] == "arrive" else row["seconds"]
            cases.setdefault(case, {})[row["engine"]] = sorted(1e3 * value for value in values)
        elif row["part"] == "arrivals" or row["part"] == "trace" and not row["shape"]:
            firsts = sorted(1e3 * value for value in row["seconds"])
            cases.setdefault((f"{row['part']}, first token", 0, 1), {})[row["engine"]] = firsts
            cases.setdefault((f"{row['part']}, all", 0, 1), {})[row["engine"]] = [1e3 * row["total_s"]]
    return cases


def results_of(rows: list[dict[str, Any]], suite: str) -> list[dict[str, Any]]:
    kept = []
    for (part, tokens, batch), engines in cases_of(rows).items():
        first = next(iter(engines))
        base = statistics.median(engines[first])
        for engine, values in engines.items():
            value = statistics.median(values)
            case = f"/{-(-tokens // 1024)}K x {batch}" if tokens else ""
            row = {"id": f"{suite}/{part}{case}/{engine.removeprefix('plan:')}", "value": value,
                   "unit": "ms", "p10": values[len(values) // 10], "p90": values[len(values) * 9 // 10], "n": len(values),
                   "tokens": tokens, "batch": batch, "better": "smaller"}
            if engine != first:
                row |= {"baseline": {"name": first, "value": base}, "ratio": base / value}
            kept.append(row)
    return kept


def capacity_of(rows: list[dict[str, Any]], suite: str) -> list[dict[str, Any]]:
    """Two rows an engine; over the first engine's."""
    found = [row for row in rows if row["part"] == "capacity"]
    kept = []
    for what, unit in (("sequences", "sequences"), ("tokens a second", "tokens/s")):
        values = [row["sequences"] / (1 if what == "sequences" else statistics.median(row["seconds"])) for row in found]
        for row, value in zip(found, values):
            tokens, engine = row["tokens"], row["engine"].removeprefix("plan:")
            kept.append({"id": f"{suite}/capacity, {what}/{-(-tokens // 1024)}K/{engine}", "value": value, "unit": unit,
                         "n": len(row["seconds"]), "tokens": tokens, "better": "larger"})
            if row is not found[0]:
                kept[-1] |= {"baseline": {"name": found[0]["engine"], "value": values[0]}, "ratio": value / values[0]}
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("suite", "device", "commit", "date", "json-out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--notes", default="")
    parser.add_argument("--command", default="bench/vllm_gpu/run.sh")
    parser.add_argument("rows", nargs="+", type=pathlib.Path)
    given = parser.parse_args()
    rows = [json.loads(line) for path in given.rows for line in path.read_text().splitlines()]
    versions = sorted({row["version"] for row in rows if "version" in row})
    notes = f"vLLM {', '.join(versions)}; Llama-3.1-8B's shape, random weights of sharp attention, bf16. {given.notes}"
    found: dict[str, dict[str, Any]] = {}
    for path in given.rows:
        rows_of_file = [json.loads(line) for line in path.read_text().splitlines()]
        for row in (*results_of(rows_of_file, given.suite), *capacity_of(rows_of_file, given.suite)):
            found.setdefault(row["id"], row)
    cases = [row_id.rpartition("/")[0] for row_id in found]  # a case's rows side by side, in the order they came in
    ordered = sorted(found.values(), key=lambda row: cases.index(row["id"].rpartition("/")[0]))
    pathlib.Path(given.json_out).write_text(json.dumps({
        "suite": given.suite, "device": given.device, "commit": given.commit, "date": given.date,
        "command": given.command, "ceilings": {}, "context": {"notes": notes.strip()}, "rows": ordered}, indent=1) + "\n")


if __name__ == "__main__":
    main()
