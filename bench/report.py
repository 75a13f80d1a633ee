#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the tables, figures and plots of README.md and docs from bench/results/*.json (format: docs/results.md).

Usage: bench/report.py [--check]
A document asks by a pair of comments, between which everything is replaced:
    <!-- bench:SUITE[,SUITE...] [ids=PREFIX,...] -->   all rows of a suite; goals in docs/results.md only
    <!-- /bench -->
    <!-- table:NAME -->                                one of report_tables.TABLES
    <!-- /table -->
    <!-- bench=SUITE|ID|ratio --><!-- / -->            one figure, two digits: ratio, value or baseline, or
                                                       value:1000, divided by that. Not at the start of a line
PREFIX$ is an id, whole; of several suites one table is made. Plots (report_plots.PLOTS) lie in docs/images.
--check only says what is out of date (exit 1).
A suite without a result file gives a line that says how to make one; nothing is ever typed by hand.
"""
import argparse
import re
import sys

import kept_results
import report_plots
import report_tables
from kept_results import note, number, results_of

ROOT = kept_results.ROOT
BLOCK = re.compile(r"<!-- bench:(\S+)(?: ids=(\S+))? -->\n.*?<!-- /bench -->", re.DOTALL)
TABLE = re.compile(r"(<!-- table:(\S+) -->\n).*?<!-- /table -->", re.DOTALL)
FIGURE = re.compile(r"(<!-- bench=([^|>]+)\|([^|>]+)\|([^|> ]+) -->)[^<]*<!-- / -->")
GOALS = ROOT / "docs" / "results.md"  # the one document that shows what a row must reach


def verdict(row):
    """"" without a goal, else whether `must` was met; a row without a baseline compares its value."""
    if "must" not in row:
        return ""
    figure = row.get("ratio", row.get("value"))
    met = figure <= row["must"] if row.get("better") == "smaller" else figure >= row["must"]
    sign = "<=" if row.get("better") == "smaller" else ">="
    return f"{'met' if met else 'MISSED'} ({sign} {number(row['must'])})"


def speed_table(rows, goals):
    lines = ["| row | value | baseline | ratio |", "| --- | --- | --- | --- |"]
    lines = [line + (" must |", " --- |")[i] for i, line in enumerate(lines)] if goals else lines
    for r in rows:
        base = r.get("baseline")
        against = f"{base['name']} {number(base['value'])}" if base else ""
        lines.append(f"| {r['id']}{'*' if 'commit' in r else ''} | {number(r['value'])} {r['unit']} | {against} | "
                     f"{number(r.get('ratio'))} |" + (f" {verdict(r)} |" if goals else ""))
    return lines


def accuracy_table(result, rows, goals):
    keys = list(dict.fromkeys(k for r in rows for k in r["accuracy"]))
    compared = any("ratio" in r for r in rows)
    judged = goals and any("must" in r for r in rows)
    name = (lambda r: r["plan"]) if result["suite"] == "demo" else (lambda r: r["id"])
    head = ["plan", *(k.replace("_", " ") for k in keys), *(["ratio"] if compared else []),
            *(["must"] if judged else [])]
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " --- |" * (len(head) - 1)]
    for r in rows:
        cells = [name(r), *(number(r["accuracy"].get(k)) for k in keys)]
        cells += [number(r.get("ratio"))] if compared else []
        cells += [verdict(r)] if judged else []
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def asked(ids, row):
    return not ids or any(row["id"] == i[:-1] if i.endswith("$") else row["id"].startswith(i) for i in ids)


def table(suites, ids, goals):
    results = [result for suite in suites.split(",") for result in results_of(suite)]
    if not results:
        return f"No result of suite `{suites}` is kept yet: `make bench` measures one."
    parts = [(result, [r for r in result["rows"] if asked(ids, r)]) for result in results]
    if "," in suites:
        parts = [(result, rows) for result, rows in parts if rows]
        return "\n".join([*speed_table([r for _, rows in parts for r in rows], goals), "", *(note(*p) + "  " for p in parts)])
    texts = []
    for result, rows in parts:
        lines = (accuracy_table(result, rows, goals) if rows and all("accuracy" in r for r in rows) else
                 speed_table(rows, goals))
        texts.append("\n".join([*lines, "", note(result, rows)]))
    return "\n\n".join(texts)


def rewritten(text, goals):
    def block(match):
        ids = match[2].split(",") if match[2] else []
        return match[0].split("\n")[0] + "\n" + table(match[1], ids, goals) + "\n<!-- /bench -->"

    def named(match):
        return match[1] + "\n".join(report_tables.TABLES[match[2]]()) + "\n<!-- /table -->"

    def figure(match):
        row = kept_results.row_of(match[2], match[3])
        value = kept_results.figure(row, match[4]) if row else None
        return match[1] + (report_tables.NOT_MEASURED if value is None else number(value, 2)) + "<!-- / -->"

    for pattern, replace in ((BLOCK, block), (TABLE, named), (FIGURE, figure)):
        text = pattern.sub(replace, text)
    return text


def made():
    """(file, its text as it should be), of each document and plot."""
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        yield document, rewritten(document.read_text(), document == GOALS)
    for name, draw in report_plots.PLOTS.items():
        yield ROOT / "docs" / "images" / name, draw()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if out of date")
    check = parser.parse_args().check
    stale = []
    for file, text in made():
        if not file.exists() or file.read_text() != text:
            stale.append(str(file.relative_to(ROOT)))
            if not check:
                file.write_text(text)
    print("\n".join(("out of date: " if check else "wrote ") + s for s in stale) or "up to date")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
