# SPDX-License-Identifier: Apache-2.0
"""Runs what kvstratad.service says, without systemd: its ExecStart as its User and Group, with its RuntimeDirectory,
StateDirectory and UMask, until it says READY=1; then the commands, each a word list of a shell, and SIGTERM.

    run_unit.py COMMAND...      root, in the root where the package is installed
"""

import configparser
import os
import pathlib
import pwd
import signal
import socket
import subprocess
import sys

UNIT = pathlib.Path("/lib/systemd/system/kvstratad.service")
STARTED_S, STOPPED_S = 60, 10


def directory(path, user, mode):
    path.mkdir(exist_ok=True)
    path.chmod(mode)
    os.chown(path, user.pw_uid, user.pw_gid)


def main(*commands):
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read(UNIT)
    service = unit["Service"]
    assert service["Type"] == "notify", service["Type"]
    user = pwd.getpwnam(service["User"])
    directory(pathlib.Path("/run") / service["RuntimeDirectory"], user, 0o755)
    directory(pathlib.Path("/var/lib") / service["StateDirectory"], user, int(service["StateDirectoryMode"], 8))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.bind("/run/notify")
        os.chmod("/run/notify", 0o777)
        notified.settimeout(STARTED_S)
        daemon = subprocess.Popen(service["ExecStart"].replace("%t", "/run").split(), user=user.pw_uid, group=user.pw_gid,
                                  extra_groups=[], umask=int(service["UMask"], 8), env={"NOTIFY_SOCKET": "/run/notify"})
        assert notified.recv(64) == b"READY=1"
    os.unlink("/run/notify")
    try:
        for command in commands:
            subprocess.run(command, shell=True, check=True, timeout=300)
    finally:
        daemon.send_signal(signal.SIGTERM)
        code = daemon.wait(timeout=STOPPED_S)
    assert code == 0, f"kvstratad ended with {code}"


if __name__ == "__main__":
    main(*sys.argv[1:])
