# SPDX-License-Identifier: Apache-2.0
"""Lists of `kvstrata` against a real daemon with everything in it: on a terminal of 80 columns no line wraps,
and every row still says what it is; wide, csv and name have all of it."""

from __future__ import annotations

import csv
import io
import json
import pathlib
import re
import subprocess
from collections.abc import Iterator

import pytest
from operated import DEADLINE_S, LONG_FOLDER, MODEL, Program, operated

import kvstrata

WIDTH = 80


@pytest.fixture(scope="module")
def live() -> Iterator[tuple[Program, kvstrata.Sequence]]:
    with operated() as (program, sequence):
        yield program, sequence


@pytest.fixture(scope="module")
def cli(live: tuple[Program, kvstrata.Sequence]) -> Program:
    return live[0]


def rows_of(cli: Program, *words: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(cli.run(*words, "-o", "csv"))))


def first_list(lines: list[str]) -> list[str]:
    """A second one is behind an empty line."""
    return lines[:lines.index("")] if "" in lines else lines


def test_every_list_has_rows(cli: Program) -> None:
    """Else the other tests would say nothing. No work is left once nothing waits for it."""
    assert [words for words in cli.lists() if not cli.names(*words)] in ([["work", "ls"]], [])


def test_no_line_wraps(cli: Program) -> None:
    for words in cli.lists():
        lines = cli.on_terminal(*words, columns=WIDTH)
        assert lines and max(map(len, lines)) <= WIDTH, (words, lines)
    wide = [words for words in cli.lists()
            if max(map(len, cli.on_terminal(*words, "-o", "wide", columns=WIDTH))) > WIDTH]
    assert len(wide) >= 10, f"lists that are too short to show anything: {wide}"


def test_rows_keep_their_names(cli: Program) -> None:
    """On a terminal that has no room for anything else."""
    for words in cli.lists():
        if words[0] in ("pool", "quota", "events"):  # called otherwise, with a row of defaults, and never the same
            continue
        shown = first_list(cli.on_terminal(*words, columns=20))[1:]
        for name, line in zip(cli.names(*words), shown, strict=True):
            cell = line.split()[0]
            assert cell == name or (cell.endswith("...") and name.startswith(cell[:-3])), (words, name, line)


def test_headers_are_words(cli: Program) -> None:
    for words in cli.lists():
        header = rows_of(cli, *words)[0]
        assert all(re.fullmatch(r"[A-Z0-9/_-]+", name) for name in header), header
        if words != ["quota", "ls"]:  # its csv has each number in a column of its own
            wide = cli.on_terminal(*words, "-o", "wide", columns=WIDTH)
            assert wide[0].split() == header, words


def test_a_pipe_has_every_column(cli: Program) -> None:
    """A script that counts columns must not depend on how long a model's name is, unless it says so."""
    for words in cli.lists():
        if words != ["quota", "ls"]:
            assert cli.run(*words).splitlines()[0].split() == rows_of(cli, *words)[0], words
        assert max(map(len, cli.run(*words, COLUMNS=str(WIDTH)).splitlines())) <= WIDTH, words


def test_verbs_that_do_something_have_the_same_forms(cli: Program, tmp_path: pathlib.Path) -> None:
    dumped = first_list(cli.on_terminal("debug", "dump", str(tmp_path / "one"), columns=WIDTH))
    *rows, written = dumped
    assert max(map(len, rows)) <= WIDTH and "LEFT-OUT-BECAUSE" in rows[0] and str(tmp_path) in written, dumped
    header, *rows = rows_of(cli, "debug", "dump", str(tmp_path / "two"))
    assert all(re.fullmatch(r"[A-Z0-9/_-]+", name) for name in header), header
    assert {row[0] for row in rows} == {path.name for path in (tmp_path / "two").iterdir()}
    assert rows_of(cli, "log", "level") == [["LEVEL", "BEFORE"], ["info", "info"]]
    assert cli.names("log", "level") == ["info"] and cli.run("log", "level", "-o", "wide") == "info\n"
    assert cli.run("config", "reload", "-o", "wide") == "no key changed\n"


