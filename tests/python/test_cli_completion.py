# SPDX-License-Identifier: Apache-2.0
"""Completion in a real bash: what lives in the daemon, names that are other people's text, flags of kvstratad."""

from __future__ import annotations

import json
import pathlib
import shlex
import socket
import subprocess
import time
from collections.abc import Iterator

import pytest
from operated import DEADLINE_S, MODEL, PLAN, Program, operated

import kvstrata
from kvstrata.chunks import WORKER, ChunkLink, LayerRecall


@pytest.fixture(scope="module")
def live() -> Iterator[tuple[Program, kvstrata.Sequence]]:
    with operated() as (program, sequence):
        yield program, sequence


@pytest.fixture(scope="module")
def cli(live: tuple[Program, kvstrata.Sequence]) -> Program:
    return live[0]


def complete(cli: Program, line: str, environment: dict[str, str] | None = None,
             folder: pathlib.Path | None = None) -> list[str]:
    """What Tab offers at the end of `line`. The words are bash's, the function the one that it registered."""
    script = r"""
source <("$1" completion bash)
eval "words=($2)"
[[ $2 == *' ' ]] && words+=('')
COMP_WORDS=("${words[@]}") COMP_CWORD=$((${#words[@]} - 1))
function=$(complete -p "${words[0]##*/}" | sed -E 's/.* -F ([^ ]+) .*/\1/')
$function "${words[0]}" "${words[COMP_CWORD]}" "${words[COMP_CWORD-1]}"
printf '%s\n' "${COMPREPLY[@]}"
"""
    path = str(pathlib.Path(cli.path).parent)
    done = subprocess.run(["bash", "-c", script, "bash", cli.path, line], capture_output=True, text=True,
                          timeout=DEADLINE_S, check=True, cwd=folder,
                          env={**(environment or cli.environment), "PATH": f"{path}:/usr/bin:/bin"})
    assert done.stderr == "", done.stderr
    return done.stdout.split("\n")[:-1] if done.stdout.strip() else []


def test_what_lives_in_the_daemon(live: tuple[Program, kvstrata.Sequence]) -> None:
    cli, sequence = live
    sequences = cli.names("seq", "ls")
    assert str(sequence.handle) in sequences
    for line in ("seq show ", "-o json seq map ", "pin add --seq ", "audit --recall "):
        assert complete(cli, f"kvstrata {line}") == sequences, line
    assert complete(cli, "kvstrata seq ls --session ") == cli.names("session", "ls")
    assert complete(cli, f"kvstrata plan show {PLAN[:5]}") == [PLAN]
    assert complete(cli, f"kvstrata seq build {sequences[0]} --plan {PLAN[:5]}") == [PLAN]
    assert complete(cli, "kvstrata pin rm ") == cli.names("pin", "ls")
    assert complete(cli, "kvstrata tier resize 1GiB --device ") == ["emulated"]
    assert "uid:1000" in complete(cli, "kvstrata quota set ")
    limits = json.loads(cli.run("quota", "ls", "-o", "json"))["defaults"]
    assert complete(cli, "kvstrata quota set uid:1000 ") == list(limits)
    assert complete(cli, "kvstrata quota set uid:1000 host") == ["host_bytes"]
    values = complete(cli, "kvstrata value verify ")
    assert values and sorted(values) == sorted(cli.names("value", "ls", "--limit", "200"))
    assert complete(cli, f"kvstrata value verify {values[0]} {values[1]} ") == values


def test_fixed_words_stay(cli: Program) -> None:
    assert complete(cli, "kvstrata seq m") == ["map"]
    assert "csv" in complete(cli, "kvstrata seq ls -o ")
    assert "--columns" in complete(cli, "kvstrata seq map 1 --c")
    assert complete(cli, "kvstrata replay --keep trace.safetensors --plan qu") == ["quest"]
    assert complete(cli, "kvstrata __") == [], "hidden verbs"


def test_names_are_quoted_and_never_run(cli: Program, tmp_path: pathlib.Path) -> None:
    trap = "$(touch run)`touch run`; touch run"
    with kvstrata.attach(cli.environment["KVSTRATA_SOCKET"]) as session:
        session.register_model(trap, "trap", layers=1, query_heads=2, kv_heads=2, head_dim=64, page_tokens=16)
        offered = complete(cli, "kvstrata model show ", folder=tmp_path)
    assert not list(tmp_path.iterdir())
    assert [shlex.split(name) for name in offered if name.startswith("meta")] == [[MODEL]]
    unquoted = subprocess.run(["bash", "-c", "\n".join(f"printf '%s\\n' {name}" for name in offered)], check=True,
                              capture_output=True, text=True, timeout=DEADLINE_S, cwd=tmp_path).stdout
    assert trap in unquoted.split("\n") and not list(tmp_path.iterdir())


def test_the_socket_of_the_line_is_asked(cli: Program, tmp_path: pathlib.Path) -> None:
    nowhere = {**cli.environment, "KVSTRATA_SOCKET": str(tmp_path / "none.sock")}
    named = f"kvstrata --socket {cli.environment['KVSTRATA_SOCKET']} seq show "
    assert complete(cli, named, nowhere) == cli.names("seq", "ls")
    assert all(word.startswith("-") for word in complete(cli, "kvstrata seq show ", nowhere))


def test_a_deaf_daemon_is_not_waited_for(cli: Program, tmp_path: pathlib.Path) -> None:
    """It has 300 ms; the default of other verbs is 5 s."""
    deaf = str(tmp_path / "deaf.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(deaf)
        listener.listen(8)
        begin = time.monotonic()
        cli.run("__names", "sequences", "--socket", deaf, codes=(6,))
        patient = time.monotonic() - begin
        cli.run("__names", "sequences", "--socket", deaf, "--timeout", "4s", codes=(6,))
        assert patient < time.monotonic() - begin - patient


def test_flags_of_the_daemon(cli: Program) -> None:
    flags = complete(cli, "kvstratad --")
    assert {"--socket", "--config", "--set", "--check-config", "--log-level", "--help"} <= set(flags), flags
    assert complete(cli, "kvstratad --check-config --deep -o ") == ["text", "json"]
    assert complete(cli, "kvstratad --log-level d") == ["debug"]
    assert complete(cli, "kvstratad --config ") == [], "files"
    assert "pool.host_bytes=" in complete(cli, "kvstratad --set pool.")


@pytest.fixture(scope="module")
def engine(cli: Program) -> Iterator[str]:
    """Its name; it has told what its plan loses."""
    with ChunkLink(cli.environment["KVSTRATA_SOCKET"], role=WORKER, row_bytes=4096, engine="e1", client_name="test") as link:
        assert link.recalled("quest", "m", [LayerRecall(0, 1, 1.0, 1.0, 0.0)])
        end = time.monotonic() + DEADLINE_S
        while not cli.run("__names", "engines"):
            assert time.monotonic() < end
        yield "e1"


def test_engines_of_an_audit(cli: Program, engine: str) -> None:
    assert complete(cli, "kvstrata audit --engine ") == [engine]


@pytest.mark.usefixtures("engine")
def test_every_kind_of_name_is_listed(cli: Program) -> None:
    help_text = cli.run("__names", "--help")
    kinds = help_text.split("{")[1].split("}")[0].split(",")
    assert len(kinds) >= 10
    for kind in kinds:
        assert cli.run("__names", kind).strip(), kind
