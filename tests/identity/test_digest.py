# SPDX-License-Identifier: Apache-2.0
"""kvstrata.digest: of the files that are there now, whatever their stat says; another one for anything else."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import kvstrata
import numpy as np
import pytest
from kvstrata.digest import digest_of_folder, digest_of_tensors
from safetensors.numpy import save_file

CONFIG = {"rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}, "use_cache": True}


def _save(folder: pathlib.Path, *files: dict[str, Any], config: dict[str, Any] = CONFIG) -> pathlib.Path:
    folder.mkdir(exist_ok=True)
    for i, tensors in enumerate(files):
        save_file(tensors, folder / f"model-{i}.safetensors", metadata={"file": str(i)})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _weights(seed: int = 0) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {"a": random.random((3, 4), np.float32), "b": random.random(70000)}


def test_what_is_in_it(tmp_path: pathlib.Path):
    a, b = _weights()["a"], _weights()["b"]
    digest = digest_of_folder(_save(tmp_path / "m", {"a": a, "b": b}), "bfloat16")
    assert digest == digest_of_folder(_save(tmp_path / "shards", {"b": b}, {"a": a}), "bfloat16", {})
    harmless = {**CONFIG, "use_cache": False, "_name_or_path": "x"}
    assert digest == digest_of_folder(_save(tmp_path / "harmless", {"a": a, "b": b}, config=harmless), "bfloat16")
    others = {digest_of_folder(_save(tmp_path / str(i), *files, config=config), dtype, settings)
              for i, (files, config, dtype, settings) in enumerate((
                  (({"a": a, "b": b},), CONFIG, "float32", None),
                  (({"a": a, "b": b},), CONFIG, "bfloat16", {"rms_norm_eps": 0.5}),
                  (({"a": a, "b": b},), {**CONFIG, "rms_norm_eps": 1e-6}, "bfloat16", None),
                  (({"a": a.T.copy(), "b": b},), CONFIG, "bfloat16", None),
                  (({"a": a.view(np.int32), "b": b},), CONFIG, "bfloat16", None),
                  (({"a": a, "c": b},), CONFIG, "bfloat16", None),
                  (({"a": a},), CONFIG, "bfloat16", None),
                  (({"a": a, "b": b}, {"a": a + 1}), CONFIG, "bfloat16", None)))}
    assert len(others) == 8 and digest not in others


def test_a_file_is_read_whatever_its_stat_says(tmp_path: pathlib.Path):
    folder, digests = tmp_path / "m", []
    for seed in (0, 1, 0):
        other = _save(tmp_path / str(seed), _weights(seed)) / "model-0.safetensors"
        _save(folder)
        with open(folder / "model-0.safetensors", "r+b" if digests else "wb") as file:
            file.write(other.read_bytes())
        os.utime(folder / "model-0.safetensors", ns=(1, 1))
        digests.append(digest_of_folder(folder, "float32"))
    assert digests[0] == digests[2] != digests[1]


def test_tensors(tmp_path: pathlib.Path):
    digest = digest_of_tensors(_weights().items(), "float32")
    assert digest == digest_of_tensors(reversed(_weights().items()), "float32")
    assert digest != digest_of_tensors(_weights(1).items(), "float32")
    assert digest != digest_of_tensors(_weights().items(), "float32", config=CONFIG)


def test_no_weights(tmp_path: pathlib.Path):
    with pytest.raises(kvstrata.NotFound, match="no .*safetensors"):
        digest_of_folder(tmp_path, "bfloat16")


@pytest.mark.parametrize("content", [b"", b"x" * 4, b"\xff" * 100, b"\2\0\0\0\0\0\0\0[]"])
def test_files_of_another_kind(tmp_path: pathlib.Path, content: bytes):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(kvstrata.InvalidArgument, match="model.safetensors.*header"):
        digest_of_folder(tmp_path, "bfloat16")
