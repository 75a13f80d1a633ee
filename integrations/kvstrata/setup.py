"""Generates the gRPC stubs before the package is collected; everything else is in pyproject.toml."""

import pathlib
import sys

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import generate_stubs  # noqa: E402


class BuildWithStubs(build_py):
    def run(self) -> None:
        generate_stubs.generate_if_stale()
        super().run()


generate_stubs.generate_if_stale()  # before setuptools looks for packages: kvstrata.v1 is one
setup(cmdclass={"build_py": BuildWithStubs})
