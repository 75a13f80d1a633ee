"""The digest of a transformers model, by kvstrata.digest's rule."""

from __future__ import annotations

import os
from typing import Any

import torch

from kvstrata.digest import digest_of_folder, digest_of_tensors

from .served import Unsupported


def digest_of(model: Any) -> str:
    """Of the files that it was loaded from, else of its tensors. Unsupported: it has adapters of its own."""
    if getattr(model, "peft_config", None) or getattr(model, "_hf_peft_config_loaded", False):
        raise Unsupported(f"{type(model).__name__} has adapters that its files do not have; pass enable() a digest "
                          "that names them")
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {"rope_theta": getattr(config, "rope_theta", None)}
    dtype = str(model.dtype).removeprefix("torch.")
    folder = _folder_of(model.config._name_or_path)
    if folder is not None:
        try:
            return digest_of_folder(folder, dtype, rope)
        except FileNotFoundError:
            pass  # loaded from another format
    tensors = ((name, _bytes_of(tensor)) for name, tensor in model.state_dict().items())
    return digest_of_tensors(tensors, dtype, rope)


def _folder_of(name: str) -> str | None:
    if not name:
        return None
    if os.path.isdir(name):
        return name
    from huggingface_hub import try_to_load_from_cache
    config = try_to_load_from_cache(name, "config.json")
    return os.path.dirname(config) if isinstance(config, str) else None


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
