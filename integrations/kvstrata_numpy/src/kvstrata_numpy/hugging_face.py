# SPDX-License-Identifier: Apache-2.0
"""A Llama-family GGUF as a Hugging Face folder: config.json, model.safetensors in fp32, tokenizer.json.

    python -m kvstrata_numpy.hugging_face MODEL.gguf FOLDER

For engines that read no GGUF, on a machine that cannot fetch the original: weights are those of the GGUF, dequantised.
Needs safetensors. SmolLM2-135M: 540 MB, 10 s. Errors: gguf_file.GgufError; FileExistsError: FOLDER is there.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import tempfile
from typing import Any

from safetensors.numpy import save_file

from . import gguf_file
from .download import cache_folder, model_path
from .gguf_file import Array, GgufFile
from .llama import Config, config_of, halves
from .tokenizer import Tokenizer

_LAYER = {"self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate",
          "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
          "post_attention_layernorm": "ffn_norm"}


def write(source: str | os.PathLike[str], folder: str | os.PathLike[str]) -> None:
    """The whole folder or nothing: it is made beside its place and renamed."""
    target = pathlib.Path(folder)
    if target.exists():
        raise FileExistsError(f"{target} is there already; remove it, or name another folder")
    file = gguf_file.read(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=target.name) as beside:
        made = pathlib.Path(beside) / "folder"
        made.mkdir()
        save_file(_weights(file, config_of(file)), made / "model.safetensors", metadata={"format": "pt"})
        tokenizer = Tokenizer(file)
        tokenizer.save(str(made / "tokenizer.json"))
        for name, content in _json_files(file, config_of(file)).items():
            (made / name).write_text(json.dumps(content, indent=1))
        made.rename(target)


def cached() -> pathlib.Path:
    """The folder of the demos' model (download.model_path), made in the cache where it is not there. Errors: those of
    write(), and download.DownloadError."""
    source = pathlib.Path(model_path())
    folder = cache_folder() / f"{source.name}.hf"
    if not folder.exists():
        print(f"making {folder}", file=sys.stderr, flush=True)
        write(source, folder)
    return folder


def _weights(file: GgufFile, config: Config) -> dict[str, Array]:
    weights = {"model.embed_tokens.weight": file.tensor("token_embd.weight"),
               "model.norm.weight": file.tensor("output_norm.weight")}
    if "output.weight" in file.names():
        weights["lm_head.weight"] = file.tensor("output.weight")
    for i in range(config.layers):
        of = lambda name: file.tensor(f"blk.{i}.{name}.weight")
        layer = {theirs: of(ours) for theirs, ours in _LAYER.items()}
        layer["self_attn.q_proj"] = halves(of("attn_q"), config.query_heads)
        layer["self_attn.k_proj"] = halves(of("attn_k"), config.kv_heads)
        weights |= {f"model.layers.{i}.{name}.weight": value for name, value in layer.items()}
    return weights


def _json_files(file: GgufFile, config: Config) -> dict[str, dict[str, Any]]:
    tokens = file.require("tokenizer.ggml.tokens")
    bos, eos = file.require("tokenizer.ggml.bos_token_id"), file.require("tokenizer.ggml.eos_token_id")
    ids = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": eos}
    return {
        "config.json": {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "attention_bias": False,
            "mlp_bias": False, "hidden_size": config.width, "num_hidden_layers": config.layers,
            "intermediate_size": file.require("llama.feed_forward_length"), "num_attention_heads": config.query_heads,
            "num_key_value_heads": config.kv_heads, "head_dim": config.head_dim, "vocab_size": config.vocabulary,
            "max_position_embeddings": config.context, "rms_norm_eps": config.epsilon, "torch_dtype": "float32",
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
            "tie_word_embeddings": "output.weight" not in file.names(), **ids},
        "generation_config.json": ids,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": tokens[bos], "eos_token": tokens[eos],
            "pad_token": tokens[eos], "padding_side": "left", "model_max_length": config.context,
            "clean_up_tokenization_spaces": False, "chat_template": file.get("tokenizer.chat_template")}}


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m kvstrata_numpy.hugging_face MODEL.gguf FOLDER")
    write(sys.argv[1], sys.argv[2])