def test_csv_has_the_documents_values(cli: Program) -> None:
    document = json.loads(cli.run("seq", "ls", "-o", "json"))["sequences"]
    header, *rows = rows_of(cli, "seq", "ls")
    for row, sequence in zip(rows, document, strict=True):
        cells = dict(zip(header, row, strict=True))
        assert cells["MODEL"] == MODEL and cells["DEVICE"] == str(sequence["device_bytes"]), cells
        assert cells["SEQUENCE"] == str(sequence["sequence"]), cells
    assert [row[0] for row in rows_of(cli, "seq", "ls", "--no-headers")] == [row[0] for row in rows]
    header, row = rows_of(cli, "status")
    assert row[header.index("PID")] == str(json.loads(cli.run("status", "-o", "json"))["pid"])
    users = json.loads(cli.run("quota", "ls", "-o", "json"))["users"]
    header, _, *rows = rows_of(cli, "quota", "ls")
    assert [row[header.index("DEVICE")] for row in rows] == [str(user["used"]["device_bytes"]) for user in users]
    assert max(user["used"]["device_bytes"] for user in users) > 0


def test_csv_has_no_units(cli: Program) -> None:
    """Any list's has microseconds and bytes, which programs reckon with."""
    for words in [*cli.lists(), ["status"], ["tier", "show"], ["session", "ls"]]:
        if words[0] in ("config", "explain", "events"):  # the operator's own texts, and sentences
            continue
        for row in rows_of(cli, *words):
            for cell in row:
                assert not re.fullmatch(r"[\d.]+ ?([um]?s|[KMGT]?i?B|%)|(\d+[dhms]){1,2}", cell), (words, cell, row)
    header, *rows = rows_of(cli, "session", "ls")
    document = json.loads(cli.run("session", "ls", "-o", "json"))["sessions"]
    assert all(int(row[header.index("LAST-STEP")]) >= 0 for row in rows) and len(rows) == len(document)
    assert {"true", "false"} >= {row[header.index("FENCED")] for row in rows}


def test_values_say_where_they_are_beside_a_short_key(cli: Program) -> None:
    header, *lines = cli.on_terminal("value", "ls", columns=WIDTH)
    assert {"KEY", "KIND", "MODEL", "BYTES", "TIERS"} <= set(header.split()), header
    keys = cli.names("value", "ls")
    assert max(map(len, keys)) == 64
    for line, key in zip(lines, keys, strict=True):
        cell = line.split()[0]
        assert len(cell) >= 20 and (cell == key or key.startswith(cell[:-3])), (line, key)
    assert all(key in cli.run("value", "ls", "-o", form) for key in keys for form in ("wide", "csv", "json"))


def test_a_long_path_leaves_room_for_the_disks_state(cli: Program) -> None:
    for words, wanted in ((["tier", "ls"], {"PATH", "STATE", "DROPPED", "ERRORS", "DEGRADED"}),
                          (["status"], {"DISK", "CAPACITY", "DEGRADED"})):
        lines = cli.on_terminal(*words, columns=WIDTH)
        header = next(line for line in lines if wanted <= set(line.split()))
        row = lines[lines.index(header) + 1]
        assert max(map(len, lines)) <= WIDTH and "..." in row, lines
    (tier,) = json.loads(cli.run("tier", "ls", "-o", "json"))["tiers"]
    header, row = rows_of(cli, "tier", "ls")
    assert row[header.index("STATE")] == ("degraded" if tier["degraded"] or tier["breaker_open"] else "serving"), row
    assert row[0] == tier["path"] and row[0].endswith(LONG_FOLDER)


