# SPDX-License-Identifier: Apache-2.0
"""Finds references of documents and comments to what the repository does not have.

A reference is a relative link or image of Markdown, the anchor of a link to a heading, a path that
begins with a top-level folder, or the name of a document that readers do not have. A path counts
from the root, from the folder of the file that names it, or from client/include. `*` and `{a,b}`
mean any and each; NAME stands for anything. Without an extension it is a folder, or how the names
of files begin. Arguments: `root` is absolute and without links, `file` is relative to it.
"""
import glob
import itertools
import pathlib
import re

FOLDERS = ("base", "bench", "client", "cmake", "docker", "docs", "integrations", "kernels", "proto",
           "server", "session", "tests")
# Where notes of this project lie that are no part of it: nothing may lead a reader there.
OUTSIDE = ("spec", "shared", "reference")
OUTSIDE_DOCUMENTS = re.compile(r"\b(?:DECISIONS|DESIGN|TREE)\b")
PATH = re.compile(r"(?<![\w/.~$<>{}@:-])(?:" + "|".join(FOLDERS + OUTSIDE) + r")/[\w./*{},-]*[\w*}-]")
EXTENSION = re.compile(r"\.[a-z0-9]+$")
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
FENCE = re.compile(r"^[ ]{0,3}(```|~~~).*?^[ ]{0,3}\1[^\n]*$", re.DOTALL | re.MULTILINE)
CODE_SPAN = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
HEADING = re.compile(r"^ {0,3}#{1,6}\s+(.*?)\s*#*\s*$", re.MULTILINE)


def dangling_in_markdown(root, file):
    """Texts of the dangling references of one Markdown file, in order."""
    text = (root / file).read_text()
    prose = CODE_SPAN.sub("", FENCE.sub("", text))
    targets = [m.group(1) for m in LINK.finditer(prose)]
    found = [t for t in targets if link_dangles(root, file, t)]
    return found + dangling_in_text(root, file, LINK.sub("", text))


def dangling_in_text(root, file, text):
    """Texts of the paths and documents that `text`, a comment of `file`, names in vain."""
    found = [m.group() for m in PATH.finditer(text)
             if path_dangles(root, file, m.group(), text[m.end():m.end() + 1])]
    return found + OUTSIDE_DOCUMENTS.findall(text)


def link_dangles(root, file, target):
    if re.match(r"[a-z][a-z0-9+.-]*:", target):
        return False
    path, _, anchor = target.partition("#")
    there = ((root / file).parent / path).resolve() if path else root / file
    if not there.exists() or not there.is_relative_to(root):
        return True
    return bool(anchor) and there.suffix == ".md" and anchor not in anchors(there.read_text())


def anchors(text):
    """Anchors of the headings of a Markdown text, as GitHub makes them, and those in HTML."""
    text = FENCE.sub("", text)
    found = set(re.findall(r"<a\s+(?:name|id)=\"([^\"]+)\"", text))
    for heading in HEADING.findall(text):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        repeated = (f"{slug}-{i}" for i in itertools.count(1))
        found.add(next(s for s in itertools.chain([slug], repeated) if s not in found))
    return found


def path_dangles(root, file, path, after):
    if path.split("/")[0] not in OUTSIDE and after and after in "<$":
        return False  # The rest of the name is a placeholder.
    for one in expanded(path):
        pattern = re.sub(r"\bNAME\b", "*", one)
        if not EXTENSION.search(pattern):
            pattern += "*"
        bases = (root, (root / file).parent, root / "client" / "include")
        if not any(matches(base, pattern) for base in bases):
            return True
    return False


def matches(base, pattern):
    """Whether a file or folder has a path of this pattern, which `base` leads to."""
    if "*" not in pattern:
        return (base / pattern).exists()
    return next(glob.iglob(str(pathlib.Path(glob.escape(str(base))) / pattern)), None) is not None


def expanded(path):
    """The paths that a{b,c}d stands for."""
    group = re.search(r"\{([^{}]*)\}", path)
    if not group:
        return [path]
    return [p for choice in group.group(1).split(",")
            for p in expanded(path[:group.start()] + choice + path[group.end():])]
