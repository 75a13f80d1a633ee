# SPDX-License-Identifier: Apache-2.0
"""A digest of a model's files: for `digest=`, where two engines that load differently are to share pages.

    digest = digest_of_folder("SmolLM2", dtype="bfloat16")
    kvstrata_transformers.enable(model, digest=digest)      # and the same in vLLM's kv_connector_extra_config

By themselves engines share with their own kind alone, by what they loaded (kvstrata.torch_identity, docs/identity.md).
Whoever names a digest says that what was loaded is what the files have: no adapter, no quantisation on loading, no
override of the configuration but what `settings` names.

All bytes are read at each call (0.1 s a GB and core, if they are in the page cache). Threads and processes: any.
"""

from __future__ import annotations

import json
import mmap
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .errors import error_of
from .identity import Walk, digest_of, without_harmless
from .tree_hash import tree_sums


def digest_of_folder(folder: str | os.PathLike[str], dtype: str, settings: Mapping[str, Any] | None = None) -> str:
    """Digest of the tensors in all *.safetensors of `folder`, however they are divided among files, and of its
    config.json less the fields in HARMLESS. dtype: in which keys are computed ("bfloat16"). settings: what the engine
    was told beside the files that changes keys or values, the same words in all engines.

    NotFound DIGEST_NO_WEIGHTS: it has no *.safetensors; InvalidArgument DIGEST_FILE: one that is none."""
    folder = pathlib.Path(folder)
    files = sorted(folder.glob("*.safetensors"), key=lambda file: file.name)
    if not files:
        raise error_of(5, "DIGEST_NO_WEIGHTS", f"folder {os.fspath(folder)!r} has no *.safetensors; save the model "
                       "with save_pretrained, or pass its tensors to digest_of_tensors")
    config = folder / "config.json"
    fields = without_harmless(json.loads(config.read_text())) if config.exists() else None
    found = [entry for file in files for entry in _tensors(file)]
    tensors: dict[str, list[Any]] = {}  # several of one name: folders of variants
    for (name, about, _), value in zip(found, tree_sums(data for *_, data in found)):
        tensors.setdefault(name, []).append([*about, value.hex()])
    return _digest(dtype, settings, fields, tensors)


def digest_of_tensors(tensors: Iterable[tuple[str, Any]], dtype: str, settings: Mapping[str, Any] | None = None,
                      config: Mapping[str, Any] | None = None) -> str:
    """The digest of (name, contiguous buffer) pairs in any order. config: as config.json has it."""
    names, buffers = zip(*tensors)
    sums = dict(zip(names, (value.hex() for value in tree_sums(buffers))))
    return _digest(dtype, settings, None if config is None else without_harmless(config), sums)


def _digest(dtype: str, settings: Mapping[str, Any] | None, config: Any, tensors: Mapping[str, Any]) -> str:
    return digest_of({"dtype": dtype, "settings": Walk(strict=True).of(dict(settings or {}), "settings"),
                      "config": config, "tensors": tensors})


def _tensors(file: pathlib.Path) -> Iterator[tuple[str, list[Any], memoryview]]:
    """(name, [dtype, shape], bytes) of each, as the file's header has them."""
    with file.open("rb") as stream:
        data = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) if os.fstat(stream.fileno()).st_size
                          else b"")
    try:
        begin = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(bytes(data[8:begin]))
        for name, about in sorted(header.items()):
            if name != "__metadata__":
                first, end = about["data_offsets"]
                yield name, [about["dtype"], about["shape"]], data[begin + first:begin + end]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise error_of(3, "DIGEST_FILE", f"file {os.fspath(file)!r} has no header of safetensors ({error}); save the "
                       "model again") from error
