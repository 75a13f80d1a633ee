#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Packs vLLM 0.26 (CUDA) for a GPU machine without a network that has torch 2.11, transformers and Triton of its own.

    pack.py OUT [--python 3.12] [--arch 90]          OUT: a folder that git ignores, as dist/v26

OUT/part1, part2, ... hold site.tar.xz in pieces of at most 38 MiB; `install.sh` beside this unpacks them. In it are
vLLM's Python files, its operators with the code of one GPU architecture, and what vllm.LLM imports of other packages
and the machine lacks, or may have too old (REQUIRED). Two packages that are only named in annotations are empty
stand-ins (NAMED).

FlashAttention's libraries are imported on CUDA whatever backend is chosen, so they are there without any device code:
--attention-backend FLASH_ATTN fails with this. Wheels come from PyPI, into build/vllm26/wheels, once.
"""

from __future__ import annotations

import argparse
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile

import prune

ROOT = pathlib.Path(__file__).resolve().parents[3]
VERSION = (ROOT / "VERSION").read_text().strip()
WHEELS = ROOT / "build" / "vllm26" / "wheels"
VLLM = "vllm==0.26.0"
REQUIRED = ("annotated-types==0.8.0", "cachetools==8.0.1", "cbor2==6.3.0", "distro==1.9.0", "fastapi==0.136.3",
            "httpcore2==2.16.2", "httpx2==2.16.2", "jiter==0.19.0", "msgspec==0.22.0", "openai==3.54.0",
            "openai-harmony==0.0.8", "partial-json-parser==0.2.1.1.post7", "pybase64==1.5.1", "pydantic==2.14.3",
            "pydantic-core==2.50.4", "pyzmq==27.3.0", "sniffio==1.3.1", "starlette==1.10.0",
            "typing-extensions==4.16.0", "typing-inspection==0.4.5")
NAMED = ("llguidance", "xgrammar")
STAND_IN = '''"""Stands in: vLLM names its classes in annotations, and uses none without structured outputs."""


def __getattr__(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return object
'''
# Libraries of vLLM's, and whether their device code is needed.
LIBRARIES = {"_C_stable_libtorch": True, "_moe_C_stable_libtorch": True, "vllm_flash_attn/_vllm_fa2_C": False,
             "spinloop": True, "cumem_allocator": True}
LEFT_OUT = ("third_party/deep_gemm/", "third_party/fmha_sm100/", "third_party/tml_fa4/")
PART_BYTES = 38 << 20
PLUGIN = {"METADATA": "Metadata-Version: 2.1\nName: kvstrata-vllm\nVersion: " + VERSION + "\n",
          "entry_points.txt": "[vllm.general_plugins]\nkvstrata = kvstrata_vllm:register\n"}


def download(python: str) -> list[pathlib.Path]:
    """vLLM's wheel first."""
    to = WHEELS / python
    to.mkdir(parents=True, exist_ok=True)
    platforms = [f"manylinux_2_{n}_x86_64" for n in (28, 34, 27, 26, 24, 17, 12)] + ["manylinux2014_x86_64",
                                                                                     "manylinux1_x86_64"]
    found = []
    for requirement in (VLLM, *REQUIRED):
        name, version = requirement.split("==")
        pattern = f"{name.replace('-', '_')}-{version}-*.whl"
        if not list(to.glob(pattern)):
            subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:",
                            "--python-version", python, "--implementation", "cp", "-d", to, requirement,
                            *(word for platform in platforms for word in ("--platform", platform))], check=True)
        found += to.glob(pattern)
    return found


def unpack_vllm(wheel: pathlib.Path, site: pathlib.Path, arch: int) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            inner = name.removeprefix("vllm/")
            library = inner.removesuffix(".abi3.so")
            wanted = (library in LIBRARIES if name.endswith(".so") else
                      name.endswith(("/METADATA", "/entry_points.txt")) if inner == name else
                      name.endswith(".py") and not inner.startswith(LEFT_OUT))
            if not wanted:
                continue
            to = pathlib.Path(archive.extract(name, site))
            if name.endswith(".so"):
                subprocess.run(["strip", "--strip-unneeded", to], check=True)
                print(prune.prune(to, arch if LIBRARIES[library] else 0))


def fill(site: pathlib.Path, python: str, arch: int) -> None:
    vllm, *others = download(python)
    unpack_vllm(vllm, site, arch)
    for wheel in others:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    for name in NAMED:
        (site / f"{name}.py").write_text(STAND_IN)
    # The package itself is the source tree's; vLLM finds it by this.
    plugin = site / f"kvstrata_vllm-{VERSION}.dist-info"
    plugin.mkdir()
    for name, text in PLUGIN.items():
        (plugin / name).write_text(text)


def split(packed: pathlib.Path, out: pathlib.Path) -> None:
    data = packed.read_bytes()
    for i, begin in enumerate(range(0, len(data), PART_BYTES), 1):
        part = out / f"part{i}"
        part.mkdir()
        (part / "site.tar.xz").write_bytes(data[begin:begin + PART_BYTES])
        print(f"{part}: {len(data[begin:begin + PART_BYTES]) / 2**20:.1f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--python", default="3.12", help="the machine's")
    parser.add_argument("--arch", type=int, default=90, help="compute capability, as 90")
    arguments = parser.parse_args()
    shutil.rmtree(arguments.out, ignore_errors=True)
    arguments.out.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=arguments.out) as folder:
        site = pathlib.Path(folder) / "site"
        site.mkdir()
        fill(site, arguments.python, arguments.arch)
        packed = pathlib.Path(folder) / "site.tar.xz"
        with tarfile.open(packed, "w:xz", preset=6) as archive:
            archive.add(site, "site")
        split(packed, arguments.out)


if __name__ == "__main__":
    main()
