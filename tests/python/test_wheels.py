# SPDX-License-Identifier: Apache-2.0
"""Packages build as wheels, with stubs, type marks and nothing generated left out."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
from conftest import INTEGRATIONS, ROOT

EXPECTED = {
    "kvstrata": {"kvstrata/__init__.py", "kvstrata/py.typed", "kvstrata/grpc.py",
                 "kvstrata/v1/compute_pb2.py", "kvstrata/v1/admin_pb2_grpc.py", "kvstrata/v1/control_pb2.pyi"},
    "kvstrata_numpy": {"kvstrata_numpy/__init__.py", "kvstrata_numpy/py.typed", "kvstrata_numpy/trace.py"},
}


@pytest.mark.parametrize("package", EXPECTED)
def test_wheel(package: str, tmp_path: pathlib.Path):
    """From a copy of the tree without its stubs, so that the build must make them."""
    tree = tmp_path / "tree"
    ignore = shutil.ignore_patterns("v1", "*.egg-info", "build", "__pycache__")
    shutil.copytree(INTEGRATIONS / package, tree / "integrations" / package, ignore=ignore)
    shutil.copytree(ROOT / "proto", tree / "proto")
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
                    "--disable-pip-version-check", "--wheel-dir", tmp_path, tree / "integrations" / package],
                   check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert EXPECTED[package] <= names
    target = tmp_path / "site"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index",
                    "--disable-pip-version-check", "--target", target, wheel], check=True, timeout=300)
    code = {"kvstrata": "import kvstrata, kvstrata.grpc", "kvstrata_numpy": "import kvstrata_numpy.tokenizer"}
    subprocess.run([sys.executable, "-c", code[package]], check=True, timeout=120,
                   env={"PYTHONPATH": f"{target}:{INTEGRATIONS / 'kvstrata/src'}"})  # which kvstrata_numpy requires


def test_wheel_with_library_and_programs(tmp_path: pathlib.Path):
    """What `make wheel` builds of this build: for a glibc as old as vLLM's images have; its library is found before all
    others, and its programs run without anything of the build."""
    build = pathlib.Path(os.environ["KVSTRATAD"]).parents[1]
    subprocess.run([sys.executable, INTEGRATIONS / "build_wheel.py", build, tmp_path], check=True, timeout=300)
    assert {wheel.name.split("-")[0] for wheel in tmp_path.glob("*-none-any.whl")} == {
        "kvstrata_vllm", "kvstrata_transformers", "kvstrata_sglang"}
    (wheel,) = tmp_path.glob("kvstrata-*.whl")
    found = re.fullmatch(r"kvstrata-[\d.]+-py3-none-manylinux_2_(\d+)_\w+\.whl", wheel.name)
    assert found and int(found[1]) <= 35, wheel.name
    target = tmp_path / "site"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index",
                    "--disable-pip-version-check", "--target", target, wheel], check=True, timeout=300)
    code = "import kvstrata.library; print(kvstrata.library.load().path)"
    path = subprocess.run([sys.executable, "-c", code], check=True, timeout=120, text=True, stdout=subprocess.PIPE,
                          env={"PYTHONPATH": str(target)}).stdout.strip()
    assert path == str(target / "kvstrata/libkvstrata.so")
    for name in ("kvstratad", "kvstrata"):
        program = target / "kvstrata.scripts" / name
        said = subprocess.run([program, "--version"], check=True, timeout=60, text=True, stdout=subprocess.PIPE, env={})
        assert (ROOT / "VERSION").read_text().strip() in said.stdout
        linked = subprocess.run(["ldd", program], check=True, timeout=60, text=True, stdout=subprocess.PIPE).stdout
        assert str(target / "kvstrata.libs/libprotobuf") in linked.replace("/kvstrata.scripts/..", "")
