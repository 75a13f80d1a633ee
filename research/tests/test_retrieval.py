# SPDX-License-Identifier: Apache-2.0
"""research: the forward pass that trains against transformers, a training that stops and goes on against one
that does not, the merged folder against the adapted model, and prompts as the plans' measurement cuts them. On a
tiny random model."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import generated
import tasks
import tiny_gguf
import tuned
from chat import Chat
from evaluate import adapt
from kvstrata_numpy import gguf_file
from kvstrata_numpy.tokenizer import Tokenizer
from lora_llama import Llama

ROOT = pathlib.Path(__file__).resolve().parents[2]

LENGTH, STEPS = 3072, 4
CPU = torch.device("cpu")
CHATML = ("{% for turn in messages %}<|im_start|>{{ turn['role'] }}\n{{ turn['content'] }}<|im_end|>\n{% endfor %}"
          "<|im_start|>{{ 'assistant\n' }}")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(gguf_file.read(tiny_gguf.write(tmp_path_factory.mktemp("gguf") / "x.gguf")))


@pytest.fixture(scope="module")
def folder(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    made = tmp_path_factory.mktemp("model")
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer.vocabulary), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
        tie_word_embeddings=True, initializer_range=0.2, bos_token_id=1, eos_token_id=2)).save_pretrained(made)
    tokenizer.save(str(made / "tokenizer.json"))
    (made / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHATML}))
    return made


def trained(folder: pathlib.Path, out: pathlib.Path, *more: str) -> list[dict]:
    """The log's lines, without what a clock says."""
    options = {"--model": folder, "--out": out, "--state": out / "state", "--device": "cpu", "--workers": 2,
               "--steps": STEPS, "--tokens": 2 * LENGTH, "--shortest": LENGTH, "--longest": LENGTH, "--log-every": 1,
               "--evaluation-samples": 1, "--evaluation-lengths": LENGTH}
    subprocess.run([sys.executable, ROOT / "research/train_retrieval.py",
                    *(str(part) for pair in options.items() for part in pair), *more], check=True)
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("seconds", "tokens_a_second")} for line in lines]


@pytest.fixture(scope="module")
def whole(folder: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, list[dict]]:
    out = tmp_path_factory.mktemp("whole")
    return out, trained(folder, out)


def test_stopped_and_gone_on_is_as_if_not_stopped(folder: pathlib.Path, whole: tuple[pathlib.Path, list[dict]],
                                                  tmp_path: pathlib.Path):
    trained(folder, tmp_path, "--stop-at", "2", "--evaluation-lengths")
    resumed = trained(folder, tmp_path, "--evaluation-lengths")
    assert [line for line in resumed if "loss" in line] == [line for line in whole[1] if "loss" in line]
    assert len(resumed) == STEPS + 2
    assert (tmp_path / "weights.safetensors").read_bytes() == (whole[0] / "weights.safetensors").read_bytes()


def test_the_evaluation_has_every_task_that_fits(whole: tuple[pathlib.Path, list[dict]]):
    assert set(whole[1][-1]["evaluation"][str(LENGTH)]) >= {"niah_single_1", "niah_multikey_2", "vt", "fwe"}


def test_the_merged_folder_is_the_adapted_model_and_transformers_agrees(
        folder: pathlib.Path, whole: tuple[pathlib.Path, list[dict]], tmp_path: pathlib.Path):
    adapter = tuned.read(whole[0] / "adapter.safetensors")
    tuned.write(folder, adapter, tmp_path / "merged")
    llama = Llama(folder, CPU, torch.float32)
    adapt(llama, adapter)
    weights, turn = llama.attention(None), llama.rope(adapter.rope_theta, 100)
    ids = torch.randint(3, 200, (1, 60), generator=torch.Generator().manual_seed(1))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        ours = llama.logits(llama.hidden(ids, weights, turn))
        torch.testing.assert_close(ours, theirs(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
        assert (ours - base(input_ids=ids).logits).abs().max() > 0.01
    with pytest.raises(FileExistsError):
        tuned.write(folder, adapter, tmp_path / "merged")


def test_greedy_answers_of_a_batch_are_those_of_transformers(folder: pathlib.Path):
    llama = Llama(folder, CPU, torch.float32)
    prompts = [list(range(10, 10 + n)) for n in (7, 40, 23)]
    found = llama.answers(prompts, llama.attention(None), llama.rope(llama.shape.rope_theta, 80), 12, stop=2)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for prompt, said in zip(prompts, found):
        ids = torch.tensor([prompt])
        expected = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False,
                                   eos_token_id=2)
        expected = expected[0, len(prompt):].tolist()
        assert said == (expected[:expected.index(2)] if 2 in expected else expected)


def test_prompts_are_cut_as_plans_are_asked_them(folder: pathlib.Path):
    chat, theirs = Chat(folder), AutoTokenizer.from_pretrained(folder)
    for task in ("vt", "niah_multiquery", "fwe"):
        sample = generated.sample(task, 3, 9000, len)
        ids, _ = tasks.ids_of(tasks.prompt_of(f"1/{task}/0", sample), theirs)
        assert chat.of_ruler(sample) == ids
