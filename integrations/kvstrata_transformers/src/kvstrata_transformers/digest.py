# SPDX-License-Identifier: Apache-2.0
"""The digest of a transformers model, by kvstrata.digest's rule."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from kvstrata.digest import digest_of_folder, digest_of_tensors


def digest_of(model: Any) -> str:
    """Of the safetensors that the model was loaded from, else of its tensors (0.5 s a GB, at each enable).

    Weights that were changed after loading are not seen in the files: give such a model's digest to enable().
    """
    config = model.config.get_text_config(decoder=True)
    dtype, rope = str(model.dtype).removeprefix("torch."), getattr(config, "rope_parameters", None)
    folder = _folder(model)
    if folder is not None and any(folder.glob("*.safetensors")):
        return digest_of_folder(folder, dtype, rope)
    return digest_of_tensors(_tensors(model), dtype, rope)


def _folder(model: Any) -> pathlib.Path | None:
    """None: it was not loaded, or not as its files have it (adapters, quantized on loading)."""
    name = model.config._name_or_path
    if not name or getattr(model, "_hf_peft_config_loaded", False) or getattr(model, "is_quantized", False):
        return None
    if os.path.isdir(name):
        return pathlib.Path(name)
    file = try_to_load_from_cache(name, "config.json", revision=model.config._commit_hash)
    return pathlib.Path(file).parent if isinstance(file, str) else None


def _tensors(model: Any) -> Iterator[tuple[str, memoryview]]:
    for name, tensor in model.state_dict().items():
        yield name, tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
