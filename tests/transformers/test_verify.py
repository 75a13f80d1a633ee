# SPDX-License-Identifier: Apache-2.0
"""KVSTRATA_VERIFY=1 on the real model: what is held is what it computes, in 32 and in 16 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kvstrata.daemon import Daemon
from transformers import AutoModelForCausalLM

import kvstrata_transformers
from conftest import batch_of, prompts_of
from kvstrata_transformers.verify import Verifier


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_held_prompts(folder, text_ids, daemon: Daemon, random, amount, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype):
    monkeypatch.setenv("KVSTRATA_VERIFY", "1")
    verified: list[Any] = []
    check = Verifier._check
    monkeypatch.setattr(Verifier, "_check", lambda self, row: (verified.append(row), check(self, row)))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    kvstrata_transformers.enable(model, socket=daemon.socket)
    batches = [prompts_of(text_ids, random, 3, 100, 800) for _ in range(amount(20))]
    for prompts in batches:
        for _ in range(2):
            model.generate(**batch_of(prompts, 2), max_new_tokens=2, do_sample=False)
    assert len(verified) >= 3 * len(batches)
    kvstrata_transformers.disable(model)
