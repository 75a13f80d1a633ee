# SPDX-License-Identifier: Apache-2.0
"""research/gemma_student.py: its logits are those of transformers, by full attention and decoded behind a prompt with
a budget that holds everything; and a training of a tiny model has routers of its served layers alone."""

from __future__ import annotations

import base64
import json
import lzma
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

import gemma_student as ours
import sekv_student

ROOT = pathlib.Path(__file__).resolve().parents[2]

SEED, CPU, TOKENS, BEHIND, VOCABULARY = 20261126, torch.device("cpu"), 200, 12, 300
LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A tiny random model whose window is shorter than its prompts, and texts as token ids."""
    made = tmp_path_factory.mktemp("gemma")
    torch.manual_seed(SEED)
    model = Gemma3ForCausalLM(Gemma3TextConfig(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=96, num_hidden_layers=len(LAYERS), num_attention_heads=4,
        num_key_value_heads=1, head_dim=32, query_pre_attn_scalar=32, sliding_window=40, max_position_embeddings=1024,
        layer_types=LAYERS, initializer_range=0.2, bos_token_id=2, eos_token_id=1, pad_token_id=0,
        rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 1e6},
                         "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.normal_(std=0.3)
    model.save_pretrained(made)
    random = np.random.default_rng(SEED)
    with lzma.open(made / "ids.jsonl.xz", "wt") as file:
        for i in range(64):
            ids = random.integers(3, VOCABULARY, size=1500).astype("<u2")
            file.write(json.dumps({"source": f"made/{i}", "ids": base64.b64encode(ids.tobytes()).decode()}) + "\n")
    return made


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    print(f"seed {SEED}")
    return torch.randint(3, VOCABULARY, (2, TOKENS + BEHIND), generator=torch.Generator().manual_seed(SEED))


@pytest.fixture(scope="module")
def wanted(folder: pathlib.Path, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return Gemma3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(ids).logits


def test_full_attention_is_transformers(folder: pathlib.Path, ids: torch.Tensor, wanted: torch.Tensor):
    student = ours.student_of(folder, CPU, torch.float32, 512)
    assert student.served == [1, 3]
    read = student.read(ids)
    assert read.keys.shape == (2, 2, 1, TOKENS + BEHIND, 32) and sorted(read.windowed) == [0, 2, 4]
    torch.testing.assert_close(student.logits(read.hidden), wanted, rtol=1e-3, atol=1e-3)


def test_a_budget_that_holds_all_is_transformers(folder: pathlib.Path, ids: torch.Tensor, wanted: torch.Tensor,
                                                 monkeypatch: pytest.MonkeyPatch):
    """And a small one is not: what sliding layers see of the prompt is right, what served layers lose is the plan's."""
    monkeypatch.setattr(sekv_student, "MAX_LOSS", 0.0)  # no span as factors
    student = ours.student_of(folder, CPU, torch.float32, 512)
    with torch.no_grad():
        batch = student.batch(ids, BEHIND, 16)
        assert bool((batch.spans.length > 0).any()), "no span in this case"
        whole, small = (student.decode(batch, sekv_student.Parameters(2, 4, 32, SEED), share) for share in (2.0, 0.2))
    torch.testing.assert_close(whole.logits, wanted[:, TOKENS:], rtol=1e-3, atol=1e-3)
    assert float((small.logits - wanted[:, TOKENS:]).abs().max()) > 1e-2


def test_training_is_of_the_served_layers(folder: pathlib.Path, tmp_path: pathlib.Path):
    options = {"--model": folder, "--texts": folder / "ids.jsonl.xz", "--out": tmp_path, "--state": tmp_path / "state",
               "--device": "cpu", "--steps": 2, "--tokens": 256, "--prompts": 256, "--behind": 16, "--local": 32, "--window": 2,
               "--refresh": 2, "--check-every": 2, "--choice": 2, "--held": 2, "--held-prompt": 128, "--held-behind": 16,
               "--held-shares": 0.8, "--share": 0.8, "--gate-steps": 20, "--name": "tiny"}
    subprocess.run([sys.executable, ROOT / "research/train_sekv.py", *(str(part) for pair in options.items() for part in pair)],
                   check=True)
    made, told = load_file(tmp_path / "tiny.safetensors"), json.loads((tmp_path / "tiny.json").read_text())
    assert made["W"].shape == (2, 4, 32, 32) and made["g_phi.0.weight"].shape == (64, 64) and told["vocabulary"] == VOCABULARY
    assert len(told["checks"]) == 2 and all(row["zoom"] > 0 for row in told["checks"])
