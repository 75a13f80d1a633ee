# SPDX-License-Identifier: Apache-2.0
"""kvstrata.digest: equal for equal weights, whoever reads them; another one for anything else."""

from __future__ import annotations

import hashlib
import os
import pathlib
from typing import Any, BinaryIO

import kvstrata
import pytest
from kvstrata.digest import digest_of_folder, digest_of_tensors

FILE_DIGEST = hashlib.file_digest
ROPE = {"rope_theta": 10000.0, "rope_type": "default"}


@pytest.fixture
def weights(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("b", "a"):
        (folder / f"{name}.safetensors").write_bytes(name.encode() * 1000)
    (folder / "README.md").write_text("not of the weights")
    return folder


def test_what_is_in_it(weights: pathlib.Path):
    digest = digest_of_folder(weights, "bfloat16", ROPE)
    assert digest == digest_of_folder(weights, "bfloat16", dict(reversed(ROPE.items())))
    pairs = [("b.safetensors", b"b" * 1000), ("a.safetensors", memoryview(b"a" * 1000))]
    assert digest == digest_of_tensors(pairs, "bfloat16", ROPE)
    assert digest == digest_of_folder(weights, "bfloat16", {**ROPE, "type": "default"})
    others = {digest_of_folder(weights, "float32", ROPE),
              digest_of_folder(weights, "bfloat16", {**ROPE, "rope_theta": 5e5}),
              digest_of_folder(weights, "bfloat16", {**ROPE, "type": "linear"}),
              digest_of_tensors(pairs[:1], "bfloat16", ROPE)}
    assert len(others) == 4 and digest not in others


def test_a_sum_is_kept_until_the_file_changes(weights: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    first = digest_of_folder(weights, "bfloat16", ROPE)
    read: list[str] = []

    def counted(stream: BinaryIO, name: str) -> Any:
        read.append(stream.name)
        return FILE_DIGEST(stream, name)

    monkeypatch.setattr(hashlib, "file_digest", counted)
    assert digest_of_folder(weights, "bfloat16", ROPE) == first and not read
    (weights / "a.safetensors").write_bytes(b"c" * 1000)
    os.utime(weights / "a.safetensors", ns=(1, 1))
    assert digest_of_folder(weights, "bfloat16", ROPE) != first and len(read) == 1


def test_without_a_cache(weights: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    first = digest_of_folder(weights, "bfloat16", ROPE)
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nobody/writes/here")
    assert digest_of_folder(weights, "bfloat16", ROPE) == first


def test_no_weights(tmp_path: pathlib.Path):
    with pytest.raises(kvstrata.NotFound, match="no .*safetensors"):
        digest_of_folder(tmp_path, "bfloat16", ROPE)
