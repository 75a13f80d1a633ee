#!/usr/bin/env python3
"""Makes the tables of README.md and docs from bench/results/*.json (shared format: docs/results.md).

Usage: bench/report.py [--check]
A document asks for a table by a pair of comments:
    <!-- bench:SUITE [ids=PREFIX,...] -->
    <!-- /bench -->
Everything between them is replaced. --check only says whether a document is out of date (exit 1).
A suite without a result file gives a line that says how to make one; nothing is ever typed by hand.
"""
import argparse
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"<!-- bench:(\S+)(?: ids=(\S+))? -->\n.*?<!-- /bench -->", re.DOTALL)


def number(x):
    if x is None:
        return ""
    return f"{x:.0f}" if abs(x) >= 100 else f"{x:.3g}"


def verdict(row):
    """"" without a goal, else whether `must` was met; a row without a baseline compares its value."""
    if "must" not in row:
        return ""
    figure = row.get("ratio", row.get("value"))
    met = figure <= row["must"] if row.get("better") == "smaller" else figure >= row["must"]
    sign = "<=" if row.get("better") == "smaller" else ">="
    return f"{'met' if met else 'MISSED'} ({sign} {number(row['must'])})"


def speed_table(result, rows):
    lines = ["| row | value | baseline | ratio | must |", "| --- | --- | --- | --- | --- |"]
    for r in rows:
        base = r.get("baseline")
        against = f"{base['name']} {number(base['value'])}" if base else ""
        lines.append(f"| {r['id']}{'*' if 'commit' in r else ''} | {number(r['value'])} {r['unit']} | {against} | "
                     f"{number(r.get('ratio'))} | {verdict(r)} |")
    return lines


def accuracy_table(result, rows):
    keys = list(dict.fromkeys(k for r in rows for k in r["accuracy"]))
    judged = any("must" in r for r in rows)
    name = (lambda r: r["plan"]) if result["suite"] == "accuracy" else (lambda r: r["id"])
    head = ["plan", *(k.replace("_", " ") for k in keys), *(["ratio", "must"] if judged else [])]
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " --- |" * (len(head) - 1)]
    for r in rows:
        cells = [name(r), *(number(r["accuracy"].get(k)) for k in keys)]
        cells += [number(r.get("ratio")), verdict(r)] if judged else []
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def table(suite, ids):
    results = [json.loads(f.read_text()) for f in sorted((ROOT / "bench/results").glob(f"{suite}-*.json"))]
    results = [r for r in results if r["suite"] == suite]
    if not results:
        return f"No result of suite `{suite}` is kept yet: `make bench` measures one."
    parts = []
    for result in results:
        rows = [r for r in result["rows"] if not ids or any(r["id"].startswith(i) for i in ids)]
        make = accuracy_table if rows and all("accuracy" in r for r in rows) else speed_table
        note = f"{result['device']}, {result['date']}, commit {result['commit'][:10]}; `{result['command']}`"
        older = sorted({r["commit"][:10] for r in rows if "commit" in r})
        note += f"; *: commit {', '.join(older)}" if older else ""
        parts.append("\n".join(make(result, rows) + ["", note]))
    return "\n\n".join(parts)


def rewritten(text):
    def replace(match):
        ids = match[2].split(",") if match[2] else []
        return match[0].split("\n")[0] + "\n" + table(match[1], ids) + "\n<!-- /bench -->"
    return BLOCK.sub(replace, text)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if out of date")
    check = parser.parse_args().check
    stale = []
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = document.read_text()
        new = rewritten(text)
        if new != text:
            stale.append(str(document.relative_to(ROOT)))
            if not check:
                document.write_text(new)
    print("\n".join(("out of date: " if check else "wrote ") + s for s in stale) or "up to date")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
