# SPDX-License-Identifier: Apache-2.0
"""Comments of a source that begin with "of": they leave out the noun that they are about, so a reader has to guess it
(docs/testing.md, "Limits"). Lines of `//` or `#` below each other are one comment; a field's docstring counts, too."""
import ast
import io
import re
import tokenize

SIGNS = re.compile(r"^(//[/!]*<?|/\*[*!]*<?|#+)\s*")
OF = re.compile(r"\s*of\b(?!:)", re.IGNORECASE)  # `of:` names a parameter
SHOWN = 40


def begin_with_of(placed, docstrings=()):
    """`line N: 'BEGINNING ...'` of each. placed: (line, column, whether it has the line for itself, text) of every
    comment in order, one a line; docstrings: (line, text)."""
    found, last = [], (0, 0, False)  # last: line, column, whether it says anything
    for line, column, alone, text in placed:
        plain = SIGNS.sub("", text)
        if OF.match(plain) and not (alone and last == (line - 1, column, True)):
            found.append((line, plain))
        last = (line, column, bool(plain.strip()))
    found += [(line, text.lstrip()) for line, text in docstrings if OF.match(text)]
    return [f"line {line}: {text.splitlines()[0][:SHOWN]!r}" for line, text in sorted(found)]


def in_text(source, pattern):
    """Places of what `pattern` finds in lines, for begin_with_of; it may match spaces before the comment."""
    for number, line in enumerate(source.split("\n"), 1):
        if match := pattern.search(line):
            text = match.group().lstrip()
            column = match.end() - len(text)
            yield number, column, not line[:column].strip(), text


def in_python(source):
    """(comments, docstrings) for begin_with_of."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    placed = [(*t.start, not t.line[:t.start[1]].strip(), t.string) for t in tokens if t.type == tokenize.COMMENT]
    docstrings = [(node.lineno, node.value.value) for node in ast.walk(ast.parse(source))
                  if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
                  and isinstance(node.value.value, str)]
    return placed, docstrings
