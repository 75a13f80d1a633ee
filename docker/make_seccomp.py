#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes seccomp.json: SystemCallFilter= of deploy/systemd/kvstratad.service as a profile for containers. It has io_uring,
which Docker's own forbids.

    make_seccomp.py            writes it
    make_seccomp.py --check    exit 1 if it differs; 77 where systemd is not Debian 12's, whose groups it is made of
"""

import json
import pathlib
import re
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
UNIT = HERE.parent / "deploy/systemd/kvstratad.service"
SYSTEMD = "252"
# What runs a container calls these behind the filter: it changes the user and drops capabilities. To a process
# without capabilities they are of no use.
RUNTIME = {"@setuid", "capset"}
# Namespaces, which the unit forbids by RestrictNamespaces=. clone3 hides its flags from filters: answered with
# ENOSYS, libc takes clone instead.
NAMESPACES = {"unshare", "setns", "clone", "clone3"}
NEW_NAMESPACES = 0x7E020000  # CLONE_NEWCGROUP, NEWIPC, NEWNET, NEWNS, NEWPID, NEWUSER, NEWUTS
EPERM, ENOSYS = 1, 38


def group(name):
    """The system calls of a group such as @aio, those of groups in it too."""
    said = subprocess.run(["systemd-analyze", "syscall-filter", name], check=True, text=True, stdout=subprocess.PIPE)
    words = [line.strip() for line in said.stdout.splitlines()[1:]]
    found = set()
    for word in words:
        if word and not word.startswith("#"):
            found |= group(word) if word.startswith("@") else {word}
    return found


def expand(words):
    return set().union(*(group(word) if word.startswith("@") else {word} for word in words))


def allowed():
    found = set()
    for line in re.findall(r"^SystemCallFilter=(.*)$", UNIT.read_text(), re.M):
        if line.startswith("~"):
            found -= expand(line[1:].split())
        else:
            found |= expand(line.split())
    return found | group("@default") | expand(RUNTIME)


def profile():
    masked = {"index": 0, "value": NEW_NAMESPACES, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}
    return {
        "defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": EPERM,
        "archMap": [{"architecture": "SCMP_ARCH_X86_64", "subArchitectures": []},
                    {"architecture": "SCMP_ARCH_AARCH64", "subArchitectures": []}],
        "syscalls": [
            {"names": sorted(allowed() - NAMESPACES), "action": "SCMP_ACT_ALLOW"},
            {"names": ["clone"], "action": "SCMP_ACT_ALLOW", "args": [masked]},
            {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS},
        ]}


def main(*options):
    if not shutil.which("systemd-analyze"):
        print("SKIPPED: systemd-analyze is not here")
        return 77
    version = subprocess.run(["systemd-analyze", "--version"], text=True, stdout=subprocess.PIPE,
                             check=True).stdout.split()[1:2]
    if version != [SYSTEMD]:
        print(f"SKIPPED: systemd is {version[0]}, not {SYSTEMD}")
        return 77
    text = json.dumps(profile(), indent=1) + "\n"
    if options == ("--check",):
        return 0 if (HERE / "seccomp.json").read_text() == text else "seccomp.json is not what make_seccomp.py writes"
    (HERE / "seccomp.json").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
