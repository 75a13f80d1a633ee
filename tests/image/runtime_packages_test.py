# SPDX-License-Identifier: Apache-2.0
"""docker/runtime.apt names exactly the packages of the shared libraries that the binaries load.

    runtime_packages_test.py FILE...      # kvstratad, kvstrata and the libraries
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Part of every Debian, debian:12-slim too.
ALWAYS = {"libc6", "libgcc-s1", "libstdc++6"}


def says(*command):
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout


def loaded(file):
    """{library: path} that a file asks for by itself; what these load is their packages' business."""
    wanted = set(re.findall(r"NEEDED\s+(\S+)", says("objdump", "-p", file)))
    paths = dict(re.findall(r"^\s*(\S+) => (\S+)", says("ldd", file), re.M))
    return {name: paths[name] for name in wanted if name in paths and "libkvstrata" not in name}


def package_of(path):
    real = str(pathlib.Path(path).resolve())
    # /lib is a link to /usr/lib, and packages own their files by either name.
    for name in (real, real.removeprefix("/usr")):
        found = subprocess.run(["dpkg", "-S", name], text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        if found.returncode == 0:
            return found.stdout.split(":")[0]
    raise SystemExit(f"no package has {path}")


def main(files):
    needed = {package_of(path): name for file in files for name, path in loaded(file).items()}
    assert needed, "nothing is loaded?"
    listed = {line.split("#")[0].strip() for line in (ROOT / "docker/runtime.apt").read_text().splitlines()} - {""}
    missing = sorted(set(needed) - ALWAYS - listed)
    idle = sorted(listed - set(needed))
    for package in missing:
        print(f"docker/runtime.apt lacks {package}: {needed[package]} is loaded")
    for package in idle:
        print(f"docker/runtime.apt names {package}, which nothing loads")
    print(f"{len(listed) - len(idle)} passed, {len(missing) + len(idle)} failed")
    return 1 if missing or idle else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
