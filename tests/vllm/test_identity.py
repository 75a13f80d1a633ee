# SPDX-License-Identifier: Apache-2.0
"""What vLLM's settings make of a model: identities differ where keys do. Small random models; no daemon."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm installs it")

import torch  # noqa: E402

from conftest import HERE, PATIENCE  # noqa: E402

LONG = {"rope_type": "longrope", "long_factor": [2.0] * 32, "short_factor": [1.0] * 32,
        "original_max_position_embeddings": 512, "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
SHAPE = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 2048,
         "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder of folders."""
    from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(20261128)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(folder / "llama")
    rope = {k: v for k, v in LONG.items() if k != "rope_theta"}
    phi = Phi3Config(**SHAPE)
    phi.rope_parameters, phi.original_max_position_embeddings = LONG, rope["original_max_position_embeddings"]
    Phi3ForCausalLM(phi).save_pretrained(folder / "phi3")
    return folder


def identities(models: pathlib.Path, settings: list[dict[str, Any]]) -> tuple[list[list[Any]], list[list[str]]]:
    spec = models / f"spec-{len(list(models.iterdir()))}.json"
    usual = {"model": str(models / "llama"), "dtype": "float32", "seed": 0, "max_model_len": 256}
    spec.write_text(json.dumps([{**usual, **setting} for setting in settings]))
    ran = subprocess.run([sys.executable, str(HERE / "identities.py"), str(spec)], capture_output=True, text=True,
                         timeout=PATIENCE, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert ran.returncode == 0, ran.stderr[-9000:]
    *digests, changes = map(json.loads, ran.stdout.splitlines())
    return digests, changes


def test_settings(models: pathlib.Path):
    """Each gives another identity, and the same again. None is private."""
    settings = [{}, {"hf_overrides": {"rms_norm_eps": 0.05}},
                {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}},
                {"load_format": "dummy"}, {"dtype": "bfloat16"},
                {"model": str(models / "phi3"), "max_model_len": 512},
                {"model": str(models / "phi3"), "max_model_len": 1024}]
    found, _ = identities(models, settings)
    again, changes = identities(models, settings[::-1])
    assert found == again[::-1]
    assert [private for _, private in found] == [None] * len(settings)
    digests = [digest for digest, _ in found]
    assert len({*digests}) == len(settings), digests
    # What is done to a model while it is served is noticed, each time.
    assert len({digests[0], *(digest for _, digest in changes)}) == 1 + len(changes), changes


def test_settings_that_change_no_key_share(models: pathlib.Path):
    found, _ = identities(models, [{}, {"max_model_len": 512}, {"gpu_memory_utilization": 0.3, "max_num_seqs": 3},
                                   {"seed": 7}, {"model": str(models / "phi3"), "max_model_len": 256},
                                   {"model": str(models / "phi3"), "max_model_len": 512}])
    assert len({digest for digest, _ in found}) == 2, found


def test_what_vllm_requires_is_known_without_a_list_of_its_files(tmp_path: pathlib.Path,
                                                                 monkeypatch: pytest.MonkeyPatch):
    """As it is where vLLM was unpacked, not installed; its configurations' classes have functions of pydantic's."""
    from kvstrata_vllm import loaded
    (tmp_path / "vllm-0.32.0.dist-info").mkdir()
    (tmp_path / "vllm-0.32.0.dist-info" / "METADATA").write_text("Name: vllm\nRequires-Dist: pydantic>=2.12\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    by_package = {"pydantic": ["pydantic"], "torch": ["torch"]}
    monkeypatch.setattr(loaded.importlib.metadata, "packages_distributions", lambda: by_package)
    loaded.trusted.cache_clear()
    assert "pydantic" in loaded.trusted() and "vllm" in loaded.trusted()
    loaded.trusted.cache_clear()


ROPE = {"default": {}, "linear": {"factor": 4.0}, "dynamic": {"factor": 4.0}, "ntk": {"factor": 4.0},
        "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                   "original_max_position_embeddings": 512},
        "yarn": {"factor": 4.0, "original_max_position_embeddings": 512}, "longrope": LONG}


@pytest.mark.parametrize("kind", sorted(ROPE))
@pytest.mark.parametrize("max_model_len", [256, 1024])
def test_keys_do_not_depend_on_what_follows(kind: str, max_model_len: int, monkeypatch: pytest.MonkeyPatch):
    """For each kind of RoPE that serves text in vLLM a short prompt's keys are those of a long one's beginning."""
    from types import SimpleNamespace

    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope, phi3_long_rope_scaled_rope
    monkeypatch.setattr(phi3_long_rope_scaled_rope, "get_current_vllm_config",
                        lambda: SimpleNamespace(model_config=SimpleNamespace(max_model_len=max_model_len)))
    with set_current_vllm_config(VllmConfig()):
        rope = get_rope(64, max_position=2048, dtype=torch.float32, rope_parameters={
            "rope_theta": 10000.0, **ROPE[kind], "rope_type": kind, "max_model_len": max_model_len})
        torch.manual_seed(1)
        q, k = torch.randn(900, 128), torch.randn(900, 64)
        native = getattr(rope, "forward_native", rope.forward)
        _, long = native(torch.arange(900), q.clone(), k.clone())
        _, short = native(torch.arange(100), q[:100].clone(), k[:100].clone())
    assert torch.equal(short, long[:100])
