#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Proves docs/design.md's walks: every function that they name is defined in the file that they
say, with its class; of the calls of "The way of a page" also that each calls the next one.

A walk is a numbered list below a heading of the third level. Each of its items is one function:
1. `Class::Function` (`path/of/its.cc`): a clause. A walk of "Four walks" has at most ten.

In "The way of a page" the function before an item calls it, unless the item says who does. It says
so between file and colon:

    , by 3                  item 3, in which the way is again
    , out of `F` (`f.cc`)   the function before calls F, of that file, which names the item: a table
                            of functions, or what is to follow on something
    , in `kvs-x` by `Q`     handed over to that thread: both bodies name the queue Q
    , in `kvs-x` by `P` and `T`   the same: the body before names P, which puts, this one T
    , in `kvs-x`            after one of the first two: the call is made in that thread

A thread is one of design.md's section "Threads". The first item may say its own. A walk there has
at most 18 calls, hand-overs included; its heading says how many, and how many threads are named:
### To disk: 18 calls, 2 threads

Usage: check_walks.py ROOT. Prints what is wrong; ends with `N functions, N failed`.
"""
import dataclasses
import pathlib
import re
import sys

import tree_sitter

import cpp_measures

SECTION = r"^## {}$(.*?)(?=^## |\Z)"
WALK = re.compile(r"^### (.+?)$(.*?)(?=^### |\Z)", re.DOTALL | re.MULTILINE)
ITEM = re.compile(r"^\d+\. (.+)$", re.MULTILINE)
FUNCTION = re.compile(r"^`([\w:~]+)` \(`([\w./-]+)`\)([^:]*(?:::[^:]*)*): \S")
MARK = re.compile(r"(?:, by (?P<by>\d+))?(?:, out of `(?P<table>[\w:]+)` \(`(?P<file>[\w./-]+)`\))?"
                  r"(?:, in `(?P<thread>[\w-]+)`(?: by `(?P<put>\w+)`(?: and `(?P<take>\w+)`)?)?)?")
SHORT, WAYS = "Four walks", "The way of a page"
WALKS = 4
MOST = 10
MOST_CALLS = 18
NO_CODE = re.compile(r'//[^\n]*|"(?:\\.|[^"\\\n])*"')
BODIES = tree_sitter.Query(cpp_measures.LANGUAGE, "(function_definition) @function")


@dataclasses.dataclass
class Source:
    text: str
    bodies: dict  # qualified name of a function: the texts of all its definitions


def source_of(path):
    raw = path.read_bytes()
    # Every byte keeps its place, and some macros have calls for arguments.
    tree = tree_sitter.Parser(cpp_measures.LANGUAGE).parse(cpp_measures.without_attributes(raw))
    bodies = {}
    for node in tree_sitter.QueryCursor(BODIES).captures(tree.root_node).get("function", ()):
        if body := node.child_by_field_name("body"):
            text = NO_CODE.sub(" ", raw[body.start_byte:body.end_byte].decode(errors="replace"))
            bodies.setdefault(cpp_measures.qualified_name(node), []).append(text)
    return Source(NO_CODE.sub(" ", raw.decode(errors="replace")), bodies)


def walks(text, section=SHORT):
    """{title of a walk: [texts of its items]} of a section of the design's text."""
    found = re.search(SECTION.format(section), text, re.DOTALL | re.MULTILINE)
    return {title: ITEM.findall(body) for title, body in WALK.findall(found.group(1))} if found else {}


