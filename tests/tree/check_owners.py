#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Proves that the owners of server/store are a stack: none reaches itself through what it holds, and
none holds more than a few others.

An owner is a class whose header lies in server/store and that holds something by reference. What it
holds are its members that are references, or constant pointers. A struct made of owners or of
references is none: whoever holds one holds all that is in it, so a cycle cannot hide in a struct.
DATA have no rule and call nobody: whoever holds them holds one thing.

What exceeds a limit today stands in tests/tree/exceeded.toml: [cycle], the owners that are in a
cycle; [held], the references of a class.

Usage: check_owners.py ROOT. Prints each cycle and ends with `N owners, N arrows, N failed`.
"""
import pathlib
import re
import sys

import exceeded

FOLDER = "server/store"
LIMITS = {"cycle": 0, "held": 8}  # section of exceeded.toml -> limit
DATA = {"Books"}

COMMENT = re.compile(r"//[^\n]*")
# `struct Store::Parts` counts as Store: whoever holds a Store holds its parts.
TYPE = re.compile(r"^(class|struct)\s+(?:KVS_\w+(?:\([^)]*\))?\s+)?(\w+)(?:::\w+)?[^;{}():]*(?::[^;{}()]*)?\{(.*?)^\};",
                  re.MULTILINE | re.DOTALL)
NAME = r"\s*(?!operator\b)\w+\s*(?:KVS_GUARDED_BY\(\w+\))?\s*(?:=[^;]*|\{[^;]*\})?;"
REFERENCE = re.compile(r"^  (?:const\s+|class\s+|struct\s+)*([\w:]+(?:<[^;&]*>)?)\s*(?:const\s*)?(?:&|\*\s*const\b)"
                       + NAME, re.MULTILINE)
VALUE = re.compile(r"^  (?:const\s+)*([\w:]+(?:<[^;&*]*>)?)" + NAME, re.MULTILINE)


class Classes:
    """What the headers of a folder declare: `references` and `values`, name -> types of members."""

    def __init__(self, folder):
        self.references, self.values, self.structs = {}, {}, set()
        for header in sorted(folder.rglob("*.h")):
            for kind, name, body in TYPE.findall(COMMENT.sub("", header.read_text())):
                self.references[name] = REFERENCE.findall(body)
                self.values[name] = VALUE.findall(body)
                if kind == "struct":
                    self.structs.add(name)
        self.owners = {n for n, of in self.references.items() if of and n not in self.structs}

    def is_bundle(self, name):
        """A struct of owners or of references, which is nobody."""
        return name in self.structs - DATA and bool(
            self.references[name] or self.owners & set(self.values[name]))

    def held_by(self, name):
        """Types of all that `name` holds, each as often as it is held; bundles are opened."""
        found, left, opened = [], list(self.references[name]), set()
        left += [value for value in self.values[name] if self.is_bundle(value)]
        while left:
            one = left.pop()
            if not self.is_bundle(one):
                found.append(one)
            elif one not in opened:
                opened.add(one)
                left += self.references[one] + self.values[one]
        return found

    def arrows(self):
        """Owner -> owners that it holds."""
        return {name: self.owners & set(self.held_by(name)) for name in sorted(self.owners)}


def reached(arrows, start):
    found, left = set(), [start]
    while left:
        for name in arrows[left.pop()] - found:
            found.add(name)
            left.append(name)
    return found


def cycles(arrows):
    """Sets of owners of which each reaches each other of its set, the largest first."""
    reach = {name: reached(arrows, name) for name in arrows}
    found = {frozenset(b for b in arrows if b in reach[a] and a in reach[b]) for a in arrows}
    return sorted((c for c in found if c), key=lambda c: (-len(c), sorted(c)))


def figures(root):
    """Section of exceeded.toml -> what -> figure."""
    classes = Classes(pathlib.Path(root) / FOLDER)
    in_cycles = sum(len(c) for c in cycles(classes.arrows()))
    return {"cycle": {FOLDER: in_cycles},
            "held": {name: len(classes.held_by(name)) for name in sorted(classes.references)
                     if not classes.is_bundle(name)}}


def main(root):
    root = pathlib.Path(root)
    arrows = Classes(root / FOLDER).arrows()
    for cycle in cycles(arrows):
        for name in sorted(cycle):
            print(f"  {name} -> {', '.join(sorted(arrows[name] & cycle))}")
    listed = exceeded.read(root / "tests" / "tree" / "exceeded.toml")
    today = figures(root)
    failed = [f"{kind} {complaint}" for kind, limit in LIMITS.items()
              for complaint in exceeded.complaints(kind, today[kind], limit, listed.get(kind, {}))]
    print("\n".join(failed), end="\n" if failed else "")
    print(f"{len(arrows)} owners, {sum(map(len, arrows.values()))} arrows, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
