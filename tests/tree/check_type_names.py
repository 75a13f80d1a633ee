#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Proves that no two files of the GPU tests define a type of the same name in the same namespace.

gpu_tests links them all into one program. Nobody would say a word: the linker keeps one of the two
types' functions, and the other's objects are read with them (docs/testing.md, "GPU"). What stands in
an anonymous namespace of a .cc is its own; in one of a header it is everybody's, and forbidden.

Usage: check_type_names.py ROOT. Prints every name and where it stands; ends with `N types, N failed`.
"""
import collections
import pathlib
import re
import sys

# What gpu_tests compiles, and the headers that it shares with other tests.
FOLDERS = ["tests/cuda", "tests/fakes"]

# Comments, literals and preprocessor lines: nothing in them opens a scope.
NOISE = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"(?P<tag>[^\s()\\]*)\(.*?\)(?P=tag)"|"(?:\\.|[^"\\\n])*"'
    r"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'|^[ \t]*#(?:[^\n\\]|\\.)*", re.DOTALL | re.MULTILINE)
NAMESPACE = re.compile(r"^(?:inline\s+)?namespace\s*(?:\[\[.*?\]\]\s*)?([\w:]*)$")
TYPE = re.compile(r"^(?:typedef\s+)?(?:struct|class|union|enum(?:\s+(?:class|struct))?)\s+"
                  r"(?:(?:\[\[.*?\]\]|alignas\s*\([^)]*\))\s*)*"
                  r"(\w+(?:\s*<.*>)?)(?:\s+final)?\s*(?::(?!:).*)?$", re.DOTALL)


def without_template(statement):
    """template <...> of a declaration dropped; <> within its parameters is balanced."""
    while re.match(r"template\s*<", statement):
        depth, at = 0, statement.index("<")
        for at in range(at, len(statement)):
            depth += {"<": 1, ">": -1}.get(statement[at], 0)
            if depth == 0:
                break
        statement = statement[at + 1:].strip()
    return statement


def types(text):
    """(namespace, type) of each definition outside of types and functions. An anonymous namespace is
    named "(anonymous)"."""
    scopes, statement = [], ""  # a scope: its namespace; None: of something else
    for token in re.split(r"([{};])", NOISE.sub(" ", text)):
        if token not in ("{", "}", ";"):
            statement += token
            continue
        declared, statement = without_template(" ".join(statement.split())), ""
        if token == "}":
            scopes = scopes[:-1]
        if token != "{":
            continue
        namespace, kind = NAMESPACE.match(declared), TYPE.match(declared)
        if kind and None not in scopes:
            yield "::".join(scopes), kind.group(1)
        if namespace:
            scopes.append(namespace.group(1) or "(anonymous)")
        else:
            scopes.append("" if declared == "extern" else None)  # extern "C"


def main(root):
    root = pathlib.Path(root)
    found = collections.defaultdict(set)
    failed = 0
    for file in sorted(p for folder in FOLDERS for p in (root / folder).rglob("*")
                       if p.suffix in (".h", ".cc", ".cu", ".cuh")):
        for namespace, name in types(file.read_text()):
            where = str(file.relative_to(root))
            if "(anonymous)" not in namespace:
                found[f"{namespace}::{name}"].add(where)
            elif file.suffix in (".h", ".cuh"):
                failed += 1
                print(f"{namespace}::{name} in the header {where}")
    for name, files in sorted(found.items()):
        if len(files) > 1:
            failed += 1
            print(f"{name} in {', '.join(sorted(files))}")
    print(f"{len(found)} types, {failed} failed")
    return 1 if failed or not found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
