#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Proves the table of events (proto/events.cc): every event that the code logs has a row, with that level and those
fields, every row is logged, and the table in docs/operations.md, "The log", is what the rows say.

Usage: check_events.py ROOT            checks; prints what is wrong, ends with `N passed, N failed`
       check_events.py ROOT --update   writes the table of docs/operations.md, then checks
"""
import pathlib
import re
import sys

TEXT = r'((?:"(?:[^"\\]|\\.)*"\s*)+)'
ROW = re.compile(r'\{"([a-z_]+)",\s*"([a-z, ]+)",\s*' + TEXT + r',\s*' + TEXT + r'\}')
TABLE = re.compile(r"(<!-- made:events -->\n).*?(<!-- /made -->)", re.DOTALL)
LEVELS = {"kDebug": "debug", "kInfo": "info", "kWarn": "warning", "kError": "error"}
# Names that LogEvent gets from a variable: the calls that pass them on, by the function's name.
PASSED_ON = {"EndSession": ("detached", "hung_up", "died"), "LibraryLog": ("grpc", "protobuf"),
             "Warn": ("remote_forget_failed", "remote_write_failed", "tier_write_failed")}


def text(literals):
    return re.sub(r"\\(.)", r"\1", "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', literals)))


def read_table(root):
    source = (root / "proto/events.cc").read_text()
    return [(m[1], m[2], text(m[3]), text(m[4]).split()) for m in ROW.finditer(source)]


def arguments(source, at):
    """Those of the call whose parenthesis ends before `at`."""
    depth, found = 0, [""]
    while depth > 0 or source[at] != ")":
        depth += {"(": 1, "{": 1, ")": -1, "}": -1}.get(source[at], 0)
        if source[at] == "," and depth == 0:
            found.append("")
        else:
            found[-1] += source[at]
        at += 1
    return [argument.strip() for argument in found]


def read_code(root):
    """name -> (levels, fields) of what is logged by name; names that are passed on."""
    logged, passed = {}, set()
    for path in sorted((root / "server").rglob("*")):
        if path.suffix not in (".cc", ".h") or path.name in ("log.cc", "log.h"):
            continue
        source = path.read_text()
        for call in re.finditer(r"\bLogEvent\(", source):
            level, name, *rest = arguments(source, call.end())
            if re.fullmatch(r'"[a-z_]+"', name) and rest:
                levels, fields = logged.setdefault(name.strip('"'), (set(), set()))
                levels.update(LEVELS[word] for word in re.findall(r"LogLevel::(k\w+)", level))
                fields.update(re.findall(r'\{\s*"(\w+)"\s*,', rest[0]))
        for function, names in PASSED_ON.items():
            for call in re.finditer(rf"\b{function}(?:\s\w+)?\(", source):
                passed |= set(re.findall(r'"([a-z_]+)"', ",".join(arguments(source, call.end())[:3]))) & set(names)
    return logged, passed


def render(rows):
    out = ["| event | level | when | fields |", "| --- | --- | --- | --- |"]
    out += [f"| `{name}` | {level} | {meaning} | {' '.join(f'`{field}`' for field in fields)} |"
            for name, level, meaning, fields in rows]
    return "\n".join(out) + "\n"


def faults(rows, logged, passed):
    names = [row[0] for row in rows]
    yield from (f"{name}: is logged, and has no row in proto/events.cc" for name in sorted(logged) if name not in names)
    for name, level, meaning, fields in rows:
        if name not in logged and name not in passed:
            yield f"{name}: has a row, and nothing logs it"
        if not meaning.endswith("."):
            yield f"{name}: its meaning is no sentence"
        levels, keys = logged.get(name, (set(), set(fields)))
        if levels and levels != set(level.split(", ")):
            yield f"{name}: is logged as {sorted(levels)}, and its row says {level}"
        if keys != set(fields):
            yield f"{name}: its fields are {sorted(keys)}, and its row says {sorted(fields)}"


def main():
    root = pathlib.Path(sys.argv[1])
    page = root / "docs" / "operations.md"
    rows = read_table(root)
    made = TABLE.sub(lambda m: m[1] + render(rows) + m[2], page.read_text())
    if "--update" in sys.argv:
        page.write_text(made)
    wrong = list(faults(rows, *read_code(root)))
    if page.read_text() != made or "<!-- made:events -->" not in made:
        wrong.append("docs/operations.md is not what the table says: tests/tree/check_events.py . --update")
    for line in wrong:
        print(line)
    print(f"{len(rows) + 1 - len(wrong)} passed, {len(wrong)} failed")
    return 1 if wrong or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
