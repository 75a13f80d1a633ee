#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Proves the limits of the tree: lines of a function and of a header, declarations of a class, virtual functions of an interface,
files of a folder, words of a document's sentence; that no document or comment refers to what the repository does not have, and
that no comment begins with "of" (docs/testing.md, "Limits").

What exceeds a limit today stands in tests/tree/exceeded.toml with its figure, and has to keep it.

Usage: check_limits.py ROOT            checks; prints the ten worst of each kind
       check_limits.py ROOT --update   lowers figures and removes lines of exceeded.toml, then checks
       check_limits.py ROOT --print    prints the text of an exceeded.toml of today's figures
"""
import collections
import os
import pathlib
import re
import sys

import check_owners
import comments
import cpp_measures
import exceeded
import python_measures
import references
import sentences

LIMITS = {"function": 60, "header": 300, "class": 40, "interface": 6, "folder": 25, "dangling": 0, "sentence": 0, "of": 0}
WORDS = 30
UNITS = {"function": "lines", "header": "lines", "class": "declarations", "interface": "virtual functions", "folder": "files",
         "dangling": "references of a file to what is not there",
         "sentence": f"sentences of a document with more than {WORDS} words",
         "of": "comments of a file that begin with \"of\" and so name no subject"}
WORST = 10
# Whose files count: folders of what is built for users. The CLI is flat: a noun is a file.
ROOMS = re.compile(r"^(server|kernels|client(?!/cli))(/|$)")
# Whose sentences count; specifications, decisions and notes are not among them.
DOCUMENTS = re.compile(r"^(docs/[^/]+|README|CONTRIBUTING)\.md$")

CPP = (".h", ".cc", ".cu", ".cuh", ".c")
HEADERS = (".h", ".cuh")
# How comments look in what is neither C++ nor Python.
HASH_COMMENT = re.compile(r"(?:^|\s)#.*", re.MULTILINE)
SLASH_COMMENT = re.compile(r"//.*")
OTHER_COMMENTS = {".cmake": HASH_COMMENT, "CMakeLists.txt": HASH_COMMENT, ".sh": HASH_COMMENT,
                  "Makefile": HASH_COMMENT, ".toml": HASH_COMMENT, ".yaml": HASH_COMMENT,
                  ".Dockerfile": HASH_COMMENT, ".apt": HASH_COMMENT, ".proto": SLASH_COMMENT}
# The line that every source has and that does not count.
LICENCE = b"SPDX-License-Identifier"
# Built, generated and installed files.
LEFT_OUT_FOLDERS = re.compile(r"^(build.*|dist|\..*|venv.*|__pycache__|.*\.egg-info|demo-output|shared)$")
LEFT_OUT_FILES = re.compile(r"_pb2(_grpc)?\.pyi?$|\.pb\.(h|cc)$|^exceeded\.toml$")


class Figures:
    """What was measured. Of functions of one name in a file the second is called `NAME #2`."""

    def __init__(self):
        self.of = {kind: {} for kind in LIMITS}  # kind -> what -> figure
        self.named = {"dangling": {}, "sentence": {}, "of": {}}  # kind -> file -> texts
        self.unparsed = []

    def add(self, kind, file, named):
        seen = collections.Counter()
        for name, figure in named:
            seen[name] += 1
            number = f" #{seen[name]}" if seen[name] > 1 else ""
            self.of[kind][f"{file}: {name}{number}"] = figure

    def count(self, file):
        """One more file of its folder."""
        folder = str(file.parent)
        if ROOMS.match(folder):
            self.of["folder"][folder] = self.of["folder"].get(folder, 0) + 1

    def note(self, kind, file, texts):
        if texts:
            self.named[kind][str(file)] = texts
            self.of[kind][str(file)] = len(texts)


def files(root):
    """Paths of the sources and documents, relative to `root`."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if not LEFT_OUT_FOLDERS.match(f))
        for name in sorted(names):
            if not LEFT_OUT_FILES.search(name):
                yield (pathlib.Path(folder) / name).relative_to(root)


