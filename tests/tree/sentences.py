# SPDX-License-Identifier: Apache-2.0
"""Sentences of a Markdown document, and which of them are long. Tables, code, headings and what bench/report.py
writes are not looked at; a list's item is a paragraph of its own; code in a line and a link's target are a word."""
import re

GENERATED = re.compile(r"<!-- (bench|table):.*?<!-- /\1 -->", re.DOTALL)
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
NO_PROSE = re.compile(r"^(#|\||<|!\[| {4,}(?![-*\d]))")
ITEM = re.compile(r"^\s*([-*]|\d+\.)\s+")
CODE = re.compile(r"``.*?``|`[^`]*`", re.DOTALL)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
END = re.compile(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)[)*\"]*\s+(?=[^a-z])")


def paragraphs(text):
    """Texts of paragraphs and of items of lists, each in a line."""
    text = FENCED.sub("\n", GENERATED.sub("\n", text))
    lines, in_list = [], False
    for line in [*text.split("\n"), ""]:
        item = bool(ITEM.match(line))
        in_list = item or in_list and (not line.strip() or line.startswith(" "))
        prose = line.strip() and (in_list and not line.lstrip().startswith("|") or not NO_PROSE.match(line))
        if lines and (item or not prose):
            yield " ".join(lines)
            lines = []
        if prose:
            lines.append(ITEM.sub("", line).strip())


def sentences(text):
    for paragraph in paragraphs(text):
        plain = LINK.sub(r"\1", CODE.sub("CODE", paragraph))
        yield from (s for s in END.split(plain) if s)


def longer_than(limit, text):
    """`N words: BEGINNING ...` of each sentence with more than `limit` words."""
    counted = [(sum(any(c.isalnum() for c in word) for word in s.split()), s) for s in sentences(text)]
    return [f"{words} words: {s[:40]!r}" for words, s in counted if words > limit]
