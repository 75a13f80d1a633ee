# SPDX-License-Identifier: Apache-2.0
"""Small random models of families that differ in what they cache, and what vLLM must be told to run each on a CPU.

Their weights are large enough that tokens differ by what is attended to.
"""

from __future__ import annotations

import copy
import json
import pathlib
from typing import Any

import torch
from safetensors.torch import save_file

SEED = 20261128
SHAPE = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 8192,
         "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
# By family: transformers' configuration and model, what it has beside SHAPE, and arguments of vllm.LLM.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("Llama", {}, {}),
    "gemma3": ("Gemma3", {"num_hidden_layers": 4, "sliding_window": 300, "query_pre_attn_scalar": 64,
                          "layer_types": [*["sliding_attention"] * 3, "full_attention"]}, {}),
    "gpt_oss": ("GptOss", {"num_hidden_layers": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
                           "sliding_window": 128}, {"dtype": "bfloat16"}),
    "deepseek": ("DeepseekV2", {"num_key_value_heads": 2, "kv_lora_rank": 512, "q_lora_rank": 64,
                                "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
                                "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
                                "first_k_dense_replace": 1, "topk_method": "greedy", **_EXPERTS},
                 {"dtype": "bfloat16"}),
    "deepseek_v3": ("DeepseekV3", {"num_key_value_heads": 2, "kv_lora_rank": 512, "q_lora_rank": 64,
                                   "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
                                   "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
                                   "first_k_dense_replace": 1, "topk_method": "noaux_tc", **_EXPERTS},
                    {"dtype": "bfloat16"}),
    "qwen3_next": ("Qwen3Next", {"num_hidden_layers": 4, "linear_num_value_heads": 2, "linear_num_key_heads": 2,
                                 "linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_experts": 4,
                                 "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1,
                                 "layer_types": [*["linear_attention"] * 3, "full_attention"], **_EXPERTS},
                   {"dtype": "bfloat16", "enable_prefix_caching": True, "max_num_batched_tokens": 1024}),
    # Pages of attention are so large that a block is not made larger for a state.
    "wide": ("Qwen3Next", {"num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 256,
                           "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 128,
                           "linear_value_head_dim": 128, "num_experts": 4, "shared_expert_intermediate_size": 64,
                           "decoder_sparse_step": 1, "layer_types": [*["linear_attention"] * 3, "full_attention"],
                           **_EXPERTS},
             {"dtype": "bfloat16", "enable_prefix_caching": True, "max_num_batched_tokens": 1024}),
    "jamba": ("Jamba", {"num_hidden_layers": 4, "num_experts": 2, "num_experts_per_tok": 1, "expert_layer_period": 2,
                        "expert_layer_offset": 1, "attn_layer_period": 4, "attn_layer_offset": 1, "mamba_d_state": 16,
                        "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 8},
              {"dtype": "bfloat16", "enable_prefix_caching": True, "max_num_batched_tokens": 1024}),
    "granite": ("GraniteMoeHybrid", {"num_hidden_layers": 4, "num_local_experts": 2, "num_experts_per_tok": 1,
                                     "shared_intermediate_size": 64, "mamba_n_heads": 4, "mamba_d_head": 64,
                                     "mamba_n_groups": 1, "mamba_d_state": 64, "mamba_expand": 2,
                                     "mamba_chunk_size": 256, "layer_types": [*["mamba"] * 3, "attention"]},
                {"dtype": "bfloat16", "enable_prefix_caching": True, "max_num_batched_tokens": 1024}),
    "divisible": ("Llama", {"num_attention_heads": 4, "num_key_value_heads": 2}, {}),
    "fp8": ("Llama", {}, {"kv_cache_dtype": "fp8"}),
    "n_gram": ("Llama", {}, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3,
                                                    "prompt_lookup_max": 3, "prompt_lookup_min": 1}}),
}
IMAGE = 511
NOT_ON_CPUS = ("jamba", "granite")  # vLLM's CPU build has no forward of Mamba layers
_ARCHITECTURES = {"Gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig")}