def test_top_in_a_pipe_fits_its_line(cli: Program) -> None:
    for width in (80, 40):
        lines = cli.run("top", "--once", "-d", "10ms", "--ascii", COLUMNS=str(width)).splitlines()
        assert lines and max(map(len, lines)) <= width, lines
    assert lines[0].endswith("..."), lines[0]


def test_top_has_no_rows_for_programs(cli: Program) -> None:
    for form in ("csv", "name"):
        done = subprocess.run([cli.path, "top", "-o", form], env=cli.environment, capture_output=True, text=True,
                              timeout=DEADLINE_S, stdin=subprocess.DEVNULL, check=False)
        assert done.returncode == 2 and "INTERNAL" not in done.stderr, done
        assert "USAGE" in done.stderr and "json" in done.stderr and "next: kvstrata top --help" in done.stderr, done


def test_help_folds(cli: Program) -> None:
    """All but its examples, which are there to be copied."""
    for words in ([], ["tier"], ["value", "get"], ["explain"], ["tier", "probe"], ["lookup"]):
        whole = cli.run(*words, "--help")
        assert max(map(len, whole.splitlines())) > WIDTH, words
        folded = cli.run(*words, "--help", COLUMNS=str(WIDTH))
        lines = [line for line in folded.splitlines() if not line.startswith("  kvstrata ")]
        assert max(map(len, lines)) <= WIDTH, (words, lines)
        assert "".join(whole.split()) == "".join(folded.split()), words  # and says the same


def test_names_go_through_pipes(cli: Program) -> None:
    line = f"set -o pipefail; {cli.path} seq ls -o name | xargs -n 1 {cli.path} seq show -o name"
    shown = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=DEADLINE_S,
                           env=cli.environment, check=False)
    assert shown.returncode == 0 and shown.stdout.splitlines() == cli.names("seq", "ls"), shown
    assert cli.names("health") == ["serving"]
    assert cli.names("pool", "ls") == ["emulated", "host"]


def test_records_fold_below_their_values(cli: Program) -> None:
    number = cli.names("seq", "ls")[-1]
    for words in (["seq", "show", number], ["status"], ["explain", "POOL_EXHAUSTED"]):
        lines = cli.on_terminal(*words, columns=WIDTH)
        assert lines and max(map(len, lines)) <= WIDTH, (words, lines)
        whole = cli.on_terminal(*words, "-o", "wide", columns=WIDTH)
        assert words[0] == "status" or max(map(len, whole)) > WIDTH, "nothing that had to fold"
    shown = json.loads(cli.run("seq", "show", number, "-o", "json"))
    begin = next(i for i, line in enumerate(cli.on_terminal("seq", "show", number, columns=WIDTH))
                 if line.startswith("PLAN "))
    folded = cli.on_terminal("seq", "show", number, columns=WIDTH)[begin:]
    values = [line[len(re.match(r"\S* +", line)[0]):] if i == 0 else line.strip() for i, line in enumerate(folded)]
    assert " ".join(values).replace(", ", ",").replace(" ", "").startswith(shown["plan_text"].replace(" ", ""))


def test_it_says_why_a_plan_attends_everything(live: tuple[Program, kvstrata.Sequence]) -> None:
    """In the words of the sequence's own status, which the engine's process makes."""
    cli, sequence = live
    shown = {row["sequence"]: row for row in json.loads(cli.run("seq", "ls", "-o", "json"))["sequences"]}
    short = shown.pop(sequence.handle)
    assert short["in_full"] == sequence.status == "attends in full: 200 tokens are fewer than min_tokens = 4096"
    assert short["break_even_tokens"] > 0
    (full,) = shown.values()
    assert full["in_full"] == "attends in full: its selector is full" and full["break_even_tokens"] == 0
    table = cli.run("seq", "show", str(sequence.handle))
    assert re.search(r"^ATTENDS +attends in full: 200 tokens are fewer than min_tokens = 4096$", table, re.MULTILINE)
    assert re.search(rf"^BREAK-EVEN +{short['break_even_tokens']} tokens$", table, re.MULTILINE), table
