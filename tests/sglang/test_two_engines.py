"""SGLang and transformers on one daemon: what one computed of a prompt the other does not compute again."""

from __future__ import annotations

import pathlib

import pytest
import torch
from kvstrata.daemon import Daemon
from transformers import AutoModelForCausalLM

from conftest import ROOT


@pytest.mark.parametrize("first", ["sglang", "transformers"])
def test_one_prompt(engine, folder: pathlib.Path, text_ids: list[int], monkeypatch: pytest.MonkeyPatch, first: str):
    monkeypatch.syspath_prepend(ROOT / "integrations" / "kvstrata_transformers" / "src")
    import kvstrata_transformers
    prompt = text_ids[1000:1700]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def by_transformers(socket: str) -> tuple[list[int], int]:
        kvstrata_transformers.enable(model, socket=socket)
        cache = kvstrata_transformers.cache(model)
        out = model.generate(torch.tensor([prompt]), past_key_values=cache, max_new_tokens=12, min_new_tokens=12,
                             do_sample=False)
        held = cache.rows[0].sequence.held
        kvstrata_transformers.disable(model)
        return out[0, len(prompt):].tolist(), held

    def by_sglang(socket: str) -> tuple[list[int], int]:
        row, = engine("full", [{"prompts": [prompt], "tokens": 12}], socket=socket)["batches"][0]
        return row["tokens"], row["held"]

    order = [by_sglang, by_transformers] if first == "sglang" else [by_transformers, by_sglang]
    with Daemon() as daemon:
        (tokens, held), (again, held_then) = (generate(daemon.socket) for generate in order)
    assert tokens == again
    assert (held, held_then) == (0, (len(prompt) - 1) // 32 * 32)
