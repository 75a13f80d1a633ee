# SPDX-License-Identifier: Apache-2.0
"""Plans get what they need, and choose what direct calls with the same keys and queries choose."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

import kvstrata
import kvstrata_transformers
from conftest import batch_of

NEW = 24
CHESS = "chess{min_tokens = 0, page = 16, window = 2, trigger = \"every\"}"


@dataclass
class Recorded:
    """What a cache passed to the binding, and what the plan chose."""

    ids: list[np.ndarray] = field(default_factory=list)
    tensors: list[dict[int, list[torch.Tensor]]] = field(default_factory=list)  # a step: layer -> k, v, q
    chosen: list[dict[int, list[np.ndarray]]] = field(default_factory=list)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    record = Recorded()
    begin, append, attend = kvstrata.Session.step, kvstrata.Step.append, kvstrata.Step.attend

    def stepping(self: kvstrata.Session, members: Any, *args: Any) -> kvstrata.Step:
        members = list(members)
        record.ids.append(members[0][1].copy())
        record.tensors.append({})
        record.chosen.append({})
        return begin(self, members, *args)

    def appending(self: kvstrata.Step, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        record.tensors[-1][layer] = [k.clone(), v.clone()]
        append(self, layer, k, v)

    def attending(self: kvstrata.Step, layer: int, q: torch.Tensor, *args: Any) -> torch.Tensor:
        record.tensors[-1][layer].append(q.clone())
        out = attend(self, layer, q, *args)
        record.chosen[-1][layer] = self.selected_tokens()
        return out

    monkeypatch.setattr(kvstrata.Session, "step", stepping)
    monkeypatch.setattr(kvstrata.Step, "append", appending)
    monkeypatch.setattr(kvstrata.Step, "attend", attending)
    yield record
    monkeypatch.undo()


@pytest.mark.parametrize(("plan", "begin"), [  # each its own prompt, which nobody holds
    ("quest{budget = 64, min_tokens = 0}", 3000), ("bits{budget = 64, min_tokens = 0}", 3001),
    ("tokenselect{k = 64, n_init = 16, n_local = 32, min_tokens = 0}", 3002)])
def test_the_same_tokens_are_chosen(model, text_ids, recorded: Recorded, monkeypatch: pytest.MonkeyPatch, plan: str,
                                    begin: int):
    cache = kvstrata_transformers.cache(model, plan)
    batch = batch_of([text_ids[begin:begin + 400]], 2)
    model.generate(**batch, past_key_values=cache, max_new_tokens=NEW, do_sample=False, min_new_tokens=NEW)
    assert cache.rows[0].sequence.status == "ok"
    monkeypatch.undo()
    served = cache.rows[0].sequence.model
    with cache.session.open(served, plan) as sequence:
        for number, (ids, tensors, chosen) in enumerate(zip(recorded.ids, recorded.tensors, recorded.chosen)):
            with cache.session.step([(sequence, ids)]) as step:
                for layer, (k, v, q) in tensors.items():
                    step.append(layer, k, v)
                    step.attend(layer, q)
                    for a, b in zip(step.selected_tokens(), chosen[layer], strict=True):
                        np.testing.assert_array_equal(a, b)
            if number == 0:
                sequence.prefill_done()
    assert len(recorded.ids) == NEW
    last = recorded.chosen[-1][0]
    assert all(len(tokens) < 400 + NEW for tokens in last), "the plan chose nothing"
    cache.close()


@pytest.mark.parametrize("plan", ["sekv{min_tokens = 0, local = 32}", CHESS,
                                  "sentencekv{min_tokens = 0, tau = 64}", "mosaickv{min_tokens = 0}"])
@pytest.mark.parametrize("chunk", [None, 128])
def test_plans_get_their_series(model, text_ids, plan: str, chunk: int | None):
    batch = batch_of([text_ids[4000:4300]], 2)
    for held in (False, True):
        cache = kvstrata_transformers.cache(model, plan)
        model.generate(**batch, past_key_values=cache, max_new_tokens=12, do_sample=False, prefill_chunk_size=chunk)
        cache.rows[0].sequence.settle()
        status = cache.rows[0].sequence.status
        assert not any(word in status for word in ("not reported", "boundar", "did not pass", "prefill")), status
        cache.close()


def test_surprisals_are_those_of_the_logits(plain, model, text_ids):
    ids = torch.tensor([text_ids[5000:5200]])
    cache = kvstrata_transformers.cache(model, "sekv{min_tokens = 0}")
    model.generate(ids, past_key_values=cache, max_new_tokens=1, prefill_chunk_size=70)
    with torch.no_grad():
        log_p = torch.log_softmax(plain(ids).logits[0, :-1], -1)
    want = -log_p.gather(1, ids[0, 1:, None])[:, 0].numpy()
    row = cache.rows[0]
    assert row.sequence.held == 0
    np.testing.assert_allclose(row.surprisal[1:], want, atol=1e-3)
    cache.close()


def test_no_plan_pays_for_what_it_does_not_need(model, text_ids):
    for plan, wanted in (("full", False), ("quest", False), ("sekv", True)):
        cache = kvstrata_transformers.cache(model, plan)
        model.generate(torch.tensor([text_ids[:50]]), past_key_values=cache, max_new_tokens=1)
        assert (cache.rows[0].surprisal is not None) == wanted
        cache.close()


def test_plans_side_by_side_are_each_by_itself(model, text_ids, recorded: Recorded):
    """A plan a row: what a row's plan chooses, and its logits, are those of a batch that it has alone."""
    plans = ["full", "quest{budget = 64, min_tokens = 0}", "bits{budget = 64, min_tokens = 0}", CHESS]
    ids, more = text_ids[6000:6400], text_ids[6400:6404]

    def decoded(of: list[str]) -> torch.Tensor:
        cache = kvstrata_transformers.cache(model, of)
        with torch.no_grad():
            model(torch.tensor([ids] * len(of)), past_key_values=cache, use_cache=True, logits_to_keep=1)
            logits = [model(torch.tensor([[token]] * len(of)), past_key_values=cache, use_cache=True).logits[:, -1]
                      for token in more]
        assert [row.sequence.plan.split("{")[0] for row in cache.rows] == [plan.split("{")[0] for plan in of]
        cache.close()
        return torch.stack(logits, 1)  # [row][step][vocabulary]

    together = decoded(plans)
    for row, plan in enumerate(plans):
        torch.testing.assert_close(together[row], decoded([plan])[0], rtol=1e-3, atol=2e-3)
    assert not torch.equal(together[0], together[1]), "quest read everything"


def test_plans_that_do_not_divide_a_batch_are_refused(model, text_ids):
    cache = kvstrata_transformers.cache(model, ["full", "quest"])
    with pytest.raises(ValueError, match="2 plans for a batch of 3 rows"), torch.no_grad():
        model(torch.tensor([text_ids[:20]] * 3), past_key_values=cache, use_cache=True)
    assert not cache.rows
