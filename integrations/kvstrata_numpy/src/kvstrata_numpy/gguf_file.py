# SPDX-License-Identifier: Apache-2.0
"""Reads a GGUF file: metadata as plain Python values, tensors dequantised to fp32.

Errors: GgufError, which names the file, what is wrong and what would be right. A truncated or foreign
file never yields tensors.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from kvstrata.identity import digest_of
from kvstrata.tree_hash import tree_sum

Array = npt.NDArray[np.float32]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# What this engine has been tested with; others of gguf's own dequantiser would work but are unproven.
TENSOR_TYPES = ("F32", "F16", "Q8_0", "Q4_1", "Q4_0")


class GgufError(ValueError):
    """A GGUF file that cannot be used, and why."""


@dataclass
class GgufFile:
    """Metadata and lazily dequantised tensors. The file stays mapped as long as this lives."""

    path: str
    metadata: dict[str, Any]
    _tensors: dict[str, gguf.ReaderTensor]
    _file: npt.NDArray[np.uint8]

    def names(self) -> list[str]:
        return list(self._tensors)

    def tensor(self, name: str) -> Array:
        """fp32 [rows, columns] or [columns], as the file's row-major order has it."""
        if name not in self._tensors:
            raise GgufError(f"{self.path}: tensor {name!r} is missing; the file is incomplete "
                            "or of another architecture")
        tensor = self._tensors[name]
        kind = tensor.tensor_type.name
        if kind not in TENSOR_TYPES:
            raise GgufError(f"{self.path}: tensor {name!r} has type {kind}; "
                            f"supported: {', '.join(TENSOR_TYPES)}")
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        shape = tuple(int(n) for n in reversed(tensor.shape))
        return np.ascontiguousarray(values.reshape(shape), np.float32)

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(key, default)

    def require(self, key: str) -> Any:
        if key not in self.metadata:
            raise GgufError(f"{self.path}: metadata key {key!r} is missing")
        return self.metadata[key]

    def digest(self) -> str:
        """The model's identity towards the daemon: of the file as it is mapped, read anew (0.1 s a GB), and of this
        engine, which computes in float32."""
        return digest_of({"engine": "numpy", "file": tree_sum(self._file).hex()})


def _check_header(path: str) -> None:
    try:
        with open(path, "rb") as file:
            head = file.read(24)
    except OSError as error:
        raise GgufError(f"{path}: cannot be read: {error.strerror}") from error
    if head[:4] != MAGIC:
        raise GgufError(f"{path}: not a GGUF file: it starts with {head[:4]!r}, not {MAGIC!r}")
    if len(head) < 24:
        raise GgufError(f"{path}: truncated: {len(head)} bytes, a header alone has 24")
    version = int.from_bytes(head[4:8], "little")
    if version not in VERSIONS:
        raise GgufError(f"{path}: GGUF version {version}; supported: {VERSIONS[0]} and {VERSIONS[1]}")


def _value(field: gguf.ReaderField) -> Any:
    """A field's value; string arrays decoded in one pass, which is much faster than field.contents()."""
    types = field.types
    if types and types[0] == gguf.GGUFValueType.ARRAY:
        if types[-1] == gguf.GGUFValueType.STRING:
            return [bytes(field.parts[i]).decode("utf-8") for i in field.data]
        return [field.parts[i][0].item() for i in field.data]
    return field.contents()


def read(path: str | os.PathLike[str]) -> GgufFile:
    """Maps the file and checks that every tensor lies inside it."""
    path = os.fspath(path)
    _check_header(path)
    size = os.path.getsize(path)
    try:
        reader = gguf.GGUFReader(path)
        metadata = {name: _value(field) for name, field in reader.fields.items()}
    except Exception as error:  # the reader meets a short file with whatever numpy raises
        raise GgufError(f"{path}: truncated or damaged: {size} bytes do not hold what the header "
                        f"promises ({type(error).__name__}: {error})") from error
    for tensor in reader.tensors:
        end = int(tensor.data_offset) + int(tensor.n_bytes)
        if end > size or int(tensor.data.nbytes) != int(tensor.n_bytes):
            raise GgufError(f"{path}: truncated: tensor {tensor.name!r} ends at byte {end}, "
                            f"the file at {size}")
    return GgufFile(path, metadata, {tensor.name: tensor for tensor in reader.tensors}, reader.data)
