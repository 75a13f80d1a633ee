# SPDX-License-Identifier: Apache-2.0
"""One guard of identity left out at a time: two models that differ in just what it sees then share pages wrongly, and
KVSTRATA_VERIFY=1 finds it. With all guards in place nothing of one is hit by the other."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvstrata import identity as rule
from kvstrata import torch_identity
from kvstrata.daemon import Daemon
from kvstrata.torch_identity import LoadedModel
from kvstrata.torch_snapshot import Snapshot
from kvstrata_transformers import columns, identity
from served_models import answer, columns_of, ids_of, small

import kvstrata
import kvstrata_transformers

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")
TOKENS = 70
Patch = pytest.MonkeyPatch
Change = Callable[[Any], Any]  # changes a model that nobody has enabled; gives what to enable
gone = pytest.mark.parametrize("gone", [False, True], ids=["in place", "gone"])


@pytest.fixture
def daemon(monkeypatch: Patch) -> Iterator[Daemon]:
    monkeypatch.setenv("KVSTRATA_VERIFY", "1")
    with Daemon() as started:
        yield started


def same(model: Any) -> Any:
    return model


def enabled(daemon: Daemon, change: Change = same, **config: Any) -> Any:
    model = change(small(**config))
    kvstrata_transformers.enable(model, socket=daemon.socket)
    return model


def check(gone: bool, model: Any, **options: Any) -> None:
    """model is another one than what computed the first TOKENS of ids_of(150)."""
    prompt = ids_of(150)[:, :TOKENS]
    if gone:
        with pytest.raises(kvstrata.DataLoss, match="HIT_MISMATCH"):
            answer(model, prompt, **options)
        return
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    with columns_of(inner) as seen:
        answer(model, prompt, **options)
    assert seen[0] == TOKENS


# What the document of a model says

def without(patch: Patch, cut: Callable[[dict[str, Any]], object]) -> None:
    """`cut` takes out of documents what a guard says."""
    made = LoadedModel._document

    def document(self: LoadedModel, walk: Any) -> dict[str, Any]:
        of = copy.deepcopy(made(self, walk))
        cut(of)
        return of

    patch.setattr(LoadedModel, "_document", document)


def attributes(of: dict[str, Any]) -> None:
    """And the configuration, which says the same of a model that was built from it."""
    of["config"] = None
    for entry in of["modules"].values():
        entry.pop("attributes", None)


def classes(of: dict[str, Any]) -> None:
    for entry in of["modules"].values():
        entry.pop("class", None)


def sums(of: dict[str, Any]) -> None:
    for tensor in of["tensors"].values():
        tensor[2] = None


def adapters_tensors(of: dict[str, Any]) -> None:
    for name, tensor in of["tensors"].items():
        if "lora_" in name:
            tensor[2] = None


def adapters_attributes(of: dict[str, Any]) -> None:
    for entry in of["modules"].values():
        if str(entry.get("class")).startswith("peft."):
            entry.pop("attributes")


def other_epsilon(model: Any) -> Any:
    model.model.layers[0].input_layernorm.variance_epsilon = 0.5
    return model


def other_activation(model: Any) -> Any:
    """Which has no attributes either."""
    model.model.layers[0].mlp.act_fn = torch.nn.Tanh().eval()
    return model


def other_weight(model: Any) -> Any:
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.1)
    return model


def with_adapter(model: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=4, target_modules=["v_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config).eval()


def other_adapter(model: Any) -> Any:
    return with_adapter(model, 1)


def scaled_adapter(model: Any) -> Any:
    model = with_adapter(model)
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["default"] *= 2
    return model


@gone
@pytest.mark.parametrize(("guard", "first", "second"), [
    (attributes, same, other_epsilon), (classes, same, other_activation), (sums, same, other_weight),
    (adapters_tensors, with_adapter, other_adapter), (adapters_attributes, with_adapter, scaled_adapter),
], ids=lambda x: x.__name__)
def test_what_a_document_says(daemon: Daemon, monkeypatch: Patch, gone: bool, guard: Any, first: Change, second: Change):
    if gone:
        without(monkeypatch, guard)
    answer(enabled(daemon, first), ids_of(150))
    check(gone, enabled(daemon, second))


@gone
def test_the_configuration(daemon: Daemon, monkeypatch: Patch, gone: bool):
    """Said twice: by itself, and by what modules made of it."""
    if gone:
        without(monkeypatch, attributes)
    answer(enabled(daemon), ids_of(150))
    check(gone, enabled(daemon, rms_norm_eps=0.5))


@gone
def test_the_precision_of_products(daemon: Daemon, monkeypatch: Patch, gone: bool):
    if gone:
        without(monkeypatch, lambda of: of.pop("compute"))
    answer(enabled(daemon), ids_of(150))
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        model = enabled(daemon)
        x = torch.ones(64, 128) * (1 + 2**-12)  # 1 in bf16
        if gone and float((x @ x.T)[0, 0]) > 128:
            pytest.skip("this processor multiplies float32 in float32 alone")
        check(gone, model)
    finally:
        torch.set_float32_matmul_precision(precision)


# What makes a model private

def hooked(model: Any) -> Any:
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: 1.5 * output)
    return model


def by_a_lambda(factor: float) -> Change:
    def change(model: Any) -> Any:
        linear = model.model.layers[0].mlp.up_proj
        plain = linear.forward
        linear.forward = lambda x: factor * plain(x)
        return model
    return change


def random_in_training(seed: int) -> Change:
    def change(model: Any) -> Any:
        model.model.layers[0].mlp.act_fn = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Dropout(0.5))
        torch.manual_seed(seed)
        return model.train()
    return change


def no_hooks(patch: Patch) -> None:
    patch.setattr(Snapshot, "hooked", lambda self, own: None)


def no_unknown(patch: Patch) -> None:
    patch.setattr(rule.Walk, "refuse", lambda self, path, what: {"unknown": what})


def no_random(patch: Patch) -> None:
    patch.setattr(Snapshot, "random", lambda self: None)


@gone
@pytest.mark.parametrize(("guard", "first", "second"), [
    (no_hooks, same, hooked), (no_unknown, by_a_lambda(0.5), by_a_lambda(2)),
    (no_random, random_in_training(1), random_in_training(2))], ids=["hooks", "lambdas", "dropout"])
def test_what_is_private(daemon: Daemon, monkeypatch: Patch, gone: bool, guard: Any, first: Change, second: Change):
    if gone:
        guard(monkeypatch)
    answer(enabled(daemon, first), ids_of(150))
    check(gone, enabled(daemon, second))


@gone
def test_autocast(daemon: Daemon, monkeypatch: Patch, gone: bool):
    if gone:
        monkeypatch.setattr(torch_identity, "_of_the_moment", lambda devices: None)
    model = enabled(daemon)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        answer(model, ids_of(150))
    check(gone, model)


@gone
def test_rope_that_goes_by_the_length(daemon: Daemon, monkeypatch: Patch, gone: bool):
    """A long prompt's first pages, for a short one; of two models, since one notes in its buffers what it has seen."""
    if gone:
        monkeypatch.setattr(identity, "rope_depends_on_length", lambda model: None)
    config = {"max_position_embeddings": 80, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}
    answer(enabled(daemon, **config), ids_of(150))
    check(gone, enabled(daemon, **config))


