#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Packs vLLM (CUDA) for a GPU machine without a network that has torch 2.11, transformers and Triton of its own.

    pack.py OUT [--version 0.32.0] [--python 3.12] [--arch 90]          OUT: a folder that git ignores, as dist/vllm

OUT/site32.tar.xz, of vLLM 0.32, is made once. It is vLLM's Python files, its operators with the code of one GPU
architecture, FlashAttention 3, and what vllm.LLM imports of other packages and the machine lacks (REQUIRED). Packages of which names alone are needed are
empty stand-ins (NAMED). FlashAttention 2's library is imported on CUDA whatever is chosen, so it is there without
device code. Wheels come from PyPI, into build/vllm_gpu/wheels, once.
"""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys
import tarfile
import tempfile
import zipfile

import prune

ROOT = pathlib.Path(__file__).resolve().parents[2]
VERSION = (ROOT / "VERSION").read_text().strip()
WHEELS = ROOT / "build" / "vllm_gpu" / "wheels"
REQUIRED = ("annotated-types==0.8.0", "cachetools==8.0.1", "cbor2==6.3.0", "distro==1.9.0", "fastapi==0.136.3",
            "httpcore2==2.16.2", "httpx2==2.16.2", "jiter==0.19.0", "msgspec==0.22.0", "openai==3.54.0",
            "openai-harmony==0.0.8", "partial-json-parser==0.2.1.1.post7", "pybase64==1.5.1", "pydantic==2.14.3",
            "pydantic-core==2.50.4", "pyzmq==27.3.0", "sniffio==1.3.1", "starlette==1.10.0",
            "typing-extensions==4.16.0", "typing-inspection==0.4.5", "compressed-tensors==0.17.0", "loguru==0.7.3",
            "truststore==0.10.5", "blake3==1.0.11")
NAMED = ("llguidance", "mistral_common", "xgrammar")
STAND_IN = '''"""Stands in: vLLM imports its classes, and uses none without structured outputs and Mistral's own formats. Any module
below it stands in, too."""

import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "0"  # which is too old for transformers to use


class _Below(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith(__name__ + ".") else None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = __getattr__
        return module

    def exec_module(self, module):
        pass


def __getattr__(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return object


sys.meta_path.insert(0, _Below())
'''
# Libraries of vLLM's, and whether their device code is needed; None: it is of sm_90a alone, and stays as it is.
LIBRARIES = {"_C_stable_libtorch": True, "_moe_C_stable_libtorch": True, "vllm_flash_attn/_vllm_fa2_C": False,
             "vllm_flash_attn/_vllm_fa3_C": None, "spinloop": True, "cumem_allocator": True, "fs_io_C": True}
LEFT_OUT = ("third_party/deep_gemm/", "third_party/fmha_sm100/", "third_party/tml_fa4/")
PLUGIN = {"METADATA": "Metadata-Version: 2.1\nName: kvstrata-vllm\nVersion: " + VERSION + "\n",
          "entry_points.txt": "[vllm.general_plugins]\nkvstrata = kvstrata_vllm:register\n"}


def download(vllm: str, python: str) -> list[pathlib.Path]:
    """vLLM's wheel first."""
    to = WHEELS / python
    to.mkdir(parents=True, exist_ok=True)
    platforms = [f"manylinux_2_{n}_x86_64" for n in (28, 34, 27, 26, 24, 17, 12)] + ["manylinux2014_x86_64",
                                                                                     "manylinux1_x86_64"]
    found = []
    for requirement in (f"vllm=={vllm}", *REQUIRED):
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
                if (needed := LIBRARIES[library]) is not None:
                    print(prune.prune(to, arch if needed else 0))


def fill(site: pathlib.Path, version: str, python: str, arch: int) -> None:
    vllm, *others = download(version, python)
    unpack_vllm(vllm, site, arch)
    for wheel in others:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    for name in NAMED:
        (site / name).mkdir()
        (site / name / "__init__.py").write_text(STAND_IN)
    # The package itself is the source tree's; vLLM finds it by this.
    plugin = site / f"kvstrata_vllm-{VERSION}.dist-info"
    plugin.mkdir()
    for name, text in PLUGIN.items():
        (plugin / name).write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--version", default="0.32.0", help="vLLM's; 0.33.0 is packed beside it")
    parser.add_argument("--python", default="3.12", help="the machine's")
    parser.add_argument("--arch", type=int, default=90, help="compute capability, as 90")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    packed = arguments.out / f"site{arguments.version.split('.')[1]}.tar.xz"
    if packed.exists():
        return
    with tempfile.TemporaryDirectory(dir=arguments.out) as folder:
        site = pathlib.Path(folder) / "site"
        site.mkdir()
        fill(site, arguments.version, arguments.python, arguments.arch)
        with tarfile.open(packed, "w:xz", preset=6) as archive:
            archive.add(site, "site")
        print(f"{packed}: {packed.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
