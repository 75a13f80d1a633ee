#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Proves the table of metrics (server/telemetry/metric_table.cc): /metrics tells every row and nothing else, names
follow Prometheus' conventions, and docs/metrics.md is what the table says.

Usage: check_metrics.py ROOT            checks; prints what is wrong, ends with `N passed, N failed`
       check_metrics.py ROOT --update   writes docs/metrics.md, then checks
"""
import pathlib
import re
import sys

TEXT = r'((?:"(?:[^"\\]|\\.)*"\s*)+)'
ROW = re.compile(r'\{"(\w+)",\s*k(Counter|Gauge|Histogram),\s*"(\w*)",\s*"([\w,]*)",\s*' + TEXT + r'\}')
SECTION = re.compile(r"^    // --- (.*)$", re.MULTILINE)
TOLD = re.compile(r'->Add\(\s*"(\w+)"')
# A name ends in its unit where it is one of Prometheus' base units, a counter's in _total.
BASE_UNITS = ("bytes", "seconds", "ratio")
# Names that Prometheus gave.
CONVENTIONAL = ("process_open_fds", "process_max_fds")
HEAD = """# Metrics

What `/metrics` of `http.listen` tells, in Prometheus' text format or, if it is asked for, in OpenMetrics. This document
is made from `server/telemetry/metric_table.cc` by `tests/tree/check_metrics.py . --update`;
[operations.md](operations.md#metrics-and-probes) says how to scrape; `docker/prometheus` has rules and `docker/grafana` a
dashboard that are made of these.

Every series is there from the start, at 0. Names of users are at most 32, whoever comes first, and of servers of the
remote tier at most 64, those of the configuration first; the rest is `other` together. All other labels have the values of a table. Counters begin with the daemon. Numbers of the store and the
disk are at most a second old: they are looked up once a second, however often somebody scrapes.
"""


def text(literals):
    parts = re.findall(r'"((?:[^"\\]|\\.)*)"', literals)
    return re.sub(r"\\(.)", r"\1", "".join(parts))


def read_table(root):
    """(section, name, type, unit, labels, help) of each row."""
    source = (root / "server/telemetry/metric_table.cc").read_text()
    sections = [(m.start(), m[1]) for m in SECTION.finditer(source)]
    return [(max((s for s in sections if s[0] < m.start()), default=(0, ""))[1], m[1], m[2].lower(), m[3],
             [label for label in m[4].split(",") if label], text(m[5])) for m in ROW.finditer(source)]


def read_told(root):
    return {name for path in sorted((root / "server/web").glob("*.cc")) for name in TOLD.findall(path.read_text())}


def render(rows):
    out = [HEAD]
    for section in dict.fromkeys(row[0] for row in rows):
        out += [f"## {section[0].upper()}{section[1:]}", "", "| metric | type | unit | labels | meaning |",
                "| --- | --- | --- | --- | --- |"]
        out += [f"| `{name}` | {kind} | {unit} | {', '.join(f'`{label}`' for label in labels)} | {meaning} |"
                .replace("|  |", "| |").replace("|  |", "| |")
                for where, name, kind, unit, labels, meaning in rows if where == section]
        out.append("")
    return "\n".join(out).rstrip() + "\n"


def faults(name, kind, unit, meaning):
    if not re.match(r"^(kvstrata|process)_[a-z0-9_]+$", name):
        yield "its name is not kvstrata_... in small letters"
    if (kind == "counter") != name.endswith("_total"):
        yield "a counter's name ends in _total, and no other's does"
    bare = name.removesuffix("_total")
    if unit in BASE_UNITS and not bare.endswith("_" + unit):
        yield f"its name does not end in its unit, {unit}"
    if any(bare.endswith("_" + u) and unit != u for u in BASE_UNITS) and name not in CONVENTIONAL:
        yield "its name ends in a unit that it does not have"
    if not meaning.endswith("."):
        yield "its help is no sentence"


def main():
    root = pathlib.Path(sys.argv[1])
    page = root / "docs" / "metrics.md"
    rows = read_table(root)
    if "--update" in sys.argv:
        page.write_text(render(rows))
    names = [row[1] for row in rows]
    told = read_told(root)
    wrong = [f"{n}: {fault}" for _, n, kind, unit, _, meaning in rows for fault in faults(n, kind, unit, meaning)]
    wrong += [f"{n}: has {names.count(n)} rows" for n in sorted(set(names)) if names.count(n) > 1]
    wrong += [f"{n}: /metrics does not tell it" for n in names if n not in told]
    wrong += [f"{n}: has no row" for n in sorted(told) if n not in names]
    if not page.exists() or page.read_text() != render(rows):
        wrong.append("docs/metrics.md is not what the table says: tests/tree/check_metrics.py . --update")
    for line in wrong:
        print(line)
    print(f"{len(rows) + 1 - len(wrong)} passed, {len(wrong)} failed")
    return 1 if wrong or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
