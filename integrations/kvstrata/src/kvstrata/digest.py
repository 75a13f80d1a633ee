"""A model's digest: one rule for all engines, so that two of them share pages where they compute the same.

    sha256 over   "kvstrata-digest-1\\n"
                  the name of the compute dtype ("float32", "float16", "bfloat16") and "\\n"
                  the RoPE parameters as JSON, keys sorted, without spaces, and "\\n"
                  the weights: of each *.safetensors of the folder, by name, its name, "\\n" and its sha256 in hex
                  and "\\n"; of a model without files, of each tensor by name, its name, "\\n" and the sha256 of
                  its bytes in hex and "\\n"

RoPE parameters are those of the model's config.json (`rope_parameters`, or `rope_theta` and `rope_scaling`). Weights
that were changed since they were loaded (training, a merged adapter) are not those of the files: name a digest of
your own then.

Cost: a file is read once (about 1 GB/s); its sum is kept in ~/.cache/kvstrata/digests under its path, inode, size and
time of change. Threads: any.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

_HEAD = "kvstrata-digest-1\n"


def digest_of_folder(folder: str | os.PathLike[str], dtype: str, rope: Mapping[str, Any]) -> str:
    """Of a model whose weights are the folder's *.safetensors. FileNotFoundError: there are none."""
    files = sorted(pathlib.Path(folder).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"folder '{folder}' has no *.safetensors; pass tensors to digest_of_tensors")
    return _digest(dtype, rope, ((file.name, _sum_of_file(file)) for file in files))


def digest_of_tensors(tensors: Iterable[tuple[str, bytes | memoryview]], dtype: str, rope: Mapping[str, Any]) -> str:
    """Of a model without files: names and contiguous bytes."""
    return _digest(dtype, rope, ((name, hashlib.sha256(data).hexdigest()) for name, data in sorted(tensors)))


def _digest(dtype: str, rope: Mapping[str, Any], sums: Iterable[tuple[str, str]]) -> str:
    sha = hashlib.sha256(f"{_HEAD}{dtype}\n{json.dumps(rope, sort_keys=True, separators=(',', ':'))}\n".encode())
    for name, value in sums:
        sha.update(f"{name}\n{value}\n".encode())
    return f"sha256:{sha.hexdigest()}"


def _sum_of_file(file: pathlib.Path) -> str:
    real = file.resolve()
    stat = real.stat()
    key = f"{real}\n{stat.st_ino}\n{stat.st_size}\n{stat.st_mtime_ns}\n"
    kept = _cache_folder() / hashlib.sha256(key.encode()).hexdigest()
    try:
        return kept.read_text()
    except OSError:
        pass
    with real.open("rb") as stream:
        value = hashlib.file_digest(stream, "sha256").hexdigest()
    _keep(kept, value)
    return value


def _cache_folder() -> pathlib.Path:
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "kvstrata" / "digests"


def _keep(file: pathlib.Path, value: str) -> None:
    """A sum that cannot be kept is computed again."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_text(value)
        partial.replace(file)
    except OSError:
        pass
