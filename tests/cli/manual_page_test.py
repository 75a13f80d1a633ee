#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kvstratad(1) as the daemon prints it: that it has every option of --help, every key of docs/configuration.md, the
exit codes and signals of docs/operations.md, and that groff, where there is one, finds nothing to complain of.

    manual_page_test.py --daemon PATH --docs FOLDER
"""
import argparse
import pathlib
import re
import shutil
import subprocess

DEADLINE_S = 60


def run(*command, **options):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=DEADLINE_S,
                          check=False, **options)
    assert done.returncode == 0, (command, done)
    return done


def section(page, name):
    found = re.search(rf"^\.SH {name}\n(.*?)(?=^\.SH |\Z)", page, re.MULTILINE | re.DOTALL)
    assert found, f"no section {name}"
    return found[1].replace("\\-", "-").replace("\\&", "")


def rows_below(document, heading):
    """Cells of the rows of the first table below the heading, without its two lines of header."""
    text = document.read_text().split(f"\n## {heading}\n", 1)[1]
    lines = text[text.index("\n|") + 1:].split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_options_are_those_of_help(daemon, page, _):
    options = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", run(daemon, "--help").stdout.split("Every key", 1)[0]))
    assert len(options) > 8, options
    told = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", section(page, "OPTIONS")))
    assert options <= told, options - told
    assert "--manual" not in told | options, "what the build calls is in no help"


def test_keys_are_those_of_the_document(_, page, docs):
    source = (docs / "configuration.md").read_text()
    keys = set(re.findall(r"^\| `([a-z]+(?:\.[a-z_]+)*)` \| `(KVSTRATA_[A-Z_]+)` \|", source, re.MULTILINE))
    assert len(keys) > 40, keys
    told = section(page, "CONFIGURATION")
    missing = [key for key, variable in keys if f".B {key}, {variable}\n" not in told]
    assert not missing, missing


def test_exit_codes_are_those_of_the_document_and_of_help(daemon, page, docs):
    rows = rows_below(docs / "operations.md", "Exit codes")
    assert [row[0] for row in rows] == ["0", "1", "2", "3", "4"], rows
    told, help_text = section(page, "EXIT STATUS"), run(daemon, "--help").stdout
    for code, name, _ in rows:
        assert f".B {code} {name}\n" in told and f"{code} {name}" in help_text, (code, name)


def test_signals_are_those_of_the_document(_, page, docs):
    documented = re.findall(r"SIG[A-Z0-9]+", " ".join(row[0] for row in rows_below(docs / "operations.md", "Signals")))
    assert len(documented) > 10, documented
    terms = " ".join(re.findall(r"^\.B (.*)$", section(page, "SIGNALS"), re.MULTILINE))
    assert documented == re.findall(r"SIG[A-Z0-9]+", terms), terms


def test_groff_has_no_complaint(_, page, __):
    if shutil.which("groff") is None:
        print("SKIPPED: groff is not installed")
        return
    done = run("groff", "-man", "-Tutf8", "-ww", "-rLL=80n", "-z", input=page)
    assert not done.stderr, done.stderr


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--daemon", required=True)
    parser.add_argument("--docs", required=True, type=pathlib.Path)
    arguments = parser.parse_args()
    page = run(arguments.daemon, "--manual").stdout
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test(arguments.daemon, page, arguments.docs)
            print(f"ok {name}")


if __name__ == "__main__":
    main()
