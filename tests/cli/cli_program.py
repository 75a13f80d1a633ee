# SPDX-License-Identifier: Apache-2.0
"""The program `kvstrata` as the tests beside this run it, with a daemon or without."""
import argparse
import os
import select
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from outcomes import Outcomes  # noqa: E402

DEADLINE_S = 60


class Cli:
    def __init__(self, program, folder):
        self.program, self.folder = program, folder
        self.socket = os.path.join(folder, "k.sock")

    def __call__(self, *words, stdin=subprocess.DEVNULL, **env):
        environment = {k: v for k, v in os.environ.items() if k not in ("KVSTRATA_SOCKET", "NO_COLOR")}
        environment.update({"KVSTRATA_SOCKET": self.socket, **env})
        return subprocess.run([self.program, *words], env=environment, stdin=stdin, timeout=DEADLINE_S,
                              capture_output=True, text=True)


def expect(result, code, *words):
    shown = f"{result.args[1:]} exit {result.returncode}\n{result.stdout}{result.stderr}"
    assert result.returncode == code, f"wanted exit {code}: {shown}"
    for word in words:
        assert word in result.stdout + result.stderr, f"wanted {word!r}: {shown}"
    return result


def as_nobody(cli, *words):
    """Runs the CLI as nobody in the daemon's group. REQUIRES: root and setpriv."""
    with tempfile.TemporaryDirectory(prefix="kvs-cli-") as folder:  # whatever the build folder's mode
        os.chmod(folder, 0o755)
        copy = shutil.copy(cli.program, folder)
        library = next(line.split("=>")[1].split("(")[0].strip()
                       for line in subprocess.run(["ldd", cli.program], capture_output=True,
                                                  text=True).stdout.splitlines() if "libkvstrata" in line)
        shutil.copy(library, os.path.join(folder, os.path.basename(library)))
        return subprocess.run(["setpriv", "--reuid=65534", "--clear-groups", copy, *words],
                              env={"LD_LIBRARY_PATH": folder, "KVSTRATA_SOCKET": cli.socket},
                              timeout=DEADLINE_S, capture_output=True, text=True)


def start_daemon(program, cli, *flags):
    """On cli's socket; its process, once it is ready."""
    read, write = os.pipe()
    process = subprocess.Popen([program, "--socket", cli.socket, "--ready-fd", str(write), *flags],
                               pass_fds=[write])
    os.close(write)
    ready = select.select([read], [], [], DEADLINE_S)[0] and os.read(read, 1)
    os.close(read)
    if not ready:
        process.kill()
        process.wait()
        raise RuntimeError("the daemon was not ready in time")
    return process


def run_program(functions, flags=lambda folder: []):
    """Runs a module's functions: those named test_*, which need no daemon; then, on one socket that a daemon with
    `flags` serves, those named daemon_*. In their order: what one leaves in the daemon the next may use. Gives the
    exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cli", required=True)
    parser.add_argument("--daemon", required=True)
    args = parser.parse_args()
    alone, served = ([f for name, f in functions.items() if name.startswith(prefix)] for prefix in ("test_", "daemon_"))
    outcomes = Outcomes()
    with tempfile.TemporaryDirectory(prefix="kvs-cli-") as folder:
        cli = Cli(args.cli, folder)
        for test in alone:
            outcomes.run(test, cli)
        if served and not os.access(args.daemon, os.X_OK):
            print(f"NOT RUN: tests with a daemon: no {args.daemon}")
        elif served:
            process = start_daemon(args.daemon, cli, *flags(folder))
            try:
                for test in served:
                    outcomes.run(test, cli)
            finally:
                process.terminate()
                process.wait(DEADLINE_S)
    return outcomes.end()