def measured(root):
    figures = Figures()
    for file in files(root):
        figures.count(file)
        if file.suffix == ".md":
            dangling = references.dangling_in_markdown(root, file)
        else:
            dangling = [d for comment in texts_of_comments(root, file, figures)
                        for d in references.dangling_in_text(root, file, comment)]
        figures.note("dangling", file, dangling)
        if DOCUMENTS.match(str(file)):
            figures.note("sentence", file, sentences.longer_than(WORDS, (root / file).read_text()))
    return figures


def texts_of_comments(root, file, figures):
    """Texts of the comments of a source, whose functions, classes, interfaces, lines and "of" go into `figures`."""
    if file.suffix in CPP:
        source = (root / file).read_bytes()
        found = cpp_measures.measure(source)
        figures.add("function", file, found.functions)
        figures.add("class", file, found.classes)
        figures.add("interface", file, found.interfaces)
        figures.unparsed += [f"{file}:{line}" for line in found.errors]
        if file.suffix in HEADERS:
            figures.of["header"][str(file)] = sum(LICENCE not in line for line in source.splitlines())
        figures.note("of", file, comments.begin_with_of(found.placed))
        return found.comments
    if file.suffix == ".py":
        source = (root / file).read_text()
        figures.add("function", file, python_measures.functions(source))
        figures.note("of", file, comments.begin_with_of(*comments.in_python(source)))
        return python_measures.comments(source)
    pattern = OTHER_COMMENTS.get(file.suffix) or OTHER_COMMENTS.get(file.name)
    if not pattern:
        return []
    source = (root / file).read_text()
    figures.note("of", file, comments.begin_with_of(comments.in_text(source, pattern)))
    return pattern.findall(source)


def print_worst(figures):
    for kind, limit in LIMITS.items():
        over = len(exceeded.exceeding(figures.of[kind], limit))
        print(f"{kind}: {len(figures.of[kind])} measured, {over} over {limit} {UNITS[kind]}; the worst:")
        worst = sorted(figures.of[kind].items(), key=lambda item: (-item[1], item[0]))
        for what, figure in worst[:WORST]:
            names = f": {', '.join(sorted(set(figures.named[kind][what])))}" if kind == "dangling" else ""
            print(f"  {figure:5} {what}{names}")


def failures(figures, listed):
    for kind, limit in LIMITS.items():
        for complaint in exceeded.complaints(kind, figures.of[kind], limit, listed.get(kind, {})):
            yield f"{kind} {complaint}"
            file = complaint.split(": ")[0]
            if file in figures.named.get(kind, {}):
                says = "names" if kind == "dangling" else "has"
                yield f"  {file} {says} {', '.join(figures.named[kind][file])}"
    for place in figures.unparsed:
        yield f"unparsed {place}: the parser does not understand these lines (cpp_measures.ATTRIBUTES)"
    for section in listed.keys() - LIMITS.keys() - check_owners.LIMITS.keys():
        yield f"exceeded.toml: no kind is called [{section}]"


def sections_of(root, figures, shrink=None):
    """exceeded.toml's sections: of today's figures, or `shrink`, a list, made smaller by them."""
    of = {**figures.of, **check_owners.figures(root)}
    limits = {**LIMITS, **check_owners.LIMITS}
    if shrink is None:
        return {kind: exceeded.exceeding(of[kind], limits[kind]) for kind in of}
    return {kind: exceeded.lowered(of[kind], limits[kind], shrink.get(kind, {})) for kind in of}


def main(root, option=None):
    root = pathlib.Path(root).resolve()
    file = root / "tests" / "tree" / "exceeded.toml"
    figures = measured(root)
    if option == "--print":
        print(exceeded.text_of(sections_of(root, figures)), end="")
        return 0
    if option == "--update":
        file.write_text(exceeded.text_of(sections_of(root, figures, exceeded.read(file))))
    print_worst(figures)
    failed = list(failures(figures, exceeded.read(file)))
    print("\n".join(failed), end="\n" if failed else "")
    count = sum(len(of) for of in figures.of.values())
    print(f"{count} measured, {sum(not f.startswith('  ') for f in failed)} failed")
    return 1 if failed or not count else 0


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or sys.argv[2:] not in ([], ["--update"], ["--print"]):
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
