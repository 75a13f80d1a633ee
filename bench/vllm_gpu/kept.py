#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes a file of bench/results of rows that calls of run.sh left in $OUT.

    kept.py --suite vllm-gpu-plans --device "NVIDIA H200" --commit COMMIT --date DATE --json-out FILE ROWS.jsonl ...

A row is a part, a case and an engine: the median in milliseconds. Its baseline is the first engine that has the case, in
whichever of the files; give only files from one machine. ratio: the baseline's median over this one's.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
from typing import Any

PARTS = ("fresh", "hits", "first", "load", "decode")


def cases_of(rows: list[dict[str, Any]]) -> dict[tuple[Any, ...], dict[str, list[float]]]:
    """Sorted milliseconds by engine, of each (part, tokens, batch)."""
    cases: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for row in rows:
        if row["part"] in PARTS:
            case = row["part"], row["tokens"], row.get("batch", 1)
            cases.setdefault(case, {})[row["engine"]] = sorted(1e3 * value for value in row["seconds"])
    return cases


def results_of(rows: list[dict[str, Any]], suite: str) -> list[dict[str, Any]]:
    kept = []
    for (part, tokens, batch), engines in cases_of(rows).items():
        first = next(iter(engines))
        base = statistics.median(engines[first])
        for engine, values in engines.items():
            value = statistics.median(values)
            row = {"id": f"{suite}/{part}/{-(-tokens // 1024)}K x {batch}/{engine.removeprefix('plan:')}", "value": value,
                   "unit": "ms", "p10": values[len(values) // 10], "p90": values[len(values) * 9 // 10], "n": len(values),
                   "tokens": tokens, "batch": batch, "better": "smaller"}
            if engine != first:
                row |= {"baseline": {"name": first, "value": base}, "ratio": base / value}
            kept.append(row)
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
    given_rows = results_of(rows, given.suite)
    pathlib.Path(given.json_out).write_text(json.dumps({
        "suite": given.suite, "device": given.device, "commit": given.commit, "date": given.date,
        "command": given.command, "ceilings": {}, "context": {"notes": notes.strip()}, "rows": given_rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
