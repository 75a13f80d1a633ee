#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""SmolLM2 tuned for retrieval as a Hugging Face folder: the base's weights plus the adapter's change, with its RoPE
base.

    research/tuned.py [--adapter FILE] [--base FOLDER] [--folder FOLDER]

Without --folder it lies in kvstrata's cache, named by the adapter's digest, and is made where it is not there. numpy
alone; 540 MB, a few seconds. Any engine that reads Hugging Face folders loads it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pathlib
import shutil
import sys
import tempfile
from typing import NamedTuple

import numpy as np
import safetensors
from safetensors.numpy import load_file, save_file

ROOT = pathlib.Path(__file__).resolve().parents[1]
ADAPTER = pathlib.Path(__file__).resolve().parent / "retrieval" / "adapter.safetensors"
sys.path += [str(ROOT / "integrations" / name / "src") for name in ("kvstrata", "kvstrata_numpy")]


class Adapter(NamedTuple):
    """`changes`: by the name of the weight in the model, [out, in] fp32, to be added to it. `context`: tokens that it
    was trained with at most."""
    changes: dict[str, np.ndarray]
    rope_theta: float
    context: int


def _array(tensor: dict) -> np.ndarray:
    """fp32 of bf16 bytes: numpy has no such type."""
    if tensor["dtype"] != "BF16":
        raise ValueError(f"an adapter's factors are BF16, not {tensor['dtype']}")
    half = np.frombuffer(tensor["data"], np.uint16).astype(np.uint32)
    return (half << 16).view(np.float32).reshape(tensor["shape"])


def read(path: pathlib.Path) -> Adapter:
    """Errors: OSError; ValueError, not an adapter of train_retrieval.py."""
    content = path.read_bytes()
    header = json.loads(content[8:8 + int.from_bytes(content[:8], "little")])
    about = header.get("__metadata__", {})
    if "rope_theta" not in about:
        raise ValueError(f"{path}: no rope_theta in its metadata; is it an adapter of train_retrieval.py?")
    factors = {name: _array(tensor) for name, tensor in safetensors.deserialize(content)}
    names = sorted(name.removesuffix(".lora_A") for name in factors if name.endswith(".lora_A"))
    changes = {f"{name}.weight": float(about["scale"]) * factors[f"{name}.lora_B"] @ factors[f"{name}.lora_A"]
               for name in names}
    return Adapter(changes, float(about["rope_theta"]), int(about["context"]))


def write(base: pathlib.Path, adapter: Adapter, folder: pathlib.Path) -> None:
    """The whole folder or nothing. Errors: FileExistsError; KeyError, a weight that the base does not have."""
    if folder.exists():
        raise FileExistsError(f"{folder} is there already; remove it, or name another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=folder.name) as beside:
        made = pathlib.Path(beside) / "folder"
        shutil.copytree(base, made, ignore=shutil.ignore_patterns("model.safetensors"))
        weights = load_file(base / "model.safetensors")
        for name, change in adapter.changes.items():
            weights[name] = weights[name] + change
        save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((made / "config.json").read_text())
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": adapter.rope_theta}
        config["max_position_embeddings"] = adapter.context
        (made / "config.json").write_text(json.dumps(config, indent=1))
        tokenizer = json.loads((made / "tokenizer_config.json").read_text())
        tokenizer["model_max_length"] = adapter.context
        (made / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=1))
        made.rename(folder)


def cached(adapter: pathlib.Path = ADAPTER) -> pathlib.Path:
    """The tuned model's folder in the cache. Errors: those of read(), write() and hugging_face.cached()."""
    from kvstrata_numpy import hugging_face
    base = hugging_face.cached()
    folder = base.with_name(f"{base.stem}.retrieval-{hashlib.sha256(adapter.read_bytes()).hexdigest()[:12]}.hf")
    if not folder.exists():
        print(f"making {folder}", file=sys.stderr, flush=True)
        write(base, read(adapter), folder)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--adapter", type=pathlib.Path, default=ADAPTER)
    parser.add_argument("--base", type=pathlib.Path, help="a Hugging Face folder; without it, that of the cache")
    parser.add_argument("--folder", type=pathlib.Path)
    args = parser.parse_args()
    if args.folder is None:
        print(cached(args.adapter))
        return 0
    base = args.base
    if base is None:
        from kvstrata_numpy import hugging_face
        base = hugging_face.cached()
    write(base, read(args.adapter), args.folder)
    print(args.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
