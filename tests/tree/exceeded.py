# SPDX-License-Identifier: Apache-2.0
"""The list of what exceeds a limit today (exceeded.toml), which can only get shorter.

One section for each kind; a line is `"what" = figure`. A listed figure has to be today's: what
grew has to shrink again, what shrank has to be written down as smaller, what is gone is removed.
"""
import json
import tomllib

HEADER = """\
# SPDX-License-Identifier: Apache-2.0
# What exceeds a limit of tests/tree today, with its figure. check_limits and check_owners fail when
# a line's figure is not today's, and when something exceeds that has no line: the list gets shorter.
# `check_limits.py ROOT --update` lowers figures and removes lines; it never raises or adds one.
"""


def read(file):
    """Section -> what -> figure."""
    return tomllib.loads(file.read_text()) if file.exists() else {}


def text_of(sections):
    """The text of exceeded.toml with these sections; empty ones are left out."""
    parts = [HEADER]
    for name, lines in sections.items():
        if lines:
            parts.append(f"\n[{name}]\n" + "".join(line(w, lines[w]) + "\n" for w in sorted(lines)))
    return "".join(parts)


def line(what, figure):
    return f"{json.dumps(what, ensure_ascii=False)} = {figure}"


def exceeding(figures, limit):
    return {what: figure for what, figure in figures.items() if figure > limit}


def lowered(figures, limit, listed):
    """`listed` with figures that fell, without what no longer exceeds; nothing grows or is added."""
    today = exceeding(figures, limit)
    return {what: min(listed[what], today[what]) for what in listed if what in today}


def complaints(kind, figures, limit, listed):
    """What is wrong with `listed`, the section `kind` of exceeded.toml, given today's figures."""
    today = exceeding(figures, limit)
    for what in sorted(today.keys() - listed.keys()):
        yield (f"{what}: {today[what]}, the limit is {limit}; make it smaller (exceptions are lines "
               f"of [{kind}] in tests/tree/exceeded.toml: {line(what, today[what])})")
    for what in sorted(today.keys() & listed.keys()):
        if today[what] > listed[what]:
            yield (f"{what}: grew from {listed[what]} to {today[what]}, the limit is {limit}; make it "
                   f"{listed[what]} or less again (its line in [{kind}]: {line(what, today[what])})")
        elif today[what] < listed[what]:
            yield (f"{what}: shrank from {listed[what]} to {today[what]}; write in [{kind}] of "
                   f"tests/tree/exceeded.toml: {line(what, today[what])}")
    for what in sorted(listed.keys() - today.keys()):
        now = f"is {figures[what]}, within the limit of {limit}" if what in figures else "is gone"
        yield (f"{what}: {now}; remove from [{kind}] of tests/tree/exceeded.toml: "
               f"{line(what, listed[what])}")
