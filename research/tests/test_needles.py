# SPDX-License-Identifier: Apache-2.0
"""research/needles.py on a tiny random model: rows change places and nothing else, and what is counted is what a
real daemon's plans chose."""

from __future__ import annotations

import argparse

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import needles
import tiny_gguf
from chat import Chat
from kvstrata_numpy import gguf_file
from kvstrata_numpy.tokenizer import Tokenizer

ARGS = argparse.Namespace(tokens=4 * 3072, segment=3072, prompts=2, seed="1", device="cpu", mass=0.0, pool="512MiB", threads=2)
PLANS = {"all": "bits{budget = 100000, min_tokens = 0}",
         "few": "bits{budget = 64, min_tokens = 0}",
         "none": "window{n_sink = 4, n_recent = 16, min_tokens = 0}"}


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> tuple[needles.Recorder, Chat]:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(gguf_file.read(tiny_gguf.write(folder / "x.gguf")))
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer.vocabulary), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, tie_word_embeddings=True, initializer_range=0.2)).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return needles.Recorder(folder, torch.device("cpu"), torch.float32), Chat(folder)


@pytest.fixture(scope="module")
def planted(recorder: tuple[needles.Recorder, Chat]) -> needles.Planted:
    model, chat = recorder
    return needles.plant(model, model.attention(None), turn(model), chat, ARGS)


def turn(model: needles.Recorder):
    return model.rope(model.shape.rope_theta, ARGS.segment + 2 * needles.SLACK)


def test_a_needles_rows_change_places_and_nothing_else(recorder, planted):
    model, chat = recorder
    weights = model.attention(None)
    for prompt, segment, needle in zip(planted.prompts, planted.segments, planted.needles):
        alone = model.record(prompt.ids, 1, weights, turn(model)).keys
        own = slice(prompt.needle.start, prompt.needle.stop)
        torch.testing.assert_close(planted.keys[:, :, needle.start:needle.stop], alone[:, :, own], rtol=0, atol=0)
        changed = (segment.keys != alone).any(-1).any(1).any(0).nonzero().flatten()
        assert own.start - needles.BEFORE <= int(changed.min()) and int(changed.max()) < own.stop + 2
        assert chat.decode(prompt.ids[own]).strip(" :.") in chat.decode(prompt.ids[prompt.prompt:])


def test_shares_are_of_what_the_daemon_chose(planted):
    found = needles.measure(planted, PLANS, ARGS)
    of = {name: needles.mean_over_layers(some) for name, some in found.items()}
    assert of["all"][0] == 1 and of["all"][1] == 2 and of["all"][2] > 0
    assert of["none"][0] == 0
    assert 0 < of["few"][0] < 1


def test_a_haystack_that_is_too_short_is_refused(recorder):
    model, chat = recorder
    few = argparse.Namespace(**{**vars(ARGS), "tokens": 2 * ARGS.segment})
    with pytest.raises(SystemExit, match="segments of 3072 tokens are too few"):
        needles.plant(model, model.attention(None), turn(model), chat, few)
