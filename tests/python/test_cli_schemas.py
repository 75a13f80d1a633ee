# SPDX-License-Identifier: Apache-2.0
"""Every verb with JSON output has a schema under docs/schema, and what it prints of a real daemon is valid."""

from __future__ import annotations

import json
import pathlib
import subprocess
from collections.abc import Iterator

import jsonschema
import pytest
from cli.random_trace import trace_bytes
from cli_schema import FOLDER, check, path_of
from operated import DEADLINE_S, MODEL, Program, operated

import kvstrata

# test_recall_audit.py, test_chunks_operated.py, test_lookup_cluster.py, and below
ELSEWHERE = {"audit --recall", "audit --engine", "lookup --cluster", "error"}
SHARED = {"tier probe", "tier purge"}  # take a remote tier: test_cli_remote.py


@pytest.fixture(scope="module")
def live() -> Iterator[tuple[Program, kvstrata.Sequence]]:
    with operated() as (program, sequence):
        yield program, sequence


@pytest.fixture(scope="module")
def commands(live: tuple[Program, kvstrata.Sequence], tmp_path_factory: pytest.TempPathFactory
             ) -> list[tuple[str, list[str]]]:
    """One line or more for each verb, in an order in which they can run."""
    cli, sequence = live
    folder = tmp_path_factory.mktemp("schemas")
    (folder / "trace.safetensors").write_bytes(trace_bytes(prompt=1200, steps=70, tail=64))
    (folder / "empty.toml").write_text("")
    (folder / "prompt.ids").write_text(" ".join(map(str, range(40))))
    trace, handle, key = str(folder / "trace.safetensors"), str(sequence.handle), cli.names("value", "ls")[0]
    lines = [
        "status", "health", "version", "plan ls", "plan show quest", "model ls", "model show 1", "session ls", "seq ls",
        f"seq show {handle}", f"seq map {handle}", f"seq demote {handle}", f"seq prefetch {handle}",
        f"seq build {handle}", f"seq recompress {handle} --cancel", "pool ls", "evict --dry-run", "tier ls",
        "tier show", "tier scrub", "tier drain", "tier drain --resume", "tier resize 12MiB", "value ls --limit 5",
        f"value get {key} --out {folder}/value", f"value verify {key}", f"lookup 1 {folder}/prompt.ids",
        f"lookup 1 {folder}/prompt.ids --plan quest", "pin ls", f"pin add --seq {handle}", "pin rm 2", "quota ls",
        "quota set default sessions 5", "quota reset default sessions", "quota set uid:1 host_bytes 1GiB",
        "quota reset uid:1 host_bytes", "work ls", "audit", "config show", f"config check {folder}/empty.toml",
        f"replay {trace} --plan quest --plan sekv --plan mosaickv --steps 4", f"calibrate {trace}",
        f"calibrate {trace} --offline", "doctor", "events", "explain", "explain POOL_EXHAUSTED", "explain value_lost", "explain disk", "top --once -d 100ms",
        "config reload --dry-run", "log level", f"debug dump {folder}/dump"]
    return [(line, line.split()) for line in lines]


def verb_of(line: str, verbs: list[str]) -> str:
    return max((verb for verb in verbs if f"{line} ".startswith(f"{verb} ")), key=len)


def verbs_of(cli: Program) -> list[str]:
    page = cli.run("__reference", "man")
    return [line.removeprefix(".SS kvstrata ") for line in page.splitlines() if line.startswith(".SS ")]


def test_every_verb_has_one(live: tuple[Program, kvstrata.Sequence], commands: list[tuple[str, list[str]]]) -> None:
    verbs = [verb for verb in verbs_of(live[0]) if verb != "completion"]  # a script
    assert {path_of(verb) for verb in (*verbs, *ELSEWHERE)} == set(FOLDER.glob("*.json"))
    assert {verb_of(line, verbs) for line, _ in commands} == set(verbs) - SHARED, "verbs that no line here runs"


def test_what_they_print_is_valid(live: tuple[Program, kvstrata.Sequence], commands: list[tuple[str, list[str]]]
                                  ) -> None:
    cli, verbs = live[0], verbs_of(live[0])
    for line, words in commands:
        codes = (0, 1) if words[0] in ("doctor", "work") else (0,)
        check(verb_of(line, verbs), json.loads(cli.run(*words, "-o", "json", codes=codes)))


def test_errors_are_valid(live: tuple[Program, kvstrata.Sequence]) -> None:
    cli = live[0]
    for words in (["seq", "show", "99"], ["plan", "show", "qest"], ["status", "--socket", "/nowhere"]):
        done = subprocess.run([cli.path, *words, "-o", "json"], env=cli.environment, capture_output=True, text=True,
                              timeout=DEADLINE_S, check=False)
        assert done.returncode != 0
        check("error", json.loads(done.stderr))


def test_an_event_that_is_followed_is_one_of_the_list(live: tuple[Program, kvstrata.Sequence]) -> None:
    cli = live[0]
    with subprocess.Popen([cli.path, "events", "-f", "-o", "json"], env=cli.environment, stdout=subprocess.PIPE,
                          text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.kill()
    check("events", {"events": [json.loads(first)], "missed": 0})


@pytest.mark.parametrize("damage", [
    lambda row: row.pop("tokens"), lambda row: row.update(tokens="200"), lambda row: row.update(tokens=-1),
    lambda row: row.update(more=1)], ids=["missing", "text", "negative", "undocumented"])
def test_a_wrong_document_is_refused(live: tuple[Program, kvstrata.Sequence], damage) -> None:
    document = json.loads(live[0].run("seq", "ls", "-o", "json"))
    assert {row["model_name"] for row in document["sequences"]} == {MODEL}
    damage(document["sequences"][0])
    with pytest.raises(AssertionError, match=r"sequences\[0\]"):
        check("seq ls", document)


def test_schemas_are_found_by_their_verb() -> None:
    for path in FOLDER.glob("*.json"):
        schema = json.loads(path.read_text())
        assert schema["$schema"] == jsonschema.Draft202012Validator.META_SCHEMA["$id"], path
        assert pathlib.Path(path).name == path_of(schema["title"].removeprefix("kvstrata ").removesuffix(" -o json")
                                                  ).name, path
