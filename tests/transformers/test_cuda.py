# SPDX-License-Identifier: Apache-2.0
"""Models on a GPU: their tensors go in as they lie where the daemon's pages are that GPU's, else through host memory.

Of half precision logits are compared, up to where tokens part: pages of a GPU are not fp32. Needs torch, transformers,
pytest, a daemon and a library (KVSTRATAD, KVSTRATA_LIBRARY), and no network; skipped without a GPU.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from kvstrata.daemon import Daemon

import kvstrata
import kvstrata_transformers
from conftest import batch_of
from test_models import prompts, small
from test_plans import Recorded, recorded  # noqa: F401

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="SKIPPED: no GPU")

CLOSE = {torch.float16: {"rtol": 0.02, "atol": 0.02}, torch.bfloat16: {"rtol": 0.1, "atol": 0.1},
         torch.float32: {"rtol": 1e-3, "atol": 1e-3}}
WAYS = {"greedy": {}, "beams": {"num_beams": 3}, "chunks": {"prefill_chunk_size": 20},
        "look-up": {"prompt_lookup_num_tokens": 4}}
NEW = 24


@pytest.fixture(scope="module")
def gpu() -> Iterator[Daemon]:
    """Pages of the GPU."""
    with Daemon("--set", "pool.device=cuda", "--set", "pool.device_bytes=1GiB") as started:
        yield started
        assert started.process.poll() is None, f"kvstratad died:\n{started.said()}"


@contextlib.contextmanager
def enabled(kind: str, dtype: torch.dtype, daemon: Daemon, plan: str = "full") -> Iterator[tuple[Any, Any]]:
    """Plain and enabled, with the same weights."""
    plain = small(kind).to("cuda", dtype)
    model = copy.deepcopy(plain)
    kvstrata_transformers.enable(model, plan, socket=daemon.socket)
    yield plain, model
    kvstrata_transformers.disable(model)


def on_gpu(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: x.cuda() for name, x in batch.items()}


def assert_close(dtype: torch.dtype, want: Any, got: Any) -> None:
    """Logits [step][row][vocabulary] of each row, as long as its tokens are the same."""
    steps = min(len(want.logits), len(got.logits))
    begin = want.sequences.shape[1] - len(want.logits)
    for row in range(len(want.sequences)):
        parted = (want.sequences[row, begin:begin + steps] != got.sequences[row, begin:begin + steps]).nonzero()
        alike = int(parted[0]) + 1 if len(parted) else steps
        print(f"row {row}: {alike} of {steps} steps compared")
        for step in range(alike):
            torch.testing.assert_close(got.logits[step][row], want.logits[step][row], **CLOSE[dtype])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text"])
def test_tokens_through_host_memory(kind: str, way: str, daemon: Daemon, random: np.random.Generator):
    """A daemon without a GPU's pages; fp32 shows the same tokens."""
    with enabled(kind, torch.float32, daemon) as (plain, model):
        for lengths in ((70,),) if way == "look-up" else ((70,), (40, 9, 33)):
            batch = on_gpu(prompts(random, *lengths))
            for _ in range(2):  # the second time behind what is held
                want, got = (each.generate(**batch, **WAYS[way], do_sample=False, max_new_tokens=NEW)
                             for each in (plain, model))
                assert torch.equal(want, got)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "beams"])  # beams part by less than logits tell
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text"])
def test_logits_in_place(kind: str, dtype: torch.dtype, way: str, gpu: Daemon, random: np.random.Generator,
                         monkeypatch: pytest.MonkeyPatch):
    lent: set[str] = set()
    append = kvstrata.Step.append

    def appending(self: kvstrata.Step, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        lent.update((k.device.type, v.device.type))
        append(self, layer, k, v)

    monkeypatch.setattr(kvstrata.Step, "append", appending)
    with enabled(kind, dtype, gpu) as (plain, model):
        for lengths in ((70,),) if way == "look-up" else ((70,), (40, 9, 33), (300, 5, 64, 65, 31, 200, 7, 129)):
            batch = on_gpu(prompts(random, *lengths))
            for _ in range(2):
                want, got = (each.generate(**batch, **options, do_sample=False, max_new_tokens=NEW,
                                           return_dict_in_generate=True, output_logits=True)
                             for each, options in ((plain, {}), (model, WAYS[way])))
                assert_close(dtype, want, got)
    assert lent == {"cuda"}


def test_beams_in_place(gpu: Daemon, random: np.random.Generator):
    """Scores are those that plain transformers gives to the beams."""
    with enabled("llama", torch.float16, gpu) as (plain, model):
        batch = on_gpu(prompts(random, 60, 33))
        got = model.generate(**batch, num_beams=4, do_sample=False, max_new_tokens=NEW, return_dict_in_generate=True,
                             output_scores=True)
        mask = torch.nn.functional.pad(batch["attention_mask"], (0, NEW), value=1)
        with torch.no_grad():
            logits = plain(input_ids=got.sequences, attention_mask=mask, position_ids=mask.cumsum(1) - 1).logits
        log_p = torch.log_softmax(logits[:, -NEW - 1:-1].float(), -1)
        scores = log_p.gather(2, got.sequences[:, -NEW:, None])[..., 0].mean(1)
        torch.testing.assert_close(got.sequences_scores.float(), scores, **CLOSE[torch.float16])


def test_on_a_stream_of_the_caller(gpu: Daemon, random: np.random.Generator):
    with enabled("llama", torch.float16, gpu) as (plain, model), torch.cuda.stream(torch.cuda.Stream()):
        batch = on_gpu(prompts(random, 200, 31))
        want, got = (each.generate(**batch, do_sample=False, max_new_tokens=NEW, return_dict_in_generate=True,
                                   output_logits=True) for each in (plain, model))
        assert_close(torch.float16, want, got)


@pytest.mark.parametrize(("plan", "first"), [  # each its own prompt, which nobody holds
    ("quest{budget = 64, min_tokens = 0}", 3), ('quest{group = "softmax", budget = 64, min_tokens = 0}', 4),
    ("tokenselect{k = 64, n_init = 16, n_local = 32, min_tokens = 0}", 5),
    ('chess{min_tokens = 0, page = 16, window = 2, trigger = "every"}', 6)])
def test_the_same_tokens_are_chosen_in_place(plan: str, first: int, gpu: Daemon, random: np.random.Generator,
                                             recorded: Recorded, monkeypatch: pytest.MonkeyPatch):
    """What direct calls with the same keys and queries choose."""
    with enabled("llama", torch.float16, gpu, plan) as (_, model):
        cache = kvstrata_transformers.cache(model)
        batch = on_gpu(batch_of([[first, *random.integers(3, 500, 399).tolist()]], 0))
        model.generate(**batch, past_key_values=cache, max_new_tokens=NEW, do_sample=False)
        assert cache.rows[0].sequence.status == "ok"
        monkeypatch.undo()
        with cache.session.open(cache.rows[0].sequence.model, plan) as sequence:
            for number, (ids, tensors, chosen) in enumerate(zip(recorded.ids, recorded.tensors, recorded.chosen)):
                with cache.session.step([(sequence, ids)]) as step:
                    for layer, (k, v, q) in tensors.items():
                        step.append(layer, k, v)
                        step.attend(layer, q)
                        for a, b in zip(step.selected_tokens(), chosen[layer], strict=True):
                            np.testing.assert_array_equal(a, b)
                if number == 0:
                    sequence.prefill_done()
        assert all(len(tokens) < 400 + NEW for tokens in recorded.chosen[-1][0]), "the plan chose nothing"
        cache.close()


def test_what_a_gpu_does_not_serve_is_refused_by_enable(gpu: Daemon):
    for dtype, plan, named in ((torch.float32, "full", "dtype f32"), (torch.float16, "quest{rest = \"mean\"}", "rest")):
        model = small("llama").to("cuda", dtype)
        with pytest.raises(kvstrata.Unimplemented, match=named):
            kvstrata_transformers.enable(model, plan, socket=gpu.socket)
        assert "generate" not in vars(model) and not model._forward_hooks
