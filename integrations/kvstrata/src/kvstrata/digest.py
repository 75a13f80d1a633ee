# SPDX-License-Identifier: Apache-2.0
"""A model's digest: what two engines must agree on before they share pages.

    digest = digest_of_folder("SmolLM2", dtype="bfloat16", rope={"rope_theta": 10000.0, "rope_type": "default"})

Rule 1 (docs/python.md): SHA-256 over lines "kvstrata model 1", the dtype that keys are computed in, RoPE's parameters
as JSON with sorted keys (null: it has none; `type` is left out where `rope_type` says the same, as some engines have
both), and for each weight in order of its name: name, a space, SHA-256 of its bytes. Weights are the *.safetensors of
the folder; for a model that has no files the tensors of its state dict.

A file is read once (about 1 s for 500 MB); what it gave is kept in ${XDG_CACHE_HOME:-~/.cache}/kvstrata/digests under
its path, inode, size and mtime. Threads and processes: any.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from .errors import error_of

RULE = "kvstrata model 1"


def digest_of_folder(folder: str | os.PathLike[str], dtype: str, rope: Mapping[str, Any] | None) -> str:
    """Of the weights in `folder`. NotFound DIGEST_NO_WEIGHTS: it has no *.safetensors."""
    files = sorted(pathlib.Path(folder).glob("*.safetensors"), key=lambda file: file.name)
    if not files:
        raise error_of(5, "DIGEST_NO_WEIGHTS", f"folder {os.fspath(folder)!r} has no *.safetensors; save the model "
                       "with save_pretrained, or pass its tensors to digest_of_tensors")
    return _digest(dtype, rope, ((file.name, _file_sum(file)) for file in files))


def digest_of_tensors(tensors: Iterable[tuple[str, bytes | memoryview]], dtype: str,
                      rope: Mapping[str, Any] | None) -> str:
    """Of (name, contiguous bytes) pairs in any order; all of them are read at each call."""
    sums = {name: hashlib.sha256(data).hexdigest() for name, data in tensors}
    return _digest(dtype, rope, sorted(sums.items()))


def _digest(dtype: str, rope: Mapping[str, Any] | None, weights: Iterable[tuple[str, str]]) -> str:
    if rope is not None and "rope_type" in rope and rope.get("type") == rope["rope_type"]:
        rope = {name: value for name, value in rope.items() if name != "type"}
    lines = [RULE, dtype, json.dumps(rope, sort_keys=True), *(f"{name} {value}" for name, value in weights)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _file_sum(file: pathlib.Path) -> str:
    file = file.resolve()
    with file.open("rb") as stream:
        stat = os.fstat(stream.fileno())
        key = f"{file}\0{stat.st_ino}\0{stat.st_size}\0{stat.st_mtime_ns}"
        kept = _cache() / hashlib.sha256(key.encode()).hexdigest()
        if kept.exists():
            return kept.read_text()
        value = hashlib.file_digest(stream, "sha256").hexdigest()
    _keep(kept, value)
    return value


def _cache() -> pathlib.Path:
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvstrata" / "digests"


def _keep(file: pathlib.Path, value: str) -> None:
    """Whole or not at all, beside other processes; where nothing can be written, it is computed again each time."""
    partial = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(value)
        partial.replace(file)
    except OSError:
        partial.unlink(missing_ok=True)
