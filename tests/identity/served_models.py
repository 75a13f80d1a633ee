# SPDX-License-Identifier: Apache-2.0
"""Small random models that pages serve, plain and enabled, and how their answers compare."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from kvstrata.daemon import Daemon
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import kvstrata_transformers

MARGIN = 3e-4  # logits; kernels sum in another order than torch
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 500, "max_position_embeddings": 2048,
         "initializer_range": 0.1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}


def small(kind: str = "llama", **changes: Any) -> Any:
    """The same weights at each call."""
    torch.manual_seed(20261128)
    config = CONFIG_MAPPING[kind](**{**SIZES, **copy.deepcopy(changes)})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def pair(daemon: Daemon, plan: str = "full", kind: str = "llama", enable: dict[str, Any] | None = None,
         **changes: Any) -> tuple[Any, Any]:
    """A plain model, and the same one enabled."""
    plain, model = small(kind, **changes), small(kind, **changes)
    kvstrata_transformers.enable(model, plan, socket=daemon.socket, **(enable or {}))
    return plain, model


def ids_of(tokens: int, seed: int = 0, rows: int = 1) -> torch.Tensor:
    """Random ids [rows][tokens], no padding among them."""
    return torch.from_numpy(np.random.default_rng(seed).integers(3, 500, (rows, tokens)))


def prompt_of(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def padded(*lengths: int, seed: int = 0, right: bool = False) -> dict[str, torch.Tensor]:
    """A batch of random prompts, padded on the left unless told otherwise."""
    longest = max(lengths)
    ids = torch.zeros(len(lengths), longest, dtype=torch.long)
    for row, n in enumerate(lengths):
        begin = 0 if right else longest - n
        ids[row, begin:begin + n] = ids_of(n, seed + row)[0]
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


@contextlib.contextmanager
def columns_of(model: Any) -> Iterator[list[int]]:
    """The number of columns of each forward pass, as they come."""
    seen: list[int] = []

    def count(module: Any, args: Any, kwargs: Any) -> None:
        seen.append((kwargs["inputs_embeds"] if kwargs.get("input_ids") is None else kwargs["input_ids"]).shape[1])

    hook = model.base_model.register_forward_pre_hook(count, with_kwargs=True)
    yield seen
    hook.remove()


def answer(model: Any, prompt: torch.Tensor | dict[str, Any], tokens: int = 8, **options: Any) -> Any:
    batch = prompt_of(prompt) if isinstance(prompt, torch.Tensor) else prompt
    options = {"do_sample": False, "max_new_tokens": tokens, "return_dict_in_generate": True, "output_logits": True,
               **options}
    return model.generate(**batch, **options)


def assert_same(want: Any, got: Any) -> None:
    """Logits within rounding, and equal tokens up to the first place where the plain model does not tell two apart."""
    assert len(want.logits) == len(got.logits)
    for step, (a, b) in enumerate(zip(want.logits, got.logits)):
        torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-3, equal_nan=True, msg=lambda text: f"step {step}: {text}")
        begin = want.sequences.shape[1] - len(want.logits)
        chosen, other = want.sequences[:, begin + step], got.sequences[:, begin + step]
        if not torch.equal(chosen, other):
            margin = (a.gather(1, chosen[:, None]) - a.gather(1, other[:, None])).max()
            assert margin <= MARGIN, f"step {step}: tokens differ where the plain model's margin is {margin}"
            return
    assert torch.equal(want.sequences, got.sequences)


def compare(plain: Any, model: Any, prompt: torch.Tensor | dict[str, Any], tokens: int = 8, **options: Any) -> list[int]:
    """Asserts equal answers; the number of columns of each of the enabled model's passes."""
    want = answer(plain, prompt, tokens, **options)
    with columns_of(model) as columns:
        got = answer(model, prompt, tokens, **options)
    assert_same(want, got)
    return columns
