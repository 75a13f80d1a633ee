#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Proves docs/design.md's three walks: every function that they name is defined in the file that
they say, with its class, and a walk has at most ten.

A walk is a numbered list below a heading of the third level in the section "Three walks". Each of
its items is one function: 1. `Class::Function` (`path/of/its.cc`): a clause.

Usage: check_walks.py ROOT. Prints what is wrong; ends with `N functions, N failed`.
"""
import pathlib
import re
import sys

import cpp_measures

SECTION = re.compile(r"^## Three walks$(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
WALK = re.compile(r"^### (.+?)$(.*?)(?=^### |\Z)", re.DOTALL | re.MULTILINE)
ITEM = re.compile(r"^\d+\. (.+)$", re.MULTILINE)
FUNCTION = re.compile(r"^`([\w:~]+)` \(`([\w./-]+)`\): \S")
WALKS = 3
MOST = 10


def walks(text):
    """{title of a walk: [texts of its items]} of the design's text."""
    section = SECTION.search(text)
    return {title: ITEM.findall(body) for title, body in WALK.findall(section.group(1))} if section else {}


def complaint(root, item):
    """What is wrong with one item; None: nothing."""
    function = FUNCTION.match(item)
    if not function:
        return f"not `Function` (`file`): a clause: {item}"
    name, path = function.groups()
    if not (root / path).is_file():
        return f"{name}: there is no {path}"
    defined = {n for n, _ in cpp_measures.measure((root / path).read_bytes()).functions}
    return None if name in defined else f"{name}: not defined in {path}"


def failures(root, found):
    if len(found) != WALKS:
        yield f"{len(found)} walks in the section \"Three walks\", they are {WALKS}"
    for title, items in found.items():
        if not 0 < len(items) <= MOST:
            yield f"{title}: {len(items)} functions, at most {MOST} and not none"
        yield from (f"{title}: {c}" for c in (complaint(root, item) for item in items) if c)


def main(root):
    root = pathlib.Path(root)
    found = walks((root / "docs" / "design.md").read_text())
    failed = list(failures(root, found))
    print("\n".join(failed), end="\n" if failed else "")
    print(f"{sum(map(len, found.values()))} functions, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