@gone
def test_positions_of_the_callers(daemon: Daemon, monkeypatch: Patch, gone: bool):
    if gone:
        monkeypatch.setattr(columns, "_positions", lambda given, ids, past: torch.arange(past, past + ids.shape[1])[None])
    model = enabled(daemon)
    prompt = ids_of(150)
    answer(model, {"input_ids": prompt, "attention_mask": torch.ones_like(prompt),
                   "position_ids": torch.arange(150)[None] * 2})
    check(gone, model)


# What is looked at while a model lives

@gone
@pytest.mark.parametrize("change", [other_weight, other_epsilon, other_activation, hooked], ids=lambda x: x.__name__)
def test_looking_before_each_generate(daemon: Daemon, monkeypatch: Patch, gone: bool, change: Change):
    model = enabled(daemon)
    answer(model, ids_of(150))
    if gone:
        monkeypatch.setattr(Snapshot, "begin", lambda self: SimpleNamespace(hold=lambda: True))
        no_hooks(monkeypatch)
    change(model)
    check(gone, model)


def write_unseen(model: Any) -> None:
    """One number that no sample looks at."""
    model.model.layers[0].mlp.up_proj.weight.detach().numpy()[77, 33] += 5


@gone
def test_sums_in_the_background(daemon: Daemon, monkeypatch: Patch, gone: bool):
    monkeypatch.setattr(torch_identity, "RESUM_EVERY", 0 if gone else 1)
    model = enabled(daemon)
    answer(model, ids_of(150))
    write_unseen(model)
    if not gone:
        answer(model, ids_of(150, 1))
        identity.identity_of(model)._background.wait()
    check(gone, model)


@gone
def test_declared_changes(daemon: Daemon, monkeypatch: Patch, gone: bool):
    monkeypatch.setattr(torch_identity, "RESUM_EVERY", 0)
    model = enabled(daemon)
    answer(model, ids_of(150))
    write_unseen(model)
    if not gone:
        kvstrata_transformers.changed(model)
    check(gone, model)


@gone
def test_disabled_meanwhile(daemon: Daemon, monkeypatch: Patch, gone: bool):
    """Nobody looks then, so enabled again the model is read anew."""
    monkeypatch.setattr(torch_identity, "RESUM_EVERY", 0)
    if gone:
        monkeypatch.setattr(LoadedModel, "declare_changed", lambda self: None)
    model = enabled(daemon)
    answer(model, ids_of(150))
    kvstrata_transformers.disable(model)
    write_unseen(model)
    kvstrata_transformers.enable(model, socket=daemon.socket)
    check(gone, model)
