# SPDX-License-Identifier: Apache-2.0
"""Completion in a real fish and a real zsh, beside a daemon: verbs, options, and what lives there. (bash:
test_cli_completion.py.) Each is skipped where it is not installed: apt-get install zsh fish."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest
from operated import DEADLINE_S, MODEL, PLAN, Program, operated

sys.path.append(str(pathlib.Path(__file__).parents[1] / "live"))
from screen import Screen  # noqa: E402

FISH, ZSH = shutil.which("fish"), shutil.which("zsh")


@pytest.fixture(scope="module")
def cli() -> Iterator[Program]:
    with operated() as (program, _):
        program.environment["PATH"] = f"{pathlib.Path(program.path).parent}:/usr/bin:/bin"
        yield program


@pytest.fixture(scope="module")
def alike(cli: Program) -> str:
    """Lines that have one completion each: what is typed, and what stands there behind Tab."""
    handle = cli.names("seq", "ls")[0]
    return f"""
kvstrata seq m|kvstrata seq map
kvstrata -o json seq m|kvstrata -o json seq map
kvstrata seq map {handle} --col|kvstrata seq map {handle} --columns
kvstrata seq build {handle} --plan {PLAN[:5]}|kvstrata seq build {handle} --plan {PLAN}
kvstrata plan show {PLAN[:5]}|kvstrata plan show {PLAN}
kvstrata tier resize 1GiB --device emu|kvstrata tier resize 1GiB --device emulated
kvstrata quota set uid:1000 host|kvstrata quota set uid:1000 host_bytes
kvstrata --socket {cli.environment['KVSTRATA_SOCKET']} quota set uid:1|\
kvstrata --socket {cli.environment['KVSTRATA_SOCKET']} quota set uid:1000
kvstrata explain POOL_EX|kvstrata explain POOL_EXHAUSTED
kvstrata explain value_l|kvstrata explain value_lost
kvstrata events --event pool_f|kvstrata events --event pool_failed
kvstratad --log|kvstratad --log-level
""".strip()


def fish(cli: Program, line: str) -> list[str]:
    """What it offers at the end of the line, without descriptions."""
    done = subprocess.run([FISH, "--no-config", "-c", f"{cli.path} completion fish | source; complete -C $argv[1]", line],
                          env=cli.environment, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert done.stderr == "", done.stderr
    return [offered.split("\t")[0] for offered in done.stdout.splitlines()]


@pytest.mark.skipif(FISH is None, reason="fish is not installed")
def test_fish(cli: Program, alike: str) -> None:
    for pair in alike.splitlines():
        line, wanted = pair.split("|")
        assert fish(cli, line) == [wanted.split(" ")[-1]], line
    sequences = cli.names("seq", "ls")
    assert len(sequences) == 2
    assert sorted(fish(cli, "kvstrata seq show ")) == sorted(sequences), "no files, no more names"
    assert sorted(fish(cli, "kvstrata pin rm ")) == sorted(cli.names("pin", "ls"))
    assert MODEL in fish(cli, "kvstrata model show ")
    assert "uid:1000" in fish(cli, "kvstrata quota set ") and "sessions" not in fish(cli, "kvstrata quota set ")
    assert "json" in fish(cli, "kvstrata seq ls -o ")
    assert "__names" not in fish(cli, "kvstrata _")


@pytest.fixture()
def zsh(cli: Program, tmp_path: pathlib.Path) -> Iterator[Screen]:
    """It sits in an empty folder, so that no file is offered."""
    screen = Screen([ZSH, "-f", "-i"], columns=160, rows=50,
                    **{**cli.environment, "HOME": str(tmp_path), "PS1": "%% ", "PS2": "> ", "PROMPT_EOL_MARK": ""})
    screen.press(f"cd {tmp_path}; autoload -Uz compinit; compinit -u -D; source <({cli.path} completion zsh); "
                 "setopt no_beep; clear; print ready-$((40 + 2))\n")
    screen.wait_for("ready-42")
    yield screen
    screen.press("\x15exit\n")
    screen.wait_end()


def typed(text: str) -> str:
    """The last line behind a prompt, blanks at its end apart; "" before there is one."""
    lines = ["% "] + [line for line in text.splitlines() if line.startswith("% ")]
    return lines[-1].removeprefix("% ").rstrip()


@pytest.mark.skipif(ZSH is None, reason="zsh is not installed")
def test_zsh(cli: Program, zsh: Screen, alike: str) -> None:
    for pair in alike.splitlines():
        line, wanted = pair.split("|")
        zsh.press(f"{line}\t")
        zsh.wait_until(lambda text, wanted=wanted: typed(text) == wanted)
        zsh.press("\x15")  # Ctrl-U: an empty line
        zsh.wait_until(lambda text: typed(text) == "")
    zsh.press("kvstrata model show meta\t")
    quoted = MODEL.replace(",", "\\,").replace(" ", "\\ ")
    zsh.wait_until(lambda text: typed(text) in (f"kvstrata model show {quoted}",
                                                f"kvstrata model show {quoted}".replace("\\,", ",")))
    zsh.press("\x15")
    sequences = cli.names("seq", "ls")
    zsh.press("clear\n")
    zsh.wait_until(lambda text: typed(text) == "")
    zsh.press("kvstrata seq show \t")
    zsh.wait_until(lambda text: set(sequences) <= set(text.split("kvstrata seq show", 1)[-1].split()))
    zsh.press("\x15")

