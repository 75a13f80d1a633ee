#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the commands of docs/operations.md, "By symptom" and "Runbooks", as they stand there, against a real daemon.

Commands of the system (systemctl, dmesg, ..) are not run; others than ours and those there may not be.

Usage: runbooks_test.py --cli PATH --daemon PATH --document PATH. Ends with `N passed, N failed`.
"""
import argparse
import os
import pathlib
import re
import select
import shlex
import subprocess
import sys
import tempfile

DEADLINE_S = 120
SECTIONS = ("By symptom", "Runbooks")
OF_THE_SYSTEM = {"systemctl", "nvidia-smi", "dmesg", "df"}
CONFIG = "/etc/kvstrata/kvstratad.toml"
# What may end otherwise than with 0, and why.
OTHERWISE = {f"kvstrata doctor{file}": {0, 1} for file in ("", f" --config {CONFIG}")}  # a machine may lack something


def commands(document):
    """[(runbook or symptom, command)] in their order: indented lines, in lists too."""
    found, section, heading, before = [], "", "", ""
    for line in document.read_text().splitlines():
        if line.startswith("## "):
            section = line[3:]
        if line.startswith("### "):
            heading = line[4:]
        text = re.match(r"^(?: {4}| {7})(\S.*)$", line)
        begins = not before.strip() or (found and before == found[-1][2])
        if section in SECTIONS and text and begins:
            found.append((heading, text[1], line))
        before = line
    return [(heading, command) for heading, command, _ in found]


class Machine:
    def __init__(self, cli, daemon, folder):
        self.cli, self.daemon, self.folder = cli, daemon, folder
        self.config, self.socket = folder / "k.toml", folder / "k.sock"
        self.config.write_text(f"""
[pool]
device_bytes = "16MiB"
host_bytes = "16MiB"
[disk]
path = "{folder}/tier"
budget_bytes = "16MiB"
segment_bytes = "1MiB"
""")
        ready, ready_write = os.pipe()
        self.process = subprocess.Popen([daemon, "--config", self.config, "--socket", self.socket, "--ready-fd",
                                         str(ready_write)], pass_fds=[ready_write], stderr=subprocess.DEVNULL)
        os.close(ready_write)
        assert select.select([ready], [], [], 30)[0] and os.read(ready, 1), "kvstratad is not ready"
        os.close(ready)

    def run(self, command):
        """The exit code and what it said."""
        words = shlex.split(command.replace(CONFIG, str(self.config)).replace("6GiB", "24MiB"))
        words[0] = {"kvstrata": self.cli, "kvstratad": self.daemon}[words[0]]
        done = subprocess.run(words, cwd=self.folder, timeout=DEADLINE_S, stdin=subprocess.DEVNULL, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              env={**os.environ, "KVSTRATA_SOCKET": str(self.socket)})
        return done.returncode, done.stdout

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()  # whoever fails leaves no daemon that holds our output open

    def stop(self):
        self.process.terminate()
        return self.process.wait(30)


def main():
    parser = argparse.ArgumentParser()
    for name in ("--cli", "--daemon", "--document"):
        parser.add_argument(name, required=True)
    args = parser.parse_args()
    wanted = commands(pathlib.Path(args.document))
    headings = {heading for heading, _ in wanted}
    passed = failed = 0
    with (tempfile.TemporaryDirectory(prefix="kvs-runbooks-") as folder,
          Machine(args.cli, args.daemon, pathlib.Path(folder)) as machine):
        for heading, command in wanted:
            program = command.split()[0]
            if program in OF_THE_SYSTEM:
                print(f"not run: {heading}: {command}")
                continue
            if program not in ("kvstrata", "kvstratad"):
                failed += 1
                print(f"FAILED {heading}: {command}: neither ours nor known of the system")
                continue
            code, said = machine.run(command)
            ok = code in OTHERWISE.get(command, {0})
            if command == "kvstrata debug dump":  # two in one second would have one name
                for made in pathlib.Path(folder).glob("kvstrata-dump-*"):
                    made.rename(made.with_name(f"seen-{passed}"))
            passed, failed = passed + ok, failed + (not ok)
            if not ok:
                print(f"FAILED {heading}: {command}: exit {code}\n{said}")
        if machine.stop() != 0:
            failed += 1
            print("FAILED: the daemon did not end well")
    for needed in ("Upgrade", "Drain", "Lost GPU", "Full disk"):
        if needed not in headings:
            failed += 1
            print(f"FAILED: no runbook {needed}")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or passed < 20 else 0


if __name__ == "__main__":
    sys.exit(main())