def made(family: str, folder: pathlib.Path, seed: int = SEED) -> dict[str, Any]:
    """Arguments of vllm.LLM for a family's model, which is written to a folder in `folder`."""
    import transformers
    name, parts, arguments = FAMILIES[family]
    at = folder / f"{family}-{seed}"
    if not at.exists():
        model, config = _ARCHITECTURES.get(name, (f"{name}ForCausalLM", f"{name}Config"))
        fields = {**SHAPE, **copy.deepcopy(parts)}
        if name.startswith("Deepseek"):
            del fields["head_dim"]
        torch.manual_seed(seed)
        built = getattr(transformers, model)(getattr(transformers, config)(**fields))
        with torch.no_grad():
            for parameter in built.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(3)
        built.save_pretrained(at)
    return {"model": str(at), "skip_tokenizer_init": True, "max_model_len": 4096, **arguments}


def multimodal(at: pathlib.Path) -> dict[str, Any]:
    """Arguments of vllm.LLM for a small LLaVA, with a tokenizer of as many words as ids, in the folder `at`. The id IMAGE
    of a prompt is an image."""
    import transformers
    from tokenizers import Tokenizer, models
    words = {"<s>": 1, "</s>": 2, "<pad>": 0, "<image>": IMAGE,
             **{f"w{i}": i for i in range(3, SHAPE["vocab_size"]) if i != IMAGE}}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "<pad>")), bos_token="<s>", eos_token="</s>",
        pad_token="<pad>", additional_special_tokens=["<image>"])
    vision = transformers.CLIPVisionConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=2,
                                           num_attention_heads=1, image_size=56, patch_size=14, projection_dim=64)
    torch.manual_seed(SEED)
    config = transformers.LlavaConfig(
        architectures=["LlavaForConditionalGeneration"], vision_config=vision, image_token_index=IMAGE,
        text_config=transformers.LlamaConfig(**SHAPE), image_seq_length=16)
    model = transformers.LlavaForConditionalGeneration(config)
    # vLLM's name of the tower is that of older files.
    tensors = {name.replace("vision_tower.", "vision_tower.vision_model."): tensor.contiguous()
               for name, tensor in model.state_dict().items()}
    model.config.save_pretrained(at)
    save_file(tensors, at / "model.safetensors", metadata={"format": "pt"})
    images = transformers.CLIPImageProcessor(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    transformers.LlavaProcessor(images, tokenizer, patch_size=14, vision_feature_select_strategy="default",
                                image_token="<image>", num_additional_image_tokens=1).save_pretrained(at)
    return {"model": str(at), "max_model_len": 4096}


def draft(at: pathlib.Path) -> str:
    """The llama's EAGLE speculation, in the folder `at`: a layer over its embedding and its last hidden state."""
    import transformers
    torch.manual_seed(SEED)
    config = transformers.LlamaConfig(**{**SHAPE, "num_hidden_layers": 1})
    weights = {name.removeprefix("model."): tensor.clone() for name, tensor
               in transformers.LlamaForCausalLM(config).state_dict().items()
               if "layers.0." in name and "input_layernorm" not in name}
    weights["fc.weight"] = torch.randn(SHAPE["hidden_size"], 2 * SHAPE["hidden_size"]) * 0.05
    at.mkdir(exist_ok=True)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(at)
    save_file(weights, at / "model.safetensors")
    return str(at)


def adapter(at: pathlib.Path, base: str, seed: int) -> str:
    """A LoRA adapter of the llama, in the folder `at`."""
    at.mkdir(exist_ok=True)
    torch.manual_seed(seed)
    sizes = {"q_proj": (128, 128), "k_proj": (128, 64), "v_proj": (128, 64), "o_proj": (128, 128)}
    tensors = {}
    for layer in range(SHAPE["num_hidden_layers"]):
        for part, (wide, out) in sizes.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{part}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(8, wide) * 0.3
            tensors[f"{name}.lora_B.weight"] = torch.randn(out, 8) * 0.3
    save_file(tensors, at / "adapter_model.safetensors")
    (at / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "base_model_name_or_path": base, "r": 8, "lora_alpha": 16, "target_modules": [*sizes],
        "bias": "none", "task_type": "CAUSAL_LM"}))
    return str(at)


def prompt(tokens: int, number: int = 0) -> list[int]:
    """Ids that no two prompts of other numbers share the first of."""
    return [3 + (7 * i * i + 3 * i + 11 * number) % 500 for i in range(number, number + tokens)]
