# SPDX-License-Identifier: Apache-2.0
"""Generates the gRPC stubs before the package is collected; everything else is in pyproject.toml.

KVSTRATA_WHEEL_LIBRARY=FILE puts a libkvstrata.so into the wheel, which is then one for this platform (make wheel).
"""

import os
import pathlib
import shutil
import sys

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

HERE = pathlib.Path(__file__).resolve().parent
LIBRARY = os.environ.get("KVSTRATA_WHEEL_LIBRARY")
sys.path.insert(0, str(HERE))
import generate_stubs  # noqa: E402


class BuildWithStubs(build_py):
    def run(self) -> None:
        generate_stubs.generate_if_stale()
        super().run()
        if LIBRARY:
            shutil.copy(LIBRARY, pathlib.Path(self.build_lib) / "kvstrata" / "libkvstrata.so")


options = {"cmdclass": {"build_py": BuildWithStubs}}
if LIBRARY:
    from setuptools.command.bdist_wheel import bdist_wheel

    class OfAnyPython(bdist_wheel):
        """ctypes loads the library: which Python it is does not matter."""

        def get_tag(self) -> tuple[str, str, str]:
            return "py3", "none", super().get_tag()[2]

    class OfOnePlatform(Distribution):
        def has_ext_modules(self) -> bool:
            return True

    options["cmdclass"]["bdist_wheel"] = OfAnyPython
    options["distclass"] = OfOnePlatform

generate_stubs.generate_if_stale()  # before setuptools looks for packages: kvstrata.v1 is one
setup(**options)
