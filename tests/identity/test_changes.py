# SPDX-License-Identifier: Apache-2.0
"""What changes while a model lives is noticed by the next now(), costs no more than it must, and keeps nothing alive."""

from __future__ import annotations

import copy
import gc
import pathlib
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import kvstrata.torch_identity
import numpy as np
import pytest
import torch
from kvstrata.torch_identity import LoadedModel
from kvstrata_transformers.identity import ModelIdentity, identity_of
from small_models import KINDS, built, config_of, model_of, original
from transformers import AutoModelForCausalLM


@pytest.fixture
def model() -> Any:
    return model_of("llama")


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """What runs in the background of a test ends with it."""
    yield
    for thread in threading.enumerate():
        if thread.name == "kvstrata-identity":
            thread.join()


@pytest.fixture
def summed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors each round of sums was of."""
    rounds: list[int] = []
    made = kvstrata.torch_identity.tensor_sums

    def counted(tensors: Any, *args: Any, **kwargs: Any) -> list[bytes]:
        tensors = list(tensors)
        rounds.append(len(tensors))
        return made(tensors, *args, **kwargs)

    monkeypatch.setattr(kvstrata.torch_identity, "tensor_sums", counted)
    return rounds


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_another_process_would_find_the_same(kind: str):
    assert ModelIdentity(built(config_of(kind))).now() == ModelIdentity(original(kind)).now()
    assert ModelIdentity(built(config_of(kind), seed=2)).now() != ModelIdentity(original(kind)).now()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_files_make_the_same(kind: str, tmp_path: pathlib.Path):
    model = model_of(kind)
    live = ModelIdentity(model)
    before = live.now()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert before.private is None and live.now() == before == ModelIdentity(loaded).now()
    loaded.generate(torch.arange(3, 20)[None], max_new_tokens=3)
    assert ModelIdentity(loaded).now() == before
    other = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    assert ModelIdentity(other).now() != before


def test_back_as_it_was(model: Any):
    live = ModelIdentity(model)
    before = live.now()
    weight = model.model.layers[0].mlp.up_proj.weight
    kept = weight.detach().clone()
    weight.data.mul_(2)
    assert live.now() != before
    weight.data.copy_(kept)
    assert live.now() == before


def test_only_what_changed_is_summed_again(model: Any, summed: list[int]):
    live = ModelIdentity(model)
    tensors = len({tensor.data_ptr() for tensor in model.state_dict().values()}) + 2  # and two buffers that no file has
    assert summed == [tensors - 1] or summed == [tensors]
    live.now()
    model.model.norm.weight.data.mul_(2)
    live.now()
    model.model.layers[0].mlp.act_fn = torch.nn.ReLU()
    live.now()
    assert summed[1:] == [1, 0]


def test_a_piece_that_no_sample_saw_is_found_in_the_background(model: Any):
    live = ModelIdentity(model, resum_every=1)
    before, weight = live.now().digest, model.model.embed_tokens.weight
    weight.data[7, 3:5] += 1.0
    live.now()  # starts the background's sums, if the sample saw nothing
    live._background.wait()
    assert live.now().digest != before


class Slotted:
    """Keeps what it has where no dict is."""

    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 1.0


@pytest.mark.parametrize("change", [lambda m: m.table.__setitem__(1, 5.0), lambda m: setattr(m.slotted, "factor", 2.0)])
def test_what_no_check_sees_is_found_in_the_background(change: Any):
    model = Hidden()
    model.table, model.slotted = np.zeros(3), Slotted()
    live = LoadedModel(model, engine="test", resum_every=1)
    before = live.now().digest
    live._background.wait()
    assert live.now().digest == before
    live._background.wait()
    change(model)
    live.now()
    live._background.wait()
    assert live.now().digest != before


def test_declared_changes_are_found(model: Any):
    live = ModelIdentity(model, resum_every=0)
    before, weight = live.now().digest, model.model.embed_tokens.weight
    weight.data[7, 3:5] += 1.0
    live.declare_changed()
    assert live.now().digest != before


def test_the_background_finds_nothing_where_nothing_changed(model: Any, summed: list[int]):
    live = ModelIdentity(model, resum_every=2)
    before = live.now()
    for _ in range(6):
        assert live.now() == before
        live._background.wait()
    assert summed == [summed[0]] * 4  # the first, and each second of six


def test_the_background_does_not_hold_up_who_asks(model: Any, monkeypatch: pytest.MonkeyPatch):
    live, begun, go = ModelIdentity(model, resum_every=1), threading.Event(), threading.Event()

    def slow(tensors: Any, **kwargs: Any) -> list[bytes]:
        begun.set()
        assert go.wait(60)
        return [b"\0" * 16 for _ in tensors]

    monkeypatch.setattr(kvstrata.torch_identity, "tensor_sums", slow)
    before = live.now()
    assert begun.wait(60) and live.now() == before
    live.close()  # what it finds is of no use any more
    go.set()
    live._background.wait()
    assert live.now() == before


def test_a_given_digest_stands_for_what_is_there(model: Any, summed: list[int]):
    live = ModelIdentity(model, "mine", resum_every=1)
    assert sum(summed) == 0 and live.now() == ("mine", None)
    live._background.wait()
    assert live.now() == ("mine", None)
    live._background.wait()
    model.model.norm.weight.data.mul_(2)
    changed = live.now()
    assert changed.digest != "mine" and changed.private is None
    other = model_of("llama")
    again = ModelIdentity(other, "mine")
    other.model.norm.weight.data.mul_(2)
    assert again.now() == changed
    other.model.norm.weight.data.mul_(2)
    assert again.now() != changed


def test_a_given_digest_excuses_what_was_there(model: Any):
    model.model.layers[0].register_forward_hook(lambda *args: None)
    model.model.layers[1].mlp.up_proj.forward = lambda x: x
    assert ModelIdentity(model).now().private is not None
    live = ModelIdentity(model, "mine")
    assert live.now() == ("mine", None)
    model.model.layers[1].mlp.down_proj.forward = lambda x: x
    assert "down_proj" in str(live.now().private)


def test_an_identity_is_kept_with_its_model(model: Any, summed: list[int]):
    live = identity_of(model)
    assert identity_of(model) is live and len(summed) == 1
    assert identity_of(model, "mine") is not live
    copied = copy.deepcopy(model)
    assert identity_of(copied) is not identity_of(model, "mine")
    assert identity_of(copied).now() == live.now()


def test_nothing_is_kept_alive(model: Any):
    live = ModelIdentity(model)
    weight = weakref.ref(model.model.norm.weight)
    model.model.norm.weight = torch.nn.Parameter(torch.ones(64))
    assert weight() is None and live.now()


def test_a_model_goes_with_its_identity():
    model = model_of("llama")
    identity_of(model).now()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_inference_tensors():
    with torch.inference_mode():
        model = built(config_of("llama"))
    live = ModelIdentity(model)
    before = live.now()
    assert before == ModelIdentity(original("llama")).now()
    with torch.inference_mode():
        model.model.norm.weight.mul_(2)
    assert live.now() != before


class Hidden(torch.nn.Module):
    """Has a module, a tensor and a buffer that torch does not know of."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [torch.nn.Linear(4, 4)]
        self.options = {"scale": torch.ones(3), "names": ["a"]}
        self.empty = torch.nn.Parameter(torch.empty(0))
        self.scalar = torch.nn.Buffer(torch.tensor(1.5))
        self.every = torch.ones(6, 4).t()[:, ::2]


