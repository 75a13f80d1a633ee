#!/usr/bin/env python3
"""Makes the tables of README.md and docs from bench/results/*.json (shared format: docs/results.md).

Usage: bench/report.py [--check]
A document asks for a table by a pair of comments:
    <!-- bench:SUITE[,SUITE...] [ids=PREFIX,...] -->
    <!-- /bench -->
Everything between them is replaced. PREFIX$ is an id, whole; of several suites one table is made.
--check only says whether a document is out of date (exit 1).
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


def speed_table(rows):
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


def asked(ids, row):
    return not ids or any(row["id"] == i[:-1] if i.endswith("$") else row["id"].startswith(i) for i in ids)


def results_of(suite):
    results = [json.loads(f.read_text()) for f in sorted((ROOT / "bench/results").glob(f"{suite}-*.json"))]
    return [r for r in results if r["suite"] == suite]


def note(result, rows):
    older = sorted({r["commit"][:10] for r in rows if "commit" in r})
    return (f"{result['device']}, {result['date']}, commit {result['commit'][:10]}; `{result['command']}`" +
            (f"; *: commit {', '.join(older)}" if older else ""))


def table(suites, ids):
    results = [result for suite in suites.split(",") for result in results_of(suite)]
    if not results:
        return f"No result of suite `{suites}` is kept yet: `make bench` measures one."
    parts = [(result, [r for r in result["rows"] if asked(ids, r)]) for result in results]
    if "," in suites:
        parts = [(result, rows) for result, rows in parts if rows]
        return "\n".join([*speed_table([r for _, rows in parts for r in rows]), "", *(note(*p) + "  " for p in parts)])
    texts = []
    for result, rows in parts:
        lines = (accuracy_table(result, rows) if rows and all("accuracy" in r for r in rows) else speed_table(rows))
        texts.append("\n".join([*lines, "", note(result, rows)]))
    return "\n\n".join(texts)


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