class Walk:
    """The items of a walk, read once; `wrong` says what is."""

    def __init__(self, root, items, threads):
        self.root, self.threads, self.sources, self.wrong, self.items = root, threads, {}, [], []
        for item in items:
            self.read(item)

    def source(self, path):
        if path not in self.sources:
            file = self.root / path
            self.sources[path] = source_of(file) if file.is_file() else None
        return self.sources[path]

    def read(self, item):
        function = FUNCTION.match(item)
        if not function:
            self.wrong.append(f"not `Function` (`file`): a clause: {item}")
            return
        name, path, mark = function.groups()
        source = self.source(path)
        if source is None:
            self.wrong.append(f"{name}: there is no {path}")
        elif name not in source.bodies:
            self.wrong.append(f"{name}: not defined in {path}")
        self.items.append((name, mark, source.bodies.get(name, []) if source else []))

    def threads_named(self):
        return {mark["thread"] for _, text, _ in self.items if (mark := MARK.fullmatch(text))} - {None}

    def check_calls(self):
        for n, (name, mark, bodies) in enumerate(self.items):
            if why := self.not_called(n, name, mark, bodies):
                self.wrong.append(f"{name}: {why}")

    def not_called(self, n, name, text, bodies):
        """Why nothing proves that the function before item n leads to it; None: it does."""
        mark = MARK.fullmatch(text)
        if not mark:
            return f"unknown mark '{text}'"
        if mark["thread"] and mark["thread"] not in self.threads:
            return f"there is no thread {mark['thread']}"
        if n == 0:
            return None
        before, before_bodies = self.items[n - 1][0], self.items[n - 1][2]
        if mark["by"]:
            if not 0 < int(mark["by"]) <= n:
                return f"item {mark['by']} does not come before it"
            before, before_bodies = self.items[int(mark["by"]) - 1][::2]
        simple = name.split("::")[-1]
        if mark["put"]:
            return handed_over(before, before_bodies, bodies, mark["put"], mark["take"] or mark["put"])
        if not mark["table"]:
            return None if calls(before_bodies, simple) else f"{before} does not call it"
        if not calls(before_bodies, mark["table"].split("::")[-1]):
            return f"{before} does not call {mark['table']}"
        table = self.source(mark["file"])
        if table is None or mark["table"] not in table.bodies:
            return f"{mark['table']}: not defined in {mark['file']}"
        return None if names([table.text], simple) else f"{mark['file']} does not name it"


def calls(bodies, name):
    return names(bodies, name, r"\s*(?:<[^;(]*>)?\(")


def names(bodies, name, then=r"\b"):
    return any(re.search(rf"\b{name}{then}", body) for body in bodies)


def handed_over(before, before_bodies, bodies, put, take):
    if not names(before_bodies, put):
        return f"{before} does not name {put}"
    return None if names(bodies, take) else f"it does not name {take}"


def failures(root, text, counted):
    found = walks(text)
    if len(found) != WALKS:
        yield f"{len(found)} walks in the section \"{SHORT}\", they are {WALKS}"
    for title, items in found.items():
        if not 0 < len(items) <= MOST:
            yield f"{title}: {len(items)} functions, at most {MOST} and not none"
        walk = Walk(root, items, ())
        counted.append(len(items))
        yield from (f"{title}: {c}" for c in walk.wrong)
    section = re.search(SECTION.format("Threads"), text, re.DOTALL | re.MULTILINE)
    threads = set(re.findall(r"`(kvs-[\w-]+)`", section.group(1))) if section else set()
    for title, items in walks(text, WAYS).items():
        if len(items) > MOST_CALLS + 1:
            yield f"{title}: {len(items) - 1} calls, at most {MOST_CALLS}"
        walk = Walk(root, items, threads)
        named = len(walk.threads_named())
        says = f"{len(items) - 1} calls, {named} thread{'s' if named != 1 else ''}"
        if not title.endswith(f": {says}"):
            yield f"{title}: its heading says other figures than {says}"
        walk.check_calls()
        counted.append(len(items))
        yield from (f"{title}: {c}" for c in walk.wrong)


def main(root):
    root = pathlib.Path(root)
    counted = []
    failed = list(failures(root, (root / "docs" / "design.md").read_text(), counted))
    print("\n".join(failed), end="\n" if failed else "")
    print(f"{sum(counted)} functions, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