@pytest.mark.parametrize("change", [
    lambda m: m.layers[0].weight.data.mul_(2), lambda m: m.layers.append(torch.nn.Linear(4, 4)),
    lambda m: m.options["scale"].add_(1), lambda m: m.options.update(scale=torch.zeros(3)),
    lambda m: m.options["names"].append("b"), lambda m: m.options.update(more=1), lambda m: m.scalar.data.mul_(2),
    lambda m: m.every.data.mul_(2), lambda m: m.register_buffer("late", torch.ones(1)),
    lambda m: setattr(m.layers[0], "in_features", 5), lambda m: m.train(not m.training),
    lambda m: setattr(m, "options", {"scale": m.options["scale"], "names": ["b"]})])
def test_what_torch_does_not_know_of(change: Any):
    torch.manual_seed(0)
    model = Hidden()
    live = LoadedModel(model, engine="test")
    before = live.now()
    assert before.private is None and live.now() == before
    change(model)
    after = live.now()
    assert after.digest != before.digest
    assert after == LoadedModel(model, engine="test").now()


class Alike:
    """Says that it is equal to everything."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return True


def test_what_says_that_it_is_equal_is_looked_at():
    model = Hidden()
    model.options["thing"] = Alike(1)
    live = LoadedModel(model, engine="test")
    before = live.now().digest
    model.options["thing"] = Alike(2)
    assert live.now().digest != before


@pytest.mark.parametrize("setting", [{"engine": "other"}, {"dtype": "float16"}, {"settings": {"a": 1}},
                                     {"config": {"a": 1.5}}])
def test_what_the_engine_says_counts(setting: dict[str, Any]):
    model = Hidden()
    assert LoadedModel(model, **{"engine": "test", **setting}).now() != LoadedModel(model, engine="test").now()


def test_a_check_costs_little(model: Any):
    """Against the walk that it spares, since a machine is as fast as it is."""
    live = ModelIdentity(model)

    def best(run: Any) -> float:
        times = []
        for _ in range(20):
            begin = time.thread_time()
            run()
            times.append(time.thread_time() - begin)
        return min(times)

    assert live.holds() and best(live.holds) * 20 < best(live._look)
