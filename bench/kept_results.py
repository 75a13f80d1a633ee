# SPDX-License-Identifier: Apache-2.0
"""Rows of bench/results/*.json by suite and id (format: docs/results.md)."""
import json
import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Rows that a plan's present rule does not answer for: (suite, commit of its file) -> plans. A suite that is
# measured anew has another commit, so its mark goes by itself.
OLDER = {
    ("cuda-linked", "a1e8c4cb9b"): ("sekv",),
}


def results_of(suite):
    results = [json.loads(f.read_text()) for f in sorted((ROOT / "bench/results").glob(f"{suite}-*.json"))]
    return [r for r in results if r["suite"] == suite]


def result_of(suite):
    """The one result of this suite; None where none is kept. Of two, which is meant must be said: an error."""
    results = results_of(suite)
    if len(results) > 1:
        raise ValueError(f"suite {suite} is kept of {len(results)} devices")
    return results[0] if results else None


def row_of(suite, row_id):
    """The row, or None where it was not measured."""
    rows = (result_of(suite) or {"rows": []})["rows"]
    return next((r for r in rows if r["id"] == row_id), None)


def is_older(suite, plan):
    result = result_of(suite)
    return result is not None and plan in OLDER.get((suite, result["commit"][:10]), ())


def number(x, digits=3):
    """At most this many significant digits, no exponent; "" of None."""
    if x is None:
        return ""
    return f"{x:.0f}" if abs(x) >= 10 ** (digits - 1) else f"{x:.{digits}g}"


def figure(row, expression):
    """`ratio`, `value` or `baseline` of a row, or NAME:1000, divided by that; None where the row has none."""
    name, _, divisor = expression.partition(":")
    x = row.get("baseline", {}).get("value") if name == "baseline" else row.get(name)
    return None if x is None else x / float(divisor or 1)


def note(result, rows=()):
    """What was measured where and when, for the line below a table or a plot."""
    older = sorted({r["commit"][:10] for r in rows if "commit" in r})
    return (f"{result['device']}, {result['date']}, commit {result['commit'][:10]}; `{result['command']}`" +
            (f"; *: commit {', '.join(older)}" if older else ""))
